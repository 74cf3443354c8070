"""CUDA graphs: work that is recorded once and launched as a whole, again and again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable

from . import cuda
from .errors import PacelineError

__all__ = ["CudaGraph"]

_NON_BLOCKING = 1  # cudaStreamNonBlocking
_RELAXED = 2  # cudaStreamCaptureModeRelaxed: memory may be freed meanwhile, by this thread and by others
_lock = threading.Lock()


class CudaGraph:
    """A recorded piece of work, as it was when it was recorded: its addresses and shapes are part of it.

    It is recorded on a stream of its own, since the shared one may get work from other threads meanwhile, which would
    be recorded, too.
    """

    def __init__(self, record: Callable[[int], None]) -> None:
        """Record what `record` puts onto the stream whose address it is given; nothing of it runs.

        Raises:
            PacelineError: it cannot be recorded.
        """
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        with _lock:
            stream = ctypes.c_void_p(_recording_stream())
            _check("cudaStreamBeginCapture", stream, _RELAXED)
            try:
                record(stream.value or 0)
            finally:  # a stream that goes on recording would be of no use any more
                ended = cuda.status_of("cudaStreamEndCapture", stream, ctypes.byref(graph))
        try:
            _raise("cudaStreamEndCapture", ended)
            _check("cudaGraphInstantiate", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        finally:
            if graph.value:
                cuda.status_of("cudaGraphDestroy", graph)

    def launch(self) -> None:
        """Run it on the shared stream, behind what was put there before.

        Raises:
            PacelineError: it cannot be launched.
        """
        _check("cudaGraphLaunch", self._executable, ctypes.c_void_p(cuda.shared_stream()))

    def __del__(self) -> None:
        if self._executable.value:
            with contextlib.suppress(PacelineError):  # where the process ends, CUDA may be gone
                cuda.status_of("cudaGraphExecDestroy", self._executable)


@functools.cache
def _recording_stream() -> int:
    """A stream that waits for no other one: the default stream must not wait for one that records."""
    stream = ctypes.c_void_p()
    cuda.call("cudaStreamCreateWithFlags", ctypes.byref(stream), _NON_BLOCKING)
    return int(stream.value or 0)


def _check(name: str, *arguments: object) -> None:
    _raise(name, cuda.status_of(name, *arguments))


def _raise(name: str, status: int) -> None:
    if status:
        raise PacelineError(f"CUDA cannot record or launch a graph: {cuda.reason(status)} ({name}: error {status}).")
