"""One generation: the loop over rounds, and the round itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from .drafters import Drafter
from .errors import InvalidInputError
from .kv_cache import KVCache
from .model import CausalLM
from .sampling import SamplingParams
from .stats import Stats
from .stopping import Cutter, FinishReason
from .streams import Chance
from .verify import NO_DRAFT, Draft, verify

__all__ = ["Generation", "Step", "play_round"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one target pass brought.

    Attributes:
        token_ids: newly emitted ids.
        text: newly readable text; it may lag behind the ids by half a character or the beginning of a stop string.
        num_proposed: drafted tokens that this pass verified.
        num_accepted: how many of them stood, before any stop cut them.
        finish_reason: None while the text goes on; "stop" or "length" in the last step.
    """

    token_ids: tuple[int, ...]
    text: str
    num_proposed: int
    num_accepted: int
    finish_reason: FinishReason | None


def play_round(
    tokens: list[int],
    num_draft_tokens: int,
    *,
    target: CausalLM,
    cache: KVCache,
    drafter: Drafter | None,
    sampling: SamplingParams,
    vocab_size: int,
    chance: Chance,
) -> tuple[int, int]:
    """One round of speculative sampling (Chen et al. 2023, algorithm 2): draft, score, verify, roll back.

    Extends `tokens`, the whole text so far, by the accepted tokens and the one that follows them. With nothing to
    draft it is a step of plain decoding, with an empty cache it is the prefill: forward feeds what the cache lacks.

    Returns:
        Number of tokens proposed, number of tokens accepted.
    """
    position = len(tokens)
    draft = drafter.propose(tokens, num_draft_tokens, chance) if drafter and num_draft_tokens else NO_DRAFT
    _check_draft(draft, num_draft_tokens, vocab_size)

    feed = [*tokens[cache.length :], *draft.tokens]
    logits = target.forward(feed, cache, num_logits=len(draft.tokens) + 1)[:, :vocab_size]  # [k + 1, vocab]

    verdict = verify(draft, logits, sampling, chance, position)
    tokens += draft.tokens[: verdict.num_accepted]
    tokens.append(verdict.next_token)

    if drafter and draft.tokens:
        cache.rollback(len(tokens) - 1)
        drafter.rollback(len(tokens) - 1)
    return len(draft.tokens), verdict.num_accepted


class Generation(Iterator[Step]):
    """A text in the making: iterate over its steps; `SpeculativeDecoder.generate` makes one.

    It owns its KV caches. They are made at the first step and freed at the end, by `close()`, or on leaving a `with`
    block. One generation belongs to one thread at a time; only `close()` may come from another.
    """

    def __init__(
        self,
        prompt: list[int],
        *,
        target: CausalLM,
        new_drafter: Callable[[], Drafter] | None,
        sampling: SamplingParams,
        num_draft_tokens: int,
        cache_length: int,
        vocab_size: int,
        cutter: Cutter,
        chance: Chance,
    ) -> None:
        self._prompt = prompt
        self._target = target
        self._new_drafter = new_drafter
        self._sampling = sampling
        self._num_draft_tokens = num_draft_tokens
        self._cache_length = cache_length
        self._vocab_size = vocab_size
        self._cutter = cutter
        self._chance = chance

        self._stats = Stats(prompt_tokens=len(prompt))
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._closed = False
        self._steps = self._loop()

    @property
    def stats(self) -> Stats:
        """Counters and timings up to the last step."""
        return self._stats

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids emitted so far, a final stop token included."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """Text emitted so far."""
        return "".join(self._text)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, "stop" or "length"; None while it goes on or when it was closed."""
        return self._finish_reason

    def close(self) -> None:
        """End the generation and free its caches; called from another thread, after the step in hand."""
        self._closed = True
        try:
            self._steps.close()
        except ValueError:
            # The loop is running in another thread, whose __next__ closes it.
            return

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        step = next(self._steps)
        if self._closed:
            self._steps.close()
        return step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loop(self) -> Generator[Step, None, None]:
        # The caches are local to this generator: they are freed when it ends or is closed.
        tokens = list(self._prompt)
        cache = self._target.new_cache(self._cache_length)
        if self._new_drafter:
            cache.rollback(0)  # a cache that cannot take tokens back says so before the first token

        started = time.perf_counter()
        self._play(tokens, 0, cache, None)
        step = self._emit(tokens[-1:], 0, 0)
        self._stats = replace(self._stats.after_prefill(), prefill_s=time.perf_counter() - started)
        yield step

        drafter = None
        if self._new_drafter and self._finish_reason is None:
            started = time.perf_counter()
            drafter = self._new_drafter()
            drafter.prefill(self._prompt)
            self._stats = replace(self._stats, prefill_s=self._stats.prefill_s + time.perf_counter() - started)
        target_before, draft_before = cache.seconds, drafter.seconds if drafter else 0.0

        while self._finish_reason is None:
            started = time.perf_counter()
            position = len(tokens)
            # A round emits one token more than it drafts.
            num_draft_tokens = min(self._num_draft_tokens, self._cutter.remaining - 1)
            num_proposed, num_accepted = self._play(tokens, num_draft_tokens, cache, drafter)
            step = self._emit(tokens[position:], num_proposed, num_accepted)
            self._stats = replace(
                self._stats.after_round(num_proposed, num_accepted, len(step.token_ids)),
                target_s=cache.seconds - target_before,
                draft_s=drafter.seconds - draft_before if drafter else 0.0,
                decode_s=self._stats.decode_s + time.perf_counter() - started,
            )
            yield step

    def _play(
        self, tokens: list[int], num_draft_tokens: int, cache: KVCache, drafter: Drafter | None
    ) -> tuple[int, int]:
        return play_round(
            tokens,
            num_draft_tokens,
            target=self._target,
            cache=cache,
            drafter=drafter,
            sampling=self._sampling,
            vocab_size=self._vocab_size,
            chance=self._chance,
        )

    def _emit(self, block: list[int], num_proposed: int, num_accepted: int) -> Step:
        cut = self._cutter.cut(block)
        self._token_ids += cut.token_ids
        self._text.append(cut.text)
        self._finish_reason = cut.finish_reason
        return Step(cut.token_ids, cut.text, num_proposed, num_accepted, cut.finish_reason)


def _check_draft(draft: Draft, num_draft_tokens: int, vocab_size: int) -> None:
    """Refuse what a faulty drafter proposes before it reaches the target."""
    if len(draft.tokens) > num_draft_tokens:
        raise InvalidInputError(
            f"The drafter proposed {len(draft.tokens)} tokens where at most {num_draft_tokens} were asked for."
        )
    for token in draft.tokens:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"The drafter proposed id {token}, outside the vocabulary of {vocab_size} ids.")
    for row in draft.probs or ():
        if row.shape != (vocab_size,):
            raise InvalidInputError(
                f"The drafter gave probabilities of shape {row.shape}; expected ({vocab_size},), the common vocabulary."
            )
