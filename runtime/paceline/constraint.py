"""Constrained decoding: a caller's mask per prefix says which ids may follow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError

__all__ = ["Constraint", "ConstraintMasks"]

# What may follow the new text so far (without the prompt): a bitmask, integers of 32 bits `[ceil(vocab / 32)]` or
# more, whose bit `id % 32` of entry `id // 32` is 1 where the id is allowed; None allows every id. It must be a
# function of the text alone: prefixes are asked for in any order, drafted tokens included.
Constraint: TypeAlias = Callable[[Sequence[int]], NDArray[Any] | None]

# Target and draft ask for the same prefixes within a round.
_REMEMBERED = 64


class ConstraintMasks:
    """A constraint's masks, checked, unpacked, and remembered for a round."""

    def __init__(self, constraint: Constraint, vocab_size: int) -> None:
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._masks: OrderedDict[tuple[int, ...], NDArray[np.bool_] | None] = OrderedDict()

    def allowed(self, new_tokens: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Whether each id may follow, bool `[vocab]`; None where all may.

        Raises:
            InvalidInputError: the mask has another dtype or shape, or allows nothing.
        """
        if new_tokens in self._masks:
            return self._masks[new_tokens]
        mask = self._constraint(new_tokens)
        allowed = None if mask is None else self._unpack(mask, len(new_tokens))
        self._masks[new_tokens] = allowed
        if len(self._masks) > _REMEMBERED:
            self._masks.popitem(last=False)
        return allowed

    def _unpack(self, mask: NDArray[Any], num_new_tokens: int) -> NDArray[np.bool_]:
        words = -(-self._vocab_size // 32)
        where = f"The constraint's mask behind {num_new_tokens} new tokens"
        if not isinstance(mask, np.ndarray) or mask.dtype.kind not in "iu" or mask.dtype.itemsize != 4:
            found = f"{mask.dtype} {mask.shape}" if isinstance(mask, np.ndarray) else f"{mask!r:.80}"
            raise InvalidInputError(f"{where} must be a numpy array of uint32 or int32, got {found}.")
        if mask.ndim != 1 or len(mask) < words:
            raise InvalidInputError(
                f"{where} has shape {mask.shape}; expected ({words},), one bit for each of {self._vocab_size} ids."
            )
        little = np.ascontiguousarray(mask, dtype=mask.dtype.newbyteorder("<"))
        allowed = np.unpackbits(little.view(np.uint8), bitorder="little", count=self._vocab_size).view(np.bool_)
        if not allowed.any():
            raise InvalidInputError(
                f"{where} allows no id; a constraint must leave at least one, an end token perhaps."
            )
        return allowed
