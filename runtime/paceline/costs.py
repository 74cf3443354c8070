"""What runs of the models take: given, by length of the cache, or learned while a text is written."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from .errors import InvalidInputError, shown

__all__ = ["ASSUMED_COSTS", "Average", "CostCorrection", "CostMeter", "Costs", "CostsByLength"]

# Of a pass of one row, while no pass of several rows has been seen.
_ASSUMED_ROW = 0.2
# The line through all passes counts as so many passes of each number of rows.
_LINE_WEIGHT = 3.0
# A pass seen says so much more of passes of its number of rows than all passes together do.
_OWN_WEIGHT = 4.0
# Forced tokens may make a pass of any number of rows; the line alone says what those take.
_MOST_ROWS = 32


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that runs of the models take, at one length of the cache.

    Attributes:
        draft_step: of the draft model, one row.
        target_pass: of the target, with 1, 2, … rows; beyond, the mean step goes on.

    Raises:
        InvalidInputError: no pass, or a time that is not above 0.
    """

    draft_step: float
    target_pass: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.target_pass or not all(0 < seconds < math.inf for seconds in self.target_pass):
            raise InvalidInputError(f"target_pass must be seconds above 0 for 1, 2, … rows, got {self.target_pass!r}.")
        if not 0 <= self.draft_step < math.inf:
            raise InvalidInputError(f"draft_step must be seconds of at least 0, got {self.draft_step!r}.")

    def target(self, rows: int) -> float:
        """Seconds of a target pass of `rows` rows."""
        known = self.target_pass
        if rows <= len(known):
            return known[rows - 1]
        slope = (known[-1] - known[0]) / (len(known) - 1) if len(known) > 1 else _ASSUMED_ROW * known[0]
        return known[-1] + slope * (rows - len(known))

    def at(self, length: int) -> Costs:
        """These: they are taken as the same at every length of the cache."""
        return self


# Where plans must not depend on the clock: a 0.5B and a 1.5B model in int4 on two cores, in target passes of one row.
ASSUMED_COSTS = Costs(0.3, (1.0, 1.2, 1.45, 1.7, 1.95))


@dataclass(frozen=True, slots=True)
class CostsByLength:
    """Costs at several lengths of the cache: attention reads all of it, so runs take longer as the text grows.

    Attributes:
        lengths: positions that the cache holds before the run, ascending, each at least 0.
        costs: at each of these lengths, all for the same numbers of rows.
        origin: where they come from, for stats.

    Raises:
        InvalidInputError: no length, lengths that do not ascend, or costs that do not fit them.
    """

    lengths: tuple[int, ...]
    costs: tuple[Costs, ...]
    origin: str = "given"

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 0 or any(a >= b for a, b in pairwise(self.lengths)):
            raise InvalidInputError(f"lengths must be ascending numbers of at least 0, got {shown(self.lengths)}.")
        if len(self.costs) != len(self.lengths) or len({len(one.target_pass) for one in self.costs}) != 1:
            raise InvalidInputError(
                f"costs must hold one entry for each of {len(self.lengths)} lengths, all for the same numbers of rows."
            )

    @property
    def from_profile(self) -> bool:
        """Whether these were measured on this machine, some time ago."""
        return self.origin != "given"

    def at(self, length: int) -> Costs:
        """Costs at this length: on the line between the measured ones around it, which goes on behind the last."""
        if len(self.lengths) == 1 or length <= self.lengths[0]:
            return self.costs[0]
        right = min(bisect_left(self.lengths, length), len(self.lengths) - 1)
        left = right - 1
        share = (length - self.lengths[left]) / (self.lengths[right] - self.lengths[left])
        low, high = self.costs[left], self.costs[right]

        def between(a: float, b: float) -> float:
            return max(a + share * (b - a), 0.5 * min(a, b))  # never below 0, whatever a noisy slope says

        return Costs(
            between(low.draft_step, high.draft_step),
            tuple(map(between, low.target_pass, high.target_pass)),
        )


class CostMeter:
    """Learns `Costs` from the runs of a generation."""

    def __init__(self) -> None:
        self._draft_steps = Average(0.9)
        self._passes: dict[int, Average] = {}
        self._costs: Costs | None = None

    def observe(self, *, rows: int, target_s: float, draft_steps: int, draft_s: float) -> None:
        """Take in a round: its target pass of `rows` rows, and its draft steps, by their seconds."""
        self._passes.setdefault(rows, Average(0.9)).add(target_s, 1)
        if draft_steps:
            self._draft_steps.add(draft_s, draft_steps)
        self._costs = self._fit()  # once a round: plans ask for it at every token

    @property
    def costs(self) -> Costs | None:
        """What is known: the passes seen, and the straight line through them; None before the first."""
        return self._costs

    def _fit(self) -> Costs:
        # Least squares by hand, weighted by how much was seen: numpy's takes a third of a millisecond.
        total = sum(one.weight for one in self._passes.values())
        mean_more = sum(one.weight * (rows - 1) for rows, one in self._passes.items()) / total
        mean = sum(one.weight * one.mean for one in self._passes.values()) / total
        spread = sum(one.weight * (rows - 1 - mean_more) ** 2 for rows, one in self._passes.items())
        if spread > 0:
            slope = (
                sum(one.weight * (rows - 1 - mean_more) * (one.mean - mean) for rows, one in self._passes.items())
                / spread
            )
            first = mean - slope * mean_more
        else:
            first = mean / (1 + _ASSUMED_ROW * mean_more)
            slope = _ASSUMED_ROW * first
        # The clock wobbles; a row takes some time, and a pass of one row is most of a pass. A model may not tell any.
        first = max(first, 0.2 * min(one.mean for one in self._passes.values()), 1e-9)
        slope = max(slope, 0.0)
        draft_step = self._draft_steps.mean if self._draft_steps.weight else 0.3 * first
        # Kernels work in tiles, so rows may cost in steps: what was seen of a number of rows pulls it off the line.
        passes, most = [], 0.0
        for rows in range(1, min(max(*self._passes, 8), _MOST_ROWS) + 1):
            line, seen = first + slope * (rows - 1), self._passes.get(rows)
            if seen:
                line = (seen.weight * seen.mean + _LINE_WEIGHT * line) / (seen.weight + _LINE_WEIGHT)
            most = max(most, line)
            passes.append(most)
        return Costs(draft_step, tuple(passes))


class CostCorrection:
    """Costs of a profile, corrected by what runs take now: the machine may be busier, or hotter, than it was then.

    What is learned is a factor for each number of rows, drawn towards that of all passes while little of it was seen.
    """

    def __init__(self, profile: CostsByLength) -> None:
        self._profile = profile
        self._draft = Average(0.9)
        self._all = Average(0.95)
        self._passes: dict[int, Average] = {}

    def observe(self, length: int, *, rows: int, target_s: float, draft_steps: int, draft_s: float) -> None:
        """Take in a round behind a text of `length` tokens; see `CostMeter.observe`."""
        costs = self._profile.at(length)
        factor = _factor(target_s, costs.target(rows))
        self._all.add(factor, 1)
        self._passes.setdefault(rows, Average(0.9)).add(factor, 1)
        if draft_steps:
            self._draft.add(draft_steps * _factor(draft_s, draft_steps * costs.draft_step), draft_steps)

    def at(self, length: int) -> Costs:
        """Costs at this length of the cache; the profile's before the first round."""
        costs = self._profile.at(length)
        if not self._all.weight:
            return costs
        passes, most = [], 0.0
        for rows, seconds in enumerate(costs.target_pass, 1):
            factor = self._all.mean
            if seen := self._passes.get(rows):
                factor = (_OWN_WEIGHT * seen.weight * seen.mean + factor) / (_OWN_WEIGHT * seen.weight + 1)
            most = max(most, factor * seconds)
            passes.append(most)
        return Costs(costs.draft_step * (self._draft.mean if self._draft.weight else self._all.mean), tuple(passes))


def _factor(seconds: float, expected: float) -> float:
    """What a run took over what was expected; a model that tells no times changes little."""
    return min(max(seconds / expected, 0.1), 10.0) if expected else 1.0


class Average:
    """A mean that forgets: each unit of weight makes what came before count `memory` times as much."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.total = 0.0
        self.weight = 0.0

    def add(self, total: float, weight: float) -> None:
        """Take in `weight` values whose sum is `total`."""
        fade = self._memory**weight
        self.total = fade * self.total + total
        self.weight = fade * self.weight + weight

    @property
    def mean(self) -> float:
        """The mean; there must have been a value."""
        return self.total / self.weight
