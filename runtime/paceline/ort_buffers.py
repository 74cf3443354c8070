"""Keys and values of one sequence in buffers that ONNX Runtime's graphs update where they lie."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .device_array import DeviceArray, fill_first, on_host
from .errors import InvalidInputError
from .kv_cache import KVCache, SavedKV

if TYPE_CHECKING:
    from .ort import OrtModel

__all__ = ["OrtBuffers"]

# Saved caches are copied where less than this share of them is used.
_FULL_ENOUGH = 0.8
# Bytes of a buffer from which it asks for huge pages, as numpy does for its own.
_HUGE = 1 << 22


class OrtBuffers(KVCache):
    """Key and value buffers of one sequence; how a graph comes to them is left to subclasses.

    Attributes:
        model: whose keys and values these are.
        buffers: `[1, kv_heads, positions, head_size]`, in the order of the model's `past_names`.
    """

    def __init__(self, model: OrtModel, max_length: int) -> None:
        super().__init__(max_length)
        self.model = model
        entry, device = model.entry, model.provider.device
        shapes = {spec.name: spec.shape for spec in entry.inputs}
        fixed = shapes[model.past_names[0]][2]  # a number where the graph has caches of one length only
        positions = fixed if isinstance(fixed, int) else max_length
        shape = (1, entry.num_kv_heads, positions, entry.head_size)
        self.buffers: list[Any] = [
            _untouched(shape, entry.kv_dtype) if device is None else DeviceArray.empty(device, shape, entry.kv_dtype)
            for _ in range(2 * entry.num_layers)
        ]

    def save(self) -> SavedKV:
        """Give away the buffers, or copies of what they hold where much of them is free; see `KVCache.save`.

        What lies on a device is copied to the host, where there is more room.
        """
        buffers = [on_host(buffer) for buffer in self.buffers]
        if self.length < _FULL_ENOUGH * self.max_length:
            buffers = [buffer[:, :, : self.length].copy() for buffer in buffers]
        return SavedKV(buffers, sum(buffer.nbytes for buffer in buffers))

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with a copy of the first `length` positions; see `KVCache.restore`."""
        if self.length:
            raise InvalidInputError(f"Only an empty KV cache can be restored, this one holds {self.length} positions.")
        for mine, other in zip(self.buffers, saved.state, strict=True):
            fill_first(mine, other[:, :, :length])
        self.advance(length)

    def pretend(self, length: int, rng: np.random.Generator) -> None:
        """Become as if `length` positions had been fed, with arbitrary keys and values: to measure times alone."""
        for buffer in self.buffers:
            _, heads, _, head_size = buffer.shape
            fill_first(buffer, rng.standard_normal((1, heads, length, head_size), np.float32))
        self.rollback(0)
        self.advance(length)


def _untouched(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Zeros whose pages are taken when they are written, so that an ample `max_length` costs nothing yet.

    A mapping of its own: memory that the heap recycles would be cleared, and so taken, at once.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
