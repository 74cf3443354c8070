"""The KV cache as the decoder sees it: a length that grows with each forward and can be taken back."""

from __future__ import annotations

from .errors import InvalidInputError

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of one sequence for one model; subclasses hold the buffers.

    Positions `0 … length - 1` are valid. Rollback only lowers the length: whatever lies behind it is
    overwritten by the next forward. A cache whose state cannot be taken back must override `rollback` and raise.

    Attributes:
        seconds: wall time that the model's own runs against this cache have taken.
    """

    def __init__(self, max_length: int) -> None:
        if max_length < 1:
            raise InvalidInputError(f"A KV cache needs room for at least 1 position, got max_length={max_length}.")
        self.max_length = max_length
        self.seconds = 0.0
        self._length = 0

    @property
    def length(self) -> int:
        """Number of positions that are valid."""
        return self._length

    @property
    def room(self) -> int:
        """Number of positions that can still be fed."""
        return self.max_length - self._length

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more positions as valid; called by the model's forward.

        Raises:
            InvalidInputError: the cache has no room for them.
        """
        if not 0 <= num_tokens <= self.room:
            raise InvalidInputError(
                f"Cannot feed {num_tokens} tokens: the KV cache holds {self._length} of {self.max_length} positions."
            )
        self._length += num_tokens

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions.

        Raises:
            InvalidInputError: `length` is negative or larger than the current length.
        """
        if not 0 <= length <= self._length:
            raise InvalidInputError(
                f"Cannot roll back to length {length}: the KV cache holds {self._length} positions."
            )
        self._length = length
