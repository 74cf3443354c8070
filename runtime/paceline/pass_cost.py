"""What a pass over several texts costs each of them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PassCost"]

# Of a pass of one row, while only passes of one number of rows have been seen.
_ASSUMED_ROW = 0.2
# What a pass counts after the next was seen.
_MEMORY = 0.98
# Rows beyond these are a prompt's: they would bend the line through the others.
_MOST_ROWS = 128


class PassCost:
    """Shares the seconds of passes out, by a straight line through what passes of so many rows have taken.

    A pass takes a + b·rows seconds. Of `texts` texts, each bears an equal part of a, which none of them could do
    without, and b for each row of its own: so a planner learns what one more row of its text adds, neither that it is
    free, as equal shares would say, nor that it costs its part of a, as shares by rows would.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._rows_2 = self._seconds = self._product = 0.0

    def share(self, seconds: float, rows: Sequence[int]) -> list[float]:
        """Take in a pass, and share its seconds out among texts that had so many `rows` in it."""
        total = sum(rows)
        if total <= _MOST_ROWS:
            self._observe(total, seconds)
        first, more = self._line()
        parts = [first / len(rows) + more * own for own in rows]
        whole = sum(parts)
        return [seconds * part / whole for part in parts]

    def _observe(self, rows: int, seconds: float) -> None:
        self._weight = _MEMORY * self._weight + 1
        self._rows = _MEMORY * self._rows + rows
        self._rows_2 = _MEMORY * self._rows_2 + rows * rows
        self._seconds = _MEMORY * self._seconds + seconds
        self._product = _MEMORY * self._product + rows * seconds

    def _line(self) -> tuple[float, float]:
        """Seconds of a pass, and of a row in it: both above 0."""
        if not self._seconds:
            return 1 - _ASSUMED_ROW, _ASSUMED_ROW
        mean_rows, mean = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows_2 / self._weight - mean_rows**2
        assumed = _ASSUMED_ROW * mean / (1 + _ASSUMED_ROW * (mean_rows - 1))
        # Passes of nearly one number of rows tell little: the assumption counts as much as a spread of 1 would.
        more = (self._product / self._weight - mean_rows * mean + assumed) / (spread + 1)
        more = min(max(more, 0.02 * mean / mean_rows), 0.98 * mean / mean_rows)
        return mean - more * mean_rows, more
