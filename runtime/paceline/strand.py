"""A thread that stops to ask: code deep in a call hands a question to its owner, and goes on with the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Strand", "text_time"]

_here = threading.local()


class Strand:
    """A thread that runs only while its owner waits for it, so that one of the two runs at any time.

    It is a coroutine whose code need not know that it is one: a forward deep inside a round can wait for others. The
    owner calls `begin`, `answer` and `result`; what runs in the strand finds it with `current` and calls `ask`.

    Attributes:
        others_s: seconds that it has waited for, without what was its own share of them.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, which waits."""
        self.others_s = 0.0
        self._task: Callable[[], Any] | None = None
        self._question: Any = None  # None: the task has ended
        self._answer: Any = None
        self._error: BaseException | None = None
        self._result: Any = None
        # Each is free while the other one may go on: locks are the fastest signals that there are.
        self._strands_turn, self._owners_turn = _taken_lock(), _taken_lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @staticmethod
    def current() -> Strand | None:
        """The strand that the caller runs in, if it does."""
        found: Strand | None = getattr(_here, "strand", None)
        return found

    def begin(self, task: Callable[[], Any]) -> Any:
        """Run `task` until it asks or ends; its question, or None once it has ended."""
        self._task = task
        return self._go_on()

    def answer(self, value: Any = None, error: BaseException | None = None) -> Any:
        """Go on with an answer, or with an error that `ask` raises; the next question, or None."""
        self._answer, self._error = value, error
        return self._go_on()

    def result(self) -> Any:
        """What the task has returned; raises what it has raised."""
        result, error = self._result, self._error
        self._result = self._error = None
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        """End the thread; no task must be running."""
        self._task = None
        self._strands_turn.release()
        self._thread.join()

    def ask(self, question: Any) -> Any:
        """Called inside the strand: hand `question`, which is not None, to the owner and wait for its answer."""
        started = time.perf_counter()
        self._question = question
        self._owners_turn.release()
        self._strands_turn.acquire()
        self.others_s += time.perf_counter() - started
        answer, error = self._answer, self._error
        self._answer = self._error = None
        if error is not None:
            raise error
        return answer

    def _go_on(self) -> Any:
        self._question = None
        self._strands_turn.release()
        self._owners_turn.acquire()
        return self._question

    def _work(self) -> None:
        _here.strand = self
        while True:
            self._strands_turn.acquire()
            if (task := self._task) is None:
                return
            try:
                self._result = task()
            except BaseException as error:  # whatever it is, it belongs to the owner
                self._error = error
            self._task = task = None
            self._owners_turn.release()


def text_time() -> float:
    """Seconds, as `time.perf_counter`, that stand still while the caller's strand waits for other texts."""
    strand = Strand.current()
    return time.perf_counter() - (strand.others_s if strand is not None else 0.0)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
