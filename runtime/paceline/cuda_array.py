"""Arrays that CUDA itself has allocated, copied in the order of the shared stream; no ONNX Runtime is needed."""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import cuda
from .device_array import DeviceArray
from .errors import InvalidInputError, PacelineError

__all__ = ["CudaArray"]

_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3  # of cudaMemcpyKind


class CudaArray(DeviceArray):
    """An array in the memory of CUDA's first device, or a part of one along its first axis.

    Everything that is done to it takes its turn on the shared stream. Host memory that it is written from may be
    changed at once: CUDA keeps a copy of what is not pinned.
    """

    __slots__ = ()

    @classmethod
    def empty(cls, device: str, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Allocate an array of zeros.

        Args:
            device: what ONNX Runtime calls the device that its graphs read the array on.
            shape: of the array.
            dtype: of the array.

        Raises:
            InvalidInputError: the device has no room for it, with the bytes that are needed and free.
        """
        made = np.dtype(dtype)
        num_bytes = math.prod(shape) * made.itemsize
        owner = _Allocation(num_bytes, f"{made} {shape}")
        _check("cudaMemsetAsync", ctypes.c_void_p(owner.pointer), 0, ctypes.c_size_t(num_bytes), _stream())
        return cls(owner, device, shape, made, owner.pointer)

    def numpy(self) -> NDArray[Any]:
        """A copy in host memory of this array or part, once all work before it is done."""
        values = np.empty(self.shape, self.dtype)
        _copy(values.ctypes.data, self.pointer, self.nbytes, _TO_HOST)
        _check("cudaStreamSynchronize", _stream())
        return values

    def write(self, array: NDArray[Any]) -> None:
        """Fill this array or part from host memory.

        Raises:
            InvalidInputError: another shape or dtype.
        """
        self._check_fit(array.shape, array.dtype)
        values = np.ascontiguousarray(array)
        _copy(self.pointer, values.ctypes.data, self.nbytes, _TO_DEVICE)

    def copy_from(self, other: DeviceArray) -> None:
        """Fill this array or part from another one on the device, whoever has allocated it.

        Raises:
            InvalidInputError: another shape or dtype.
        """
        self._check_fit(other.shape, other.dtype)
        _copy(self.pointer, other.pointer, self.nbytes, _ON_DEVICE)

    def _check_fit(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if (shape, dtype) != (self.shape, self.dtype):
            raise InvalidInputError(f"Cannot fill {self.dtype} {self.shape} with {dtype} {shape}.")


class _Allocation:
    """Memory of the device, given back with the object."""

    __slots__ = ("pointer",)

    def __init__(self, num_bytes: int, what: str) -> None:
        self.pointer = 0
        pointer = ctypes.c_void_p()
        if status := cuda.status_of("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes)):
            raise InvalidInputError(
                f"The GPU has no room for {num_bytes} bytes of {what}, {cuda.free_bytes()} are free "
                f"({cuda.reason(status)}): run fewer texts at once, end what else uses the GPU, or build engines with "
                "a smaller --max-length."
            )
        self.pointer = pointer.value or 0

    def __del__(self) -> None:
        if self.pointer:
            with contextlib.suppress(PacelineError):  # where the process ends, CUDA may be gone
                cuda.status_of("cudaFree", ctypes.c_void_p(self.pointer))


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(cuda.shared_stream())


def _copy(target: int, source: int, num_bytes: int, kind: int) -> None:
    size = ctypes.c_size_t(num_bytes)
    _check("cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), size, kind, _stream())


def _check(name: str, *arguments: object) -> None:
    if status := cuda.status_of(name, *arguments):
        raise PacelineError(
            f"The GPU failed: {cuda.reason(status)} ({name}: error {status}). The error may come from work before; "
            "the process must be started anew."
        )
