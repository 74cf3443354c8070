"""One generation: the loop over rounds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from .drafters import Drafter
from .errors import InvalidInputError
from .kv_cache import KVCache
from .logprobs import TokenLogprobs
from .model import CausalLM
from .planner import Planner
from .prefix_cache import GenerationCaches
from .rounds import PlayRound, Round
from .row_sampler import RowSampler
from .stats import Stats
from .stopping import Cutter, FinishReason
from .strand import text_time
from .streams import Chance

__all__ = ["Generation", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one target pass brought.

    Attributes:
        token_ids: newly emitted ids.
        text: newly readable text; it may lag behind the ids by half a character or the beginning of a stop string.
        num_proposed: drafted tokens that this pass verified.
        num_accepted: how many of them stood, before any stop cut them.
        finish_reason: None while the text goes on; "stop" or "length" in the last step.
        logprobs: one entry for each of `token_ids` where they were asked for.
        num_forced: tokens in front of the accepted ones that a constraint left no choice about.
    """

    token_ids: tuple[int, ...]
    text: str
    num_proposed: int
    num_accepted: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_forced: int = 0


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
        caches: GenerationCaches,
        kv_bytes: int,
        new_drafter: Callable[[], Drafter] | None,
        sampler: RowSampler,
        num_draft_tokens: int,
        rule: str,
        vocab_size: int,
        cutter: Cutter,
        chance: Chance,
        num_top_logprobs: int | None,
        play: PlayRound,
        planner: Planner | None,
    ) -> None:
        self._prompt = prompt
        self._target = target
        self._new_drafter = new_drafter
        self._sampler = sampler
        self._num_draft_tokens = num_draft_tokens
        self._rule = rule
        self._caches = caches
        self._kv_bytes = kv_bytes
        self._vocab_size = vocab_size
        self._cutter = cutter
        self._chance = chance
        self._num_top_logprobs = num_top_logprobs
        self._play_round = play
        self._planner = planner

        self._stats = Stats(prompt_tokens=len(prompt))
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text: list[str] = []
        self._finish_reason: FinishReason | None = None
        self._closed = False
        self._steps = self._loop()

    @property
    def stats(self) -> Stats:
        """Counters and timings up to the last step, and what the planner expected of them."""
        if self._planner is None:
            return self._stats
        planner = self._planner
        return replace(self._stats, predicted_speedup=planner.predicted_speedup, costs_from=planner.costs_from)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids emitted so far, a final stop token included."""
        return tuple(self._token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry for each of `token_ids`; None where logprobs were not asked for."""
        return None if self._num_top_logprobs is None else tuple(self._logprobs)

    @property
    def text(self) -> str:
        """Text emitted so far."""
        return "".join(self._text)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, "stop" or "length"; None while it goes on or when it was closed."""
        return self._finish_reason

    @property
    def finished(self) -> bool:
        """Whether the last step has been given."""
        return self._finish_reason is not None

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values at most, in both models; caches of models that do not tell count as nothing."""
        return self._kv_bytes

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
        while (step := self.advance()) is None:
            pass
        return step

    def advance(self) -> Step | None:
        """Do a part of the work: the next step, or None behind a piece of a long prompt.

        For whoever runs several texts in turns, and does not want a long prompt to hold up the others.

        Raises:
            StopIteration: the last step was given.
            InvalidInputError: another thread, or this generation's own constraint or drafter, is in the middle of it.
        """
        try:
            step = next(self._steps)
        except ValueError as error:
            if str(error) != "generator already executing":  # what Python says where two ask for a step
                raise
            raise InvalidInputError(
                "This generation is in the middle of a step, begun by another thread or around its own constraint or "
                "drafter: take its steps from one place, or make a generation for each."
            ) from error
        if self._closed:
            self._steps.close()
        return step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loop(self) -> Generator[Step | None, None, None]:
        tokens = list(self._prompt)
        try:
            yield from self._rounds(tokens)
        except GeneratorExit:  # closed between two steps
            self._caches.keep(tokens)
            raise
        self._caches.keep(tokens)

    def _rounds(self, tokens: list[int]) -> Generator[Step | None, None, None]:
        # The caches are local to this generator: they are freed, or kept for other texts, when it ends or is closed.
        cache = self._caches.new(self._target)
        self._stats = replace(self._stats, cached_tokens=cache.length)
        if self._new_drafter:
            cache.rollback(cache.length)  # a cache that cannot take tokens back says so before the first token

        rows = getattr(self._target, "prefill_rows", None)
        while rows and len(tokens) - cache.length > rows:
            started = text_time()
            self._target.forward(tokens[cache.length : cache.length + rows], cache, 1)
            self._stats = replace(self._stats, prefill_s=self._stats.prefill_s + text_time() - started)
            yield None
        started = text_time()
        played = self._play(tokens, 0, cache, None)
        step = self._emit(tokens[len(self._prompt) :], played)
        read_s = self._stats.prefill_s + text_time() - started
        self._stats = replace(self._stats.after_prefill(len(step.token_ids)), prefill_s=read_s)
        yield step

        drafter = None
        if self._new_drafter and self._finish_reason is None:
            started = text_time()
            drafter = self._new_drafter()
            drafter.prefill(tuple(self._prompt))
            self._stats = replace(self._stats, prefill_s=self._stats.prefill_s + text_time() - started)
        target_before, draft_before = cache.seconds, drafter.seconds if drafter else 0.0

        while self._finish_reason is None:
            started = text_time()
            position = len(tokens)
            spent = cache.seconds, drafter.seconds if drafter else 0.0
            num_draft_tokens = self._planner.begin(position) if self._planner else self._num_draft_tokens
            played = self._play(tokens, num_draft_tokens, cache, drafter)
            if self._planner and drafter:
                self._planner.end(
                    played.num_proposed,
                    played.num_accepted,
                    rows=played.num_forced + played.num_proposed + 1,
                    target_s=cache.seconds - spent[0],
                    draft_s=drafter.seconds - spent[1],
                    confidences=played.confidences,
                )
            step = self._emit(tokens[position:], played)
            self._stats = replace(
                self._stats.after_round(played.num_proposed, played.num_accepted, len(step.token_ids)),
                target_s=cache.seconds - target_before,
                draft_s=drafter.seconds - draft_before if drafter else 0.0,
                decode_s=self._stats.decode_s + text_time() - started,
            )
            yield step

    def _play(self, tokens: list[int], num_draft_tokens: int, cache: KVCache, drafter: Drafter | None) -> Round:
        return self._play_round(
            tokens,
            self._cutter.remaining,
            num_draft_tokens,
            target=self._target,
            cache=cache,
            drafter=drafter,
            sampler=self._sampler,
            vocab_size=self._vocab_size,
            chance=self._chance,
            rule=self._rule,
            num_top_logprobs=self._num_top_logprobs,
            wants_confidences=self._planner is not None and self._planner.asks and drafter is not None,
        )

    def _emit(self, block: list[int], played: Round) -> Step:
        cut = self._cutter.cut(block)
        self._token_ids += cut.token_ids
        self._text.append(cut.text)
        self._finish_reason = cut.finish_reason
        logprobs = None if played.logprobs is None else played.logprobs[: len(cut.token_ids)]
        self._logprobs += logprobs or ()
        return Step(
            cut.token_ids,
            cut.text,
            played.num_proposed,
            played.num_accepted,
            cut.finish_reason,
            logprobs,
            played.num_forced,
        )
