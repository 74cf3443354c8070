"""Arrays in the memory of a device, which graphs read and write where they lie."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from . import cuda
from .errors import InvalidInputError

__all__ = ["AnyArray", "DeviceArray", "bind_input", "bind_output", "fill", "fill_first", "on_host", "placed"]


class DeviceArray:
    """An array that ONNX Runtime has allocated on a device, or a part of one along its first axis.

    Attributes:
        device: as ONNX Runtime names it.
        shape: of the array.
        dtype: of the array.
        pointer: address on the device.
    """

    __slots__ = ("_owner", "device", "dtype", "pointer", "shape")

    def __init__(self, owner: Any, device: str, shape: tuple[int, ...], dtype: np.dtype[Any], pointer: int) -> None:
        """A view of `owner`'s memory, which lives as long as the view; `empty` makes a whole array."""
        self._owner = owner
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.pointer = pointer

    @classmethod
    def empty(cls, device: str, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Allocate an array; what it holds is arbitrary.

        Raises:
            InvalidInputError: the device has no room for it.
        """
        import onnxruntime

        made = np.dtype(dtype)
        try:
            owner = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), made.type, device, 0)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            free = f", {cuda.free_bytes()} are free" if device == "cuda" else ""
            raise InvalidInputError(
                f"{device} has no room for {math.prod(shape) * made.itemsize} bytes of {made} {shape}{free} ({error}): "
                "ask for fewer tokens, run fewer texts at once, or use another provider."
            ) from error
        return cls(owner, device, shape, made, owner.data_ptr())

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | tuple[slice, None] | None) -> Self:
        """`array[a:b]` along the first axis, `array[np.newaxis]`, and `array[a:b, np.newaxis]`; nothing is copied."""
        if key is None:
            return type(self)(self._owner, self.device, (1, *self.shape), self.dtype, self.pointer)
        rows, widens = (key[0], True) if isinstance(key, tuple) else (key, False)
        first, last, _ = slice(rows.start, rows.stop).indices(len(self))
        count, rest = max(last - first, 0), self.shape[1:]
        pointer = self.pointer + first * math.prod(rest) * self.dtype.itemsize
        shape = (count, 1, *rest) if widens else (count, *rest)
        return type(self)(self._owner, self.device, shape, self.dtype, pointer)

    def numpy(self) -> NDArray[Any]:
        """A copy in host memory. Of a part, the whole array is copied first."""
        whole = self._owner.numpy().reshape(-1)
        first = (self.pointer - self._owner.data_ptr()) // self.dtype.itemsize
        return np.array(whole[first : first + math.prod(self.shape)]).reshape(self.shape)

    def write(self, array: NDArray[Any]) -> None:
        """Fill the array from host memory.

        Raises:
            InvalidInputError: another shape or dtype, or this is a part of an array.
        """
        whole = tuple(self._owner.shape())
        if (array.shape, array.dtype) != (self.shape, self.dtype) or self.shape != whole:
            raise InvalidInputError(
                f"Cannot fill {self.dtype} {self.shape} of an array of shape {whole} with {array.dtype} {array.shape}; "
                "only a whole array can be filled."
            )
        self._owner.update_inplace(np.ascontiguousarray(array))


AnyArray = NDArray[Any] | DeviceArray


def on_host(array: AnyArray) -> NDArray[Any]:
    """The array itself in host memory, or a copy of it from a device."""
    return array.numpy() if isinstance(array, DeviceArray) else array


def placed(array: NDArray[Any], device: str | None) -> AnyArray:
    """A copy on the device, or the array itself where there is none."""
    if device is None:
        return array
    copy = DeviceArray.empty(device, array.shape, array.dtype)
    copy.write(array)
    return copy


def fill(array: AnyArray, values: NDArray[Any]) -> None:
    """Fill a whole array, wherever it lies, with values of its shape."""
    if isinstance(array, DeviceArray):
        array.write(values.astype(array.dtype, copy=False))
    else:
        array[...] = values


def fill_first(buffer: AnyArray, values: NDArray[Any]) -> None:
    """Fill the first positions of a KV cache's buffer `[1, heads, positions, size]`.

    On a device the others become zero.
    """
    length = values.shape[2]
    if not isinstance(buffer, DeviceArray):
        buffer[:, :, :length] = values
        return
    whole = np.zeros(buffer.shape, buffer.dtype)
    whole[:, :, :length] = values
    buffer.write(whole)


def bind_input(binding: Any, name: str, array: AnyArray) -> None:
    """Let a session's graph read an input from the array."""
    binding.bind_input(name, *_place(array))


def bind_output(binding: Any, name: str, array: AnyArray) -> None:
    """Let a session's graph write an output into the array."""
    binding.bind_output(name, *_place(array))


def _place(array: AnyArray) -> tuple[str, int, Any, tuple[int, ...], int]:
    """Device and its number, type of an element, shape, address: as ONNX Runtime wants them."""
    if isinstance(array, DeviceArray):
        return array.device, 0, array.dtype.type, array.shape, array.pointer
    return "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
