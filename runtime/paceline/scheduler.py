"""Takes turns among many generations: one round each, within a budget of memory and a bounded queue."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias

from .batching import Rendezvous
from .errors import DeadlineError, EngineClosedError, InvalidInputError, MemoryBudgetError, OverloadError, shown

__all__ = ["Job", "Outcome", "Scheduler", "Work"]

Outcome: TypeAlias = Literal["finished", "failed", "cancelled", "expired"]
# A step, if there is one, how its job has ended, if it has, and the error, if there is one.
_Played: TypeAlias = tuple[Any, Outcome | None, Exception | None]

# What a duration counts after the next one was seen: the advice when to try again follows the last twenty or so.
_MEMORY = 0.95
_LONGEST_RETRY_S = 60.0


class Work(Protocol):
    """What a scheduler runs step by step: a `Generation`, or anything that looks like one."""

    def advance(self) -> Any:
        """The next step, or None where others may have a turn before there is one; StopIteration behind the last."""

    @property
    def finished(self) -> bool:
        """Whether the last step has been given."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV caches that it may come to hold."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(eq=False, slots=True)
class Job:
    """Work that is waiting or running, and whom to tell.

    Attributes:
        work: run from one thread at a time, the scheduler's or one that it waits for.
        on_step: called with each step.
        on_end: called once, with how it ended and the error, if there is one.
        deadline: of `time.monotonic()`; None is never.
        cancelled: set by anyone; no step begins after that.
        given_up: the same, and whoever waits for it is told that the scheduler closed.
    """

    work: Work
    on_step: Callable[[Any], None]
    on_end: Callable[[Outcome, Exception | None], None]
    deadline: float | None = None
    cancelled: bool = False
    given_up: bool = False
    submitted: float = field(default_factory=time.monotonic)

    @property
    def is_due(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def ends_early(self) -> bool:
        """Whether no further step may begin."""
        return self.cancelled or self.given_up or self.is_due


class Scheduler:
    """Gives each running job one step in turn: a round of speculative sampling, or a piece of a prompt's prefill.

    With `max_batch` above 1 so many jobs have their steps together, and the models' passes are shared where they can
    be: see `Rendezvous`.

    One thread calls `wait` and `turn`; anyone may submit and cancel. A job holds its share of the budget from its
    first step to its end, so none that has begun can run out of it. Jobs begin in the order in which they came.
    """

    def __init__(self, *, max_running: int, max_waiting: int, kv_budget: int | None, max_batch: int = 1) -> None:
        """Run at most `max_running` jobs at once, whose caches take at most `kv_budget` bytes together.

        Raises:
            InvalidInputError: a limit that is no integer in its range.
        """
        for name, value, least in (
            ("max_running", max_running, 1),
            ("max_waiting", max_waiting, 0),
            ("max_batch", max_batch, 1),
        ):
            _check_limit(name, value, least)
        if kv_budget is not None:
            _check_limit("kv_budget", kv_budget, 1)
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.kv_budget = kv_budget
        self.max_batch = max_batch
        self.rendezvous = Rendezvous()
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()  # the next one first; only the scheduler's thread changes it
        self._kv_reserved = 0
        self._mean_s = 1.0
        self._closed = False
        self._stopped = False

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Jobs that have begun."""
        return len(self._running)

    @property
    def kv_reserved(self) -> int:
        """Bytes that running jobs hold of the budget."""
        return self._kv_reserved

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue these jobs, all or none.

        Raises:
            EngineClosedError: `close` or `stop` was called.
            InvalidInputError: there are more of them than could ever run and wait.
            MemoryBudgetError: one of them exceeds the whole budget.
            OverloadError: the queue has no room for all.
        """
        most = self.max_running + self.max_waiting
        if len(jobs) > most:
            raise InvalidInputError(f"{len(jobs)} texts were asked for at once, but only {most} may run and wait.")
        for job in jobs:
            if self.kv_budget is not None and job.work.kv_bytes > self.kv_budget:
                raise MemoryBudgetError(
                    f"The KV caches of this text take up to {job.work.kv_bytes:,} bytes, but the budget for all texts "
                    f"is {self.kv_budget:,}; shorten the prompt, ask for fewer new tokens, or raise the budget."
                )
        with self._changed:
            if self._closed:
                raise EngineClosedError("The engine takes no new work: it is closed, or about to be.")
            if len(self._waiting) + len(self._running) + len(jobs) > most:
                raise OverloadError(
                    f"{len(self._running)} texts are running and {len(self._waiting)} are waiting, of at most "
                    f"{self.max_running} and {self.max_waiting}; try again later.",
                    self._retry_after_s(),
                )
            self._waiting += jobs
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Let no further step of this job begin; it ends at its next turn."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Take nothing new; what was submitted goes on."""
        with self._changed:
            self._closed = True

    def give_up(self) -> None:
        """Take nothing new, and end everything with an `EngineClosedError`, each job at its next turn."""
        with self._changed:
            self._closed = True
            for job in (*self._waiting, *self._running):
                job.given_up = True
            self._changed.notify()

    def stop(self) -> None:
        """Take nothing new, cancel everything, and let `wait` return False once it has ended."""
        with self._changed:
            self._closed = self._stopped = True
            for job in (*self._waiting, *self._running):
                job.cancelled = True
            self._changed.notify()

    def wait(self) -> bool:
        """Wait until there is something to do; False when `stop` was called and nothing is left."""
        with self._changed:
            while not (self._waiting or self._running):
                if self._stopped:
                    return False
                self._changed.wait()
            return True

    def turn(self) -> None:
        """Begin what has room, then give the next running job one step, or the next `max_batch` of them."""
        with self._changed:
            dropped = [waiter for waiter in self._waiting if waiter.ends_early]
            for waiter in dropped:
                self._waiting.remove(waiter)
            self._begin()
            jobs = tuple(islice(self._running, self.max_batch))
        for waiter in dropped:
            waiter.on_end(*_end_early(waiter))
        for job, played in self._play_all(jobs):
            self._settle(job, *played)

    def end(self) -> None:
        """End the threads that jobs have run in; no `turn` may follow."""
        self.rendezvous.stop()

    def _play_all(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, _Played]]:
        """Give one step to each job; the outcomes as they come."""
        if len(jobs) < 2:
            yield from ((job, _play(job)) for job in jobs)
            return
        for index, played in self.rendezvous.play([partial(_play, job) for job in jobs]):
            yield jobs[index], played

    def _settle(self, job: Job, step: Any, outcome: Outcome | None, error: Exception | None) -> None:
        with self._changed:
            self._running.remove(job)
            if outcome is None:
                self._running.append(job)
            else:  # before anyone is told, so that there is room by then
                self._kv_reserved -= job.work.kv_bytes
                self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * (time.monotonic() - job.submitted)
        if step is not None:
            job.on_step(step)
        if outcome is not None:
            job.on_end(outcome, error)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            kv_bytes = self._waiting[0].work.kv_bytes
            if self.kv_budget is not None and self._kv_reserved + kv_bytes > self.kv_budget:
                return
            self._kv_reserved += kv_bytes
            self._running.append(self._waiting.popleft())

    def _retry_after_s(self) -> float:
        """Seconds until one of the texts will probably have ended: they end evenly over their mean duration."""
        return min(self._mean_s / self.max_running, _LONGEST_RETRY_S)


def _play(job: Job) -> _Played:
    """Give one step to a running job. The step, if there is one, and how the job has ended, if it has."""
    if job.ends_early:
        return None, *_end_early(job)
    try:
        step = job.work.advance()
        if not job.work.finished:
            return step, None, None
        job.work.close()
    except StopIteration:
        return None, "finished", None
    except Exception as error:  # whatever it is, it ends this job alone
        job.work.close()
        return None, "failed", error
    return step, "finished", None


def _end_early(job: Job) -> tuple[Outcome, Exception | None]:
    job.work.close()
    if job.cancelled:
        return "cancelled", None
    if job.given_up:
        return "cancelled", EngineClosedError("The engine closed before the text was complete.")
    waited = time.monotonic() - job.submitted
    return "expired", DeadlineError(f"The deadline passed {waited:.1f} s after the text was asked for.")


def _check_limit(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInputError(f"{name} must be an integer of at least {least}, got {shown(value)}.")
