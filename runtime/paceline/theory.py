"""What speculative sampling can bring: tokens per round, speedup, and the best number of tokens to draft.

Notation of the docstrings: K drafted tokens a round, acceptance rate a, draft cost c (a draft step over a target pass
of one row), verification cost v(K) (a target pass of K + 1 rows over one of one row), overhead o (the rest of a round
over a target pass of one row). Source: Leviathan et al. 2022 (arXiv 2211.17192), section 3, for c and a alone (v = 1,
o = 0); v and o extend its walltime model to hardware where rows cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from .errors import InvalidInputError

__all__ = ["best_num_draft_tokens", "speedup", "tokens_per_round"]


def tokens_per_round(acceptance: float | Sequence[float], num_draft_tokens: int) -> float:
    """Expected tokens that a round emits (block efficiency), between 1 and K + 1.

    Args:
        acceptance: probability that a drafted token stands, the same for each: (1 - a^(K + 1)) / (1 - a). Or one
            number per place, each the probability that the token stands if those before it do; at least K of them.
        num_draft_tokens: K, at least 0.

    Raises:
        InvalidInputError: a number out of its range.
    """
    if num_draft_tokens < 0:
        raise InvalidInputError(f"num_draft_tokens must be at least 0, got {num_draft_tokens}.")
    rates = [acceptance] * num_draft_tokens if isinstance(acceptance, int | float) else list(acceptance)
    if len(rates) < num_draft_tokens:
        raise InvalidInputError(f"{num_draft_tokens} drafted tokens need as many acceptance rates, got {len(rates)}.")
    for rate in [acceptance] if isinstance(acceptance, int | float) else rates:
        if not 0 <= rate <= 1:
            raise InvalidInputError(f"An acceptance rate must be from 0 to 1, got {rate!r}.")
    survival = itertools.accumulate(rates[:num_draft_tokens], lambda reached, rate: reached * rate)
    return 1 + math.fsum(survival)


def speedup(
    acceptance: float | Sequence[float],
    num_draft_tokens: int,
    draft_cost: float,
    *,
    verification_cost: Callable[[int], float] = lambda num_draft_tokens: 1.0,
    overhead: float = 0.0,
) -> float:
    """Speed of speculative over plain decoding: tokens per round / (K · c + v(K) + o); 1 for K = 0.

    Args:
        acceptance: as in `tokens_per_round`.
        num_draft_tokens: K, at least 0; 0 is plain decoding.
        draft_cost: c, at least 0.
        verification_cost: v, from K to a cost; 1 for every K where rows are free.
        overhead: o, at least 0.

    Raises:
        InvalidInputError: a number out of its range.
    """
    for name, value in (("draft_cost", draft_cost), ("overhead", overhead)):
        if not 0 <= value < math.inf:
            raise InvalidInputError(f"{name} must be a finite number of at least 0, got {value!r}.")
    tokens = tokens_per_round(acceptance, num_draft_tokens)
    if num_draft_tokens == 0:
        return 1.0
    cost = verification_cost(num_draft_tokens)
    if not 0 < cost < math.inf:
        raise InvalidInputError(f"verification_cost must be above 0 and finite, got {cost!r} for {num_draft_tokens}.")
    return tokens / (num_draft_tokens * draft_cost + cost + overhead)


def best_num_draft_tokens(
    acceptance: float | Sequence[float],
    draft_cost: float,
    *,
    verification_cost: Callable[[int], float] = lambda num_draft_tokens: 1.0,
    overhead: float = 0.0,
    most: int = 16,
) -> tuple[int, float]:
    """The K from 0 to `most` with the largest speedup, the smallest among equals, and that speedup.

    Arguments and errors are those of `speedup`. K is 0, with speedup 1, where drafting does not pay.
    """
    if not isinstance(acceptance, int | float):
        most = min(most, len(acceptance))
    candidates = [
        (k, speedup(acceptance, k, draft_cost, verification_cost=verification_cost, overhead=overhead))
        for k in range(most + 1)
    ]
    return max(candidates, key=lambda candidate: candidate[1])
