"""Verification: how many drafted tokens stand, and which token follows them.

Sources: modified rejection sampling of Chen et al. 2023 (arXiv 2302.01318, theorem 1), the same as Leviathan et al.
2022 (arXiv 2211.17192), and block verification of Sun et al. 2024 (arXiv 2403.10444, algorithm 2). For any draft
whose probabilities are those that it was drawn from, the emitted tokens have the law of the target.

Positions are indices in the text, prompt included. A target row is turned into probabilities only when it is
reached: rows behind a rejection cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import numpy as np

from .errors import InvalidInputError, shown
from .row_sampler import RowSampler
from .sampling import FloatArray
from .streams import Chance, Purpose

__all__ = [
    "NO_DRAFT",
    "VERIFICATION_RULES",
    "Draft",
    "DraftProbs",
    "TargetProbs",
    "Verdict",
    "acceptance",
    "residual",
    "verify",
    "verify_block",
    "verify_deterministic",
    "verify_greedy",
    "verify_token",
]

# The target's distribution `[vocab]` at a row: row i scores the i-th drafted token, the last row the bonus token.
TargetProbs: TypeAlias = Callable[[int], FloatArray]
_T = TypeVar("_T")
# A drafted token's distribution `[vocab]`; None is a distribution that is 1 at the token, which was not drawn.
DraftProbs: TypeAlias = FloatArray | None


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens.

    Attributes:
        tokens: k token ids.
        probs: k rows `[vocab]`, the distributions that the tokens were really drawn from, over the common vocabulary
            (0 where the draft model has no logit). A row may be None: given the text before it, no other token could
            have been proposed. None instead of the rows says so of the whole proposal.

    Raises:
        InvalidInputError: as many rows as tokens are expected.
    """

    tokens: tuple[int, ...]
    probs: Sequence[DraftProbs] | None

    def __post_init__(self) -> None:
        if self.probs is not None and not isinstance(self.probs, Sequence | np.ndarray):
            raise InvalidInputError(
                f"The probabilities of a draft must be a sequence of rows, got {shown(self.probs)}."
            )
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


def verify(
    draft: Draft, logits: FloatArray, sampler: RowSampler, tokens: Sequence[int], chance: Chance, rule: str = "token"
) -> Verdict:
    """Verify a draft by the rule that its kind and the sampling call for.

    Args:
        draft: k tokens; k may be 0, then the verdict is the plain next token.
        logits: the target's `[k + 1, vocab]`.
        sampler: the target's.
        tokens: the text before the draft.
        chance: decides.
        rule: a key of `VERIFICATION_RULES`, for drafts with probabilities. A greedy target, or a deterministic
            proposal as a whole, has one best rule of its own.

    Raises:
        ModelOutputError: the first row has NaN, plus infinity, or no finite logit.
        InvalidInputError: the sampler cannot make a distribution of the first row. A later row that has none ends the
            verdict before it: whether the text goes on there, where that is an error, is for the next round to see.
    """

    def reach(row: int, ask: Callable[[FloatArray, Sequence[int], Sequence[int]], _T]) -> _T:
        try:
            return ask(logits[row], tokens, draft.tokens[:row])
        except Exception as error:  # of a caller's constraint, too
            if row == 0:
                raise
            raise _NoRowError(row) from error

    try:
        if sampler.greedy:
            return verify_greedy(draft.tokens, lambda row: reach(row, sampler.greedy_token))

        def target_probs(row: int) -> FloatArray:
            return reach(row, sampler.distribution)

        if draft.probs is None:
            return verify_deterministic(draft.tokens, target_probs, chance, len(tokens))
        return VERIFICATION_RULES[rule](draft.tokens, draft.probs, target_probs, chance, len(tokens))
    except _NoRowError as error:
        return Verdict(error.row - 1, draft.tokens[error.row - 1])


class _NoRowError(Exception):
    """A row behind the first has no distribution. Raised by `verify` for itself."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def verify_greedy(tokens: Sequence[int], target_token: Callable[[int], int]) -> Verdict:
    """Accept while the drafted token is the target's most probable one; the first that differs is replaced by it."""
    for row, token in enumerate(tokens):
        best = target_token(row)
        if token != best:
            return Verdict(row, best)
    return Verdict(len(tokens), target_token(len(tokens)))


def verify_deterministic(tokens: Sequence[int], target_probs: TargetProbs, chance: Chance, position: int) -> Verdict:
    """Draw from the target and accept while the draw equals the proposal; the first that differs is the next token.

    This is modified rejection sampling with draft distributions that are 1 at the proposal. The draws are those of
    plain decoding, so with the same seed the text is the same as well.
    """
    for row, token in enumerate(tokens):
        drawn = chance.draw(target_probs(row), position + row, Purpose.TARGET)
        if drawn != token:
            return Verdict(row, drawn)
    bonus = chance.draw(target_probs(len(tokens)), position + len(tokens), Purpose.TARGET)
    return Verdict(len(tokens), bonus)


def verify_token(
    tokens: Sequence[int],
    draft_probs: Sequence[DraftProbs],
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
        if not chance.happens(
            acceptance(target_row[token], _draft_prob(draft_row, token)), position + row, Purpose.ACCEPT
        ):
            weights = residual(target_row, draft_row, token)
            return Verdict(row, chance.draw(weights, position + row, Purpose.RECOVER))
    bonus = chance.draw(target_probs(len(tokens)), position + len(tokens), Purpose.TARGET)
    return Verdict(len(tokens), bonus)


def verify_block(
    tokens: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    target_probs: TargetProbs,
    chance: Chance,
    position: int,
) -> Verdict:
    """Block verification: judges prefixes of the draft as a whole and accepts at least as many tokens on average.

    A token less probable for the target than for the draft may be made up for by tokens behind it, so every prefix
    is tried and the longest that stands wins. `reached[i]` is p_i of the paper, `_block_acceptance` its h_i.
    """
    count = len(tokens)
    rows: list[FloatArray] = []
    reached = [1.0]
    for row, token in enumerate(tokens):
        try:
            rows.append(target_probs(row))
        except _NoRowError:  # what is drafted behind a prefix without a distribution counts as not drafted
            count = row
            break
        ratio = _ratio(rows[row][token], _draft_prob(draft_probs[row], token))
        reached.append(min(1.0, reached[row] * ratio))
        if reached[-1] == 0:  # nor can a longer prefix stand
            break

    for num_accepted in range(len(rows), 0, -1):
        scale = reached[num_accepted]
        if num_accepted == count:
            probability = scale
        elif scale == 0:
            continue
        else:
            over = _excess(rows[num_accepted], draft_probs[num_accepted], tokens[num_accepted], scale)
            probability = _block_acceptance(scale, float(over.sum()))
        # The next round judges the positions behind the prefix again: their numbers must not have decided this one.
        if chance.happens(probability, position + num_accepted - 1, Purpose.ACCEPT, round_start=position):
            break
    else:
        num_accepted = 0

    if num_accepted == count:
        return Verdict(count, chance.draw(target_probs(count), position + count, Purpose.TARGET))
    weights = residual(rows[num_accepted], draft_probs[num_accepted], tokens[num_accepted], reached[num_accepted])
    return Verdict(num_accepted, chance.draw(weights, position + num_accepted, Purpose.RECOVER))


# Exact rules for drafts with probabilities, by name. A rule that gives up the target's law has no place here.
VERIFICATION_RULES: Mapping[str, Callable[[Sequence[int], Sequence[DraftProbs], TargetProbs, Chance, int], Verdict]] = (
    MappingProxyType({"token": verify_token, "block": verify_block})
)


def acceptance(target_prob: float, draft_prob: float) -> float:
    """Probability min(1, target_prob / draft_prob) that a drafted token stands; 0 where the target never goes."""
    return min(1.0, _ratio(target_prob, draft_prob))


def residual(target_row: FloatArray, draft_row: DraftProbs, token: int, scale: float = 1.0) -> FloatArray:
    """Weights `[vocab]` of the recovered token: max(scale · target_probs - draft_probs, 0), not normalised.

    Where the two rows are equal up to rounding nothing is left (or, with a broken draft, NaN): then the target's row.

    Args:
        target_row: float `[vocab]`.
        draft_row: float `[vocab]`, or None for the distribution that is 1 at `token`.
        token: the drafted token.
        scale: from 0 to 1, below 1 where the block rule has used up a part of the target's probability.
    """
    weights = _excess(target_row, draft_row, token, scale)
    return weights if 0 < float(weights.sum()) < math.inf else target_row


def _excess(target_row: FloatArray, draft_row: DraftProbs, token: int, scale: float) -> FloatArray:
    weights = target_row.copy() if scale == 1 else target_row * np.asarray(scale, target_row.dtype)
    if draft_row is None:
        weights[token] = 0
        return weights
    weights -= draft_row
    np.maximum(weights, 0, out=weights)
    return weights


def _block_acceptance(scale: float, over: float) -> float:
    """h_i: probability that the prefix stands if no longer one does; 0 / 0 is 1, and NaN of a broken draft is 0."""
    rest = over + 1 - scale
    return over / rest if rest > 0 else float(rest == 0)


def _ratio(target_prob: float, draft_prob: float) -> float:
    """target_prob / draft_prob; 0 where the target never goes or either is NaN, infinite where only the draft is 0."""
    if not target_prob > 0 or math.isnan(draft_prob):
        return 0.0
    return float(target_prob) / float(draft_prob) if draft_prob > 0 else math.inf


def _draft_prob(draft_row: DraftProbs, token: int) -> float:
    return 1.0 if draft_row is None else float(draft_row[token])
