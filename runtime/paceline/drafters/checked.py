"""A caller's own drafter, whose proposals are checked before they decide anything."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import InvalidInputError, shown
from paceline.sampling import FloatArray
from paceline.streams import Chance
from paceline.verify import Draft

__all__ = ["CheckedDrafter"]

# How far the sum of a row of probabilities may be from 1.
_TOLERANCE = 1e-3


class CheckedDrafter:
    """Passes everything on to a drafter and refuses proposals that would bend the law or break the round.

    That the tokens were really drawn from the probabilities that came with them cannot be seen from one proposal;
    `paceline.testing.enumerate_law` shows it.
    """

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        """Check the proposals of `drafter` over the ids `0 … vocab_size - 1`.

        Raises:
            InvalidInputError: it lacks a part of the protocol `Drafter`.
        """
        missing = [name for name in ("seconds", "prefill", "propose", "rollback") if not hasattr(drafter, name)]
        if missing:
            raise InvalidInputError(
                f"The drafter, a {type(drafter).__name__}, lacks {', '.join(missing)}; see paceline.Drafter."
            )
        self._drafter = drafter
        self._vocab_size = vocab_size

    @property
    def seconds(self) -> float:
        """Wall time that the drafter's model has taken."""
        try:
            return float(self._drafter.seconds)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"The drafter's `seconds` must be a number of seconds, got {shown(self._drafter.seconds)}."
            ) from error

    def prefill(self, tokens: Sequence[int]) -> None:
        """Pass the prompt on."""
        self._drafter.prefill(tokens)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Pass on what the drafter proposes.

        Raises:
            InvalidInputError: no `Draft`, too many tokens, ids that are no integers or outside the vocabulary, or
                rows that are no probabilities.
        """
        draft = self._drafter.propose(tuple(tokens), num_draft_tokens, chance)
        if not isinstance(draft, Draft):
            raise InvalidInputError(f"The drafter proposed {draft!r:.80}; expected a paceline.Draft.")
        try:
            ids = tuple(operator.index(token) for token in draft.tokens)
        except TypeError as error:
            raise InvalidInputError(f"The drafter proposed {draft.tokens!r:.80}; expected integer ids.") from error
        if len(ids) > num_draft_tokens:
            raise InvalidInputError(
                f"The drafter proposed {len(ids)} tokens where at most {num_draft_tokens} were asked for."
            )
        for token in ids:
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(
                    f"The drafter proposed id {token}, outside the vocabulary of {self._vocab_size} ids."
                )
        if draft.probs is None:
            return Draft(ids, None)
        return Draft(ids, [self._row(row, token) for row, token in zip(draft.probs, ids, strict=True)])

    def rollback(self, length: int) -> None:
        """Pass the rollback on."""
        self._drafter.rollback(length)

    def _row(self, row: Any, token: int) -> FloatArray | None:
        if row is None:
            return None
        if not isinstance(row, np.ndarray) or row.dtype.kind != "f" or row.shape != (self._vocab_size,):
            found = f"{row.dtype} of shape {row.shape}" if isinstance(row, np.ndarray) else f"{row!r:.80}"
            raise InvalidInputError(
                f"The drafter gave probabilities as {found}; expected a float array of shape ({self._vocab_size},), "
                "the common vocabulary."
            )
        total, smallest = float(row.sum(dtype=np.float64)), float(row.min())
        if not (smallest >= 0 and abs(total - 1) <= _TOLERANCE and row[token] > 0):
            raise InvalidInputError(
                f"The drafter gave probabilities for id {token} that are none: their sum is {total:g}, the smallest "
                f"is {smallest:g}, that of the drawn id {float(row[token]):g}. Expected numbers of at least 0 with "
                "sum 1, above 0 for the drawn id."
            )
        # float16 and the like would round the ratio.
        return row if row.dtype.itemsize >= 4 else row.astype(np.float32)
