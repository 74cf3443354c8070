"""What Python raises while native code runs, kept until that code has returned.

TensorRT loses what its callbacks raise, and what a signal's handler raises inside one of them: Ctrl-C among it.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec

__all__ = ["Interruption"]

_P = ParamSpec("_P")


class Interruption:
    """Keeps the first exception of callbacks and of handlers of SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def keep(self, function: Callable[_P, object]) -> Callable[_P, None]:
        """The function, which raises no more."""

        @functools.wraps(function)
        def kept(*args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.error = self.error or error

        return kept

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it signals' handlers raise nothing; at its end what was kept is raised, before any other error."""
        self.error = None
        # A handler can run before a callback's first line, where no `try` of the callback would catch what it raises.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        mine = threading.current_thread() is threading.main_thread()
        changed = {number: handler for number, handler in handlers.items() if mine and callable(handler)}
        try:
            for number, handler in changed.items():
                signal.signal(number, self.keep(handler))
            yield
        finally:
            for number, handler in changed.items():
                signal.signal(number, handler)
            if self.error is not None:
                raise self.error
