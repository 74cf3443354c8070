"""The KV cache as the decoder sees it: a length that grows with each forward and can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import InvalidInputError

__all__ = ["KVCache", "SavedKV"]


@dataclass(frozen=True, slots=True)
class SavedKV:
    """Keys and values that a cache held, in a form that only its own class reads, and the bytes they take."""

    state: Any
    num_bytes: int


class KVCache:
    """Keys and values of one sequence for one model; subclasses hold the buffers.

    Positions `0 … length - 1` are valid. Rollback only lowers the length: whatever lies behind it is
    overwritten by the next forward. A cache whose state cannot be taken back must override `rollback` and raise.

    Attributes:
        seconds: wall time that the model's own runs against this cache have taken; of a run that several caches shared,
            this one's part.
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

    def save(self) -> SavedKV:
        """Give away the keys and values; the cache must not be used any more.

        Raises:
            InvalidInputError: this kind of cache cannot be saved.
        """
        raise InvalidInputError(f"A {type(self).__name__} cannot be saved, so no later text can begin with it.")

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with a copy of the first `length` positions that another cache of the same model held.

        Raises:
            InvalidInputError: this kind of cache cannot be saved, or it is not empty.
        """
        raise InvalidInputError(f"A {type(self).__name__} cannot begin with keys and values that were saved.")
