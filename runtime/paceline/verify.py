"""Verification: how many drafted tokens stand, and which token follows them.

Sources: modified rejection sampling of Chen et al. 2023 (arXiv 2302.01318, theorem 1), the same as Leviathan et al.
2022 (arXiv 2211.17192). For any draft the emitted tokens have the law of the target.

Positions are indices in the text, prompt included. A target row is turned into probabilities only when it is
reached: rows behind a rejection cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .errors import InvalidInputError
from .sampling import FloatArray, SamplingParams, distribution, greedy_token
from .streams import Chance, Purpose

__all__ = [
    "NO_DRAFT",
    "Draft",
    "TargetProbs",
    "Verdict",
    "acceptance",
    "residual",
    "verify",
    "verify_deterministic",
    "verify_greedy",
    "verify_token",
]

# The target's distribution `[vocab]` at a row: row i scores the i-th drafted token, the last row the bonus token.
TargetProbs: TypeAlias = Callable[[int], FloatArray]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    Attributes:
        tokens: k token ids.
        probs: k rows `[vocab]`, the distributions that the tokens were really drawn from, over the common vocabulary
            (0 where the draft model has no logit). None says that the proposal is deterministic: given the text,
            no other tokens could have been proposed.

    Raises:
        InvalidInputError: as many rows as tokens are expected.
    """

    tokens: tuple[int, ...]
    probs: Sequence[FloatArray] | None

    def __post_init__(self) -> None:
        if self.probs is not None and len(self.probs) != len(self.tokens):
            raise InvalidInputError(
                f"A draft of {len(self.tokens)} tokens came with {len(self.probs)} rows of probabilities; give one row "
                "per token, or None for a deterministic proposal."
            )


NO_DRAFT = Draft((), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a verification: the first `num_accepted` drafted tokens stand and `next_token` follows them."""

    num_accepted: int
    next_token: int


def verify(draft: Draft, logits: FloatArray, sampling: SamplingParams, chance: Chance, position: int) -> Verdict:
    """Verify a draft by the rule that its kind and the sampling call for.

    Args:
        draft: k tokens; k may be 0, then the verdict is the plain next token.
        logits: the target's `[k + 1, vocab]`.
        sampling: the target's.
        chance: decides.
        position: of the first drafted token.

    Raises:
        ModelOutputError: a row that is reached has NaN, plus infinity, or no finite logit.
    """

    def where(row: int) -> str:
        return f"The target model's logits for position {position + row}"

    if sampling.greedy:
        return verify_greedy(draft.tokens, lambda row: greedy_token(logits[row], where(row)))

    def target_probs(row: int) -> FloatArray:
        return distribution(logits[row], sampling, where(row))

    if draft.probs is None:
        return verify_deterministic(draft.tokens, target_probs, chance, position)
    return verify_token(draft.tokens, draft.probs, target_probs, chance, position)


def verify_greedy(tokens: Sequence[int], target_token: Callable[[int], int]) -> Verdict:
    """Accept while the drafted token is the target's most probable one; the first that differs is replaced by it."""
    for row, token in enumerate(tokens):
        best = target_token(row)
        if token != best:
            return Verdict(row, best)
    return Verdict(len(tokens), target_token(len(tokens)))


def verify_token(
    tokens: Sequence[int],
    draft_probs: Sequence[FloatArray],
    target_probs: TargetProbs,
    chance: Chance,
    position: int,
) -> Verdict:
    """Modified rejection sampling, token by token.

    Accept a drafted token with probability min(1, target_probs / draft_probs). At the first rejection draw the
    recovered token from what the target has more of than the draft; if all stand, draw the bonus token.
    """
    for row, token in enumerate(tokens):
        target_row = target_probs(row)  # [vocab]
        draft_row = draft_probs[row]  # [vocab]
        if not chance.happens(acceptance(target_row[token], draft_row[token]), position + row, Purpose.ACCEPT):
            recovered = chance.draw(residual(target_row, draft_row), position + row, Purpose.RECOVER)
            return Verdict(row, recovered)
    bonus = chance.draw(target_probs(len(tokens)), position + len(tokens), Purpose.TARGET)
    return Verdict(len(tokens), bonus)


def verify_deterministic(tokens: Sequence[int], target_probs: TargetProbs, chance: Chance, position: int) -> Verdict:
    """Draw from the target and accept while the draw equals the proposal; the first that differs is the next token.

    This is modified rejection sampling with a draft distribution that is 1 at the proposal.
    """
    for row, token in enumerate(tokens):
        drawn = chance.draw(target_probs(row), position + row, Purpose.TARGET)
        if drawn != token:
            return Verdict(row, drawn)
    bonus = chance.draw(target_probs(len(tokens)), position + len(tokens), Purpose.TARGET)
    return Verdict(len(tokens), bonus)


def acceptance(target_prob: float, draft_prob: float) -> float:
    """Probability min(1, target_prob / draft_prob) that a drafted token stands; 0 where the target never goes."""
    if not target_prob > 0:
        return 0.0
    if target_prob >= draft_prob:
        return 1.0
    return float(target_prob) / float(draft_prob)


def residual(target_row: FloatArray, draft_row: FloatArray) -> FloatArray:
    """Weights `[vocab]` of the recovered token: max(target_probs - draft_probs, 0), not normalised.

    Where the two rows are equal up to rounding nothing is left (or, with a broken draft, NaN): then the target's row.
    """
    weights = target_row - draft_row
    np.maximum(weights, 0, out=weights)
    return weights if 0 < float(weights.sum()) < math.inf else target_row
