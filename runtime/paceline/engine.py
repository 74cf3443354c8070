"""Many generations at once for a program that runs on asyncio: one worker thread takes turns among them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

from .engine_stats import EngineStats
from .errors import InvalidInputError, OverloadError, PacelineError, shown
from .generation import Generation, Step
from .logprobs import TokenLogprobs
from .scheduler import Job, Outcome, Scheduler
from .scoring import Scoring

__all__ = ["AsyncEngine", "StepStream"]

_Item = TypeVar("_Item")


class StepStream(AsyncIterator[_Item], Generic[_Item]):
    """The steps of one text, as an engine makes them; leaving an `async with` block cancels what is left.

    Steps that nobody has taken yet are kept, as many as the text has. It belongs to one event loop.

    Attributes:
        work: the generation; look at its `stats`, `text` and so on once the stream has ended.
    """

    def __init__(self, engine: AsyncEngine, work: Generation | Scoring, deadline: float | None) -> None:
        self.work = work
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item | Exception | None] = asyncio.Queue()
        self._ended = False
        # None from the text's end on: the two hold each other, and with them models and caches, which would then stay
        # in memory until the garbage collector finds them.
        self._job: Job | None = Job(work, self._on_step, self._on_end, deadline)

    def cancel(self) -> None:
        """Begin no further round of this text; the stream then ends, without an error."""
        if (job := self._job) is not None:
            self._engine._scheduler.cancel(job)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if item is not None and not isinstance(item, Exception):
            return item
        self._ended = True
        try:
            raise StopAsyncIteration if item is None else item
        finally:
            del item  # an error holds the frame that raised it

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    # Called by the worker thread.
    def _on_step(self, step: Any) -> None:
        if isinstance(step, Step):
            self._engine._count_tokens(len(step.token_ids))
        self._hand_over(step)

    def _on_end(self, outcome: Outcome, error: Exception | None) -> None:
        self._engine._count_end(self, outcome)
        self._hand_over(error)
        self._job = None

    def _hand_over(self, item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            self.cancel()


class AsyncEngine:
    """Runs many generations over loaded models, from any number of event loops.

    Each running text gets one round in turn, on one worker thread, so that two rounds never fight for the cores and
    a plan's costs stay those of a text alone. A text is what it would be without the others: sampling, caches and plans
    are its own. Texts beyond `max_running`, or beyond the budget of memory, wait in order.

    With `max_batch` above 1 so many texts have their rounds together, and models that `paceline.load(…, max_batch=…)`
    opened take all of them in one pass, which brings more tokens per second. Logits may then differ in their last bits
    from those of a text alone, as they do between plain and speculative decoding: where the two best logits are nearly
    equal, or a random number lies at a border, a text may part from what it would be without the others.

    The prefix cache is the decoder's, and so shared by all its generations: `paceline.load(…, prefix_cache_bytes=…)`.
    Its bytes come on top of the budget.
    """

    def __init__(
        self, *, max_running: int = 16, max_waiting: int = 64, kv_budget: int | None = None, max_batch: int = 1
    ) -> None:
        """Start the worker thread.

        Args:
            max_running: texts in turns at most.
            max_waiting: texts in the queue at most; one more is refused.
            kv_budget: bytes of KV caches that running texts may come to hold together; None is no limit. A text
                reserves `Generation.kv_bytes` before its first step and gives them back at its end.
            max_batch: texts that have their rounds together at most. It pays with models that were loaded for as many.

        Raises:
            InvalidInputError: a limit out of its range.
        """
        self._scheduler = Scheduler(
            max_running=max_running, max_waiting=max_waiting, kv_budget=kv_budget, max_batch=max_batch
        )
        self._stats = EngineStats(kv_budget=kv_budget)
        self._lock = threading.Lock()
        self._num_open = 0  # texts that have not ended
        self._nobody_left = threading.Event()
        self._nobody_left.set()
        self._worker = threading.Thread(target=self._work, name="paceline-engine", daemon=True)
        self._worker.start()

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, as of now."""
        with self._lock:
            return replace(
                self._stats,
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                kv_bytes=self._scheduler.kv_reserved,
                shared_passes=self._scheduler.rendezvous.passes,
                shared_texts=self._scheduler.rendezvous.pass_texts,
            )

    @property
    def alive(self) -> bool:
        """Whether the worker thread runs."""
        return self._worker.is_alive()

    @overload
    def run(self, work: Generation, *, timeout_s: float | None = None) -> StepStream[Step]: ...
    @overload
    def run(self, work: Scoring, *, timeout_s: float | None = None) -> StepStream[tuple[TokenLogprobs, ...]]: ...
    def run(self, work: Generation | Scoring, *, timeout_s: float | None = None) -> StepStream[Any]:
        """Queue a generation that `SpeculativeDecoder.generate` made, and that nobody has begun; from an event loop.

        Args:
            work: belongs to the engine from now on.
            timeout_s: seconds until the stream ends with a `DeadlineError`, wherever it is; None is never.

        Raises:
            EngineClosedError: the engine drains or is closed.
            InvalidInputError: a bad `timeout_s`.
            MemoryBudgetError: the text's KV caches exceed the whole budget.
            OverloadError: the queue is full.
        """
        return self._run([work], timeout_s)[0]

    def run_all(self, works: Sequence[Generation], *, timeout_s: float | None = None) -> list[StepStream[Step]]:
        """Queue several generations, all or none; see `run`."""
        return self._run(works, timeout_s)

    def _run(self, works: Sequence[Generation | Scoring], timeout_s: float | None) -> list[StepStream[Any]]:
        if timeout_s is not None and not (_is_duration(timeout_s) and timeout_s > 0):
            raise InvalidInputError(f"timeout_s must be None or a number of seconds above 0, got {shown(timeout_s)}.")
        for work in works:
            if not isinstance(work, Generation | Scoring):
                raise InvalidInputError(f"An engine runs what decoder.generate(…) returns, got {shown(work)}.")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        streams: list[StepStream[Any]] = [StepStream(self, work, deadline) for work in works]
        self._count_open(len(streams))
        try:
            self._scheduler.submit([stream._job for stream in streams if stream._job is not None])
        except PacelineError as error:
            self._count_open(-len(streams))
            for stream in streams:
                stream._job = None
            if isinstance(error, OverloadError):
                with self._lock:
                    self._stats = replace(self._stats, refused=self._stats.refused + len(works))
            raise
        return streams

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take nothing new, and wait until all texts have ended.

        Args:
            timeout_s: seconds after which the rest ends with an `EngineClosedError`, each text behind the step in hand;
                None waits for all of it.

        Raises:
            InvalidInputError: a bad `timeout_s`.
        """
        if timeout_s is not None and not _is_duration(timeout_s):
            raise InvalidInputError(f"timeout_s must be None or a number of seconds from 0, got {shown(timeout_s)}.")
        self._scheduler.close()
        if not await asyncio.to_thread(self._nobody_left.wait, timeout_s):
            self._scheduler.give_up()
            await asyncio.to_thread(self._nobody_left.wait)

    async def aclose(self) -> None:
        """Cancel all texts and end the worker thread; it finishes the step in hand."""
        self._scheduler.stop()
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _work(self) -> None:
        while self._scheduler.wait():
            self._scheduler.turn()
        self._scheduler.end()

    def _count_tokens(self, count: int) -> None:
        with self._lock:
            self._stats = replace(self._stats, new_tokens=self._stats.new_tokens + count)

    def _count_end(self, stream: StepStream[Any], outcome: Outcome) -> None:
        with self._lock:
            stats, work = self._stats, stream.work
            sums = stats.sums_with(work.stats) if isinstance(work, Generation) else {}
            ended = {**stats.ended, outcome: stats.ended[outcome] + 1}
            self._stats = replace(stats, ended=cast(Any, ended), **sums)
        self._count_open(-1)

    def _count_open(self, change: int) -> None:
        with self._lock:
            self._num_open += change
            if self._num_open:
                self._nobody_left.clear()
            else:
                self._nobody_left.set()


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
