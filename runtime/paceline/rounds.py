"""One round of speculative sampling: draft, score, verify, roll back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .drafters import Drafter
from .kv_cache import KVCache
from .logprobs import TokenLogprobs, token_logprobs
from .model import CausalLM
from .row_sampler import RowSampler
from .sampling import softmax_at
from .streams import Chance
from .verify import NO_DRAFT, verify

__all__ = ["PlayRound", "Round", "play_round", "take_forced"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one target pass brought.

    Attributes:
        num_forced: tokens emitted first that needed no drawing, since nothing else was allowed.
        num_proposed: drafted tokens behind them.
        num_accepted: how many of these stood; one more token follows them.
        logprobs: of all emitted tokens, where they were asked for.
        confidences: the target's for the accepted tokens and the one that follows them, where they were asked for: its
            largest probability at temperature 1, before any penalty or mask.
    """

    num_forced: int
    num_proposed: int
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] | None
    confidences: tuple[float, ...] = ()


class PlayRound(Protocol):
    """One way to play a round: `play_round`, or the same arithmetic on a device."""

    def __call__(
        self,
        tokens: list[int],
        limit: int,
        num_draft_tokens: int,
        *,
        target: CausalLM,
        cache: KVCache,
        drafter: Drafter | None,
        sampler: RowSampler,
        vocab_size: int,
        chance: Chance,
        rule: str,
        num_top_logprobs: int | None,
        wants_confidences: bool,
    ) -> Round:
        """Play a round; see `play_round`."""


def play_round(
    tokens: list[int],
    limit: int,
    num_draft_tokens: int,
    *,
    target: CausalLM,
    cache: KVCache,
    drafter: Drafter | None,
    sampler: RowSampler,
    vocab_size: int,
    chance: Chance,
    rule: str = "token",
    num_top_logprobs: int | None = None,
    wants_confidences: bool = False,
) -> Round:
    """One round of speculative sampling (Chen et al. 2023, algorithm 2): draft, score, verify, roll back.

    Extends `tokens`, the whole text so far, by at most `limit` tokens: those that are forced, the accepted ones, and
    the one that follows them. With nothing to draft it is a step of plain decoding, with an empty cache it is the
    prefill: forward feeds what the cache lacks.

    Args:
        tokens: prompt and emitted tokens, at least one.
        limit: at least 1.
        num_draft_tokens: the most to draft.
        target: the model whose law the text has.
        cache: the target's.
        drafter: None drafts nothing.
        sampler: the target's.
        vocab_size: size of the common vocabulary.
        chance: decides.
        rule: a key of `VERIFICATION_RULES`.
        num_top_logprobs: None computes no logprobs.
        wants_confidences: whether to look how sure the target was of what was emitted.
    """
    num_before = len(tokens)
    num_forced = take_forced(tokens, limit, sampler)

    draft = NO_DRAFT
    if drafter and (num_draft_tokens := min(num_draft_tokens, limit - 1 - num_forced)) > 0:
        draft = drafter.propose(tokens, num_draft_tokens, chance)

    feed = [*tokens[cache.length :], *draft.tokens]
    num_logits = len(draft.tokens) + 1 + (num_forced if num_top_logprobs is not None else 0)
    logits = target.forward(feed, cache, num_logits=num_logits)[:, :vocab_size]  # [num_logits, vocab]

    judged = logits[-len(draft.tokens) - 1 :]
    verdict = verify(draft, judged, sampler, tokens, chance, rule)
    confidences: tuple[float, ...] = ()
    if wants_confidences:
        confidences = tuple(softmax_at(row, int(row.argmax())) for row in judged[: verdict.num_accepted + 1])
    tokens += draft.tokens[: verdict.num_accepted]
    tokens.append(verdict.next_token)

    logprobs = None
    if num_top_logprobs is not None:
        emitted = tokens[num_before:]
        logprobs = tuple(token_logprobs(logits[row], token, num_top_logprobs) for row, token in enumerate(emitted))
    if drafter and draft.tokens:
        cache.rollback(len(tokens) - 1)
        drafter.rollback(len(tokens) - 1)
    return Round(num_forced, len(draft.tokens), verdict.num_accepted, logprobs, confidences)


def take_forced(tokens: list[int], limit: int, sampler: RowSampler) -> int:
    """Extend `tokens` by those that need no drawing, fewer than `limit`, and return how many.

    A target pass brings one token of its own, and an end token is left to it.
    """
    num_before = len(tokens)
    while len(tokens) - num_before < limit - 1:
        forced = sampler.forced(tokens)
        if forced is None or forced in sampler.end_token_ids:
            break
        tokens.append(forced)
    return len(tokens) - num_before
