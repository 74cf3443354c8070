"""What an engine reads and writes for one sequence: KV caches, inputs and logits, in memory that stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .bundle import ModelEntry
from .cuda_array import CudaArray
from .cuda_graph import CudaGraph
from .device_array import AnyArray, DeviceArray
from .trt_engine import Engine

__all__ = ["SequenceMemory", "bfloat16_bits"]


class _Recorded(NamedTuple):
    """A pass as a CUDA graph, and the addresses that it reads and writes."""

    graph: CudaGraph
    addresses: tuple[int, ...]


class SequenceMemory:
    """Device memory of one sequence, allocated once, and the CUDA graphs that read and write it.

    Keys and values are zeros at first: what lies behind a sequence's length is masked, but must be finite. What an
    earlier sequence has left there is, so the next one may have the memory as it is.

    Attributes:
        buffers: keys and values, layer by layer, as the graph's inputs are ordered: each `[1, heads, positions, size]`.
            Those of bfloat16, which numpy does not know, hold its bits as uint16.
    """

    def __init__(self, engine: Engine, model: ModelEntry, device: str) -> None:
        """Allocate everything.

        Args:
            engine: that will use it.
            model: whose caches these are.
            device: what ONNX Runtime calls the device.

        Raises:
            InvalidInputError: the GPU has no room for it.
        """
        self._engine = engine
        names = [spec.name for spec in model.inputs if spec.name.startswith("past_key_values.")]
        shape = (1, model.num_kv_heads, engine.entry.max_length, model.head_size)
        dtype = "uint16" if model.kv_dtype == "bfloat16" else model.kv_dtype
        self.buffers = [CudaArray.empty(device, shape, dtype) for _ in names]
        self._caches: dict[str, DeviceArray] = {}
        for name, buffer in zip(names, self.buffers, strict=True):
            self._caches[name] = self._caches[name.replace("past_key_values.", "present.")] = buffer
        self._ids = CudaArray.empty(device, (engine.max_rows,), np.int64)
        self._write_indices = CudaArray.empty(device, (1,), np.int64)
        self._logits_indices = CudaArray.empty(device, (engine.max_logits,), np.int64)
        self._logits = CudaArray.empty(device, (engine.max_logits, model.vocab_size), np.float32)
        self._graphs: dict[tuple[int, int], _Recorded] = {}
        self._indexed: tuple[int, int] | None = None  # the shape whose indices are written

    def run(self, ids: AnyArray, length: int, num_logits: int) -> CudaArray:
        """One pass over `ids` behind the first `length` positions.

        Args:
            ids: int64 `[rows]`, on the host or on the device.
            length: valid positions of the caches; those of the rows become valid, too.
            num_logits: rows at the end whose logits are wanted.

        Returns:
            `[num_logits, vocab_size]`, valid until the next pass.

        Raises:
            BundleError: TensorRT refuses.
        """
        rows = len(ids)
        shape = (rows, num_logits)
        if isinstance(ids, DeviceArray):
            self._ids[:rows].copy_from(ids)
        else:
            self._ids[:rows].write(ids)
        self._write_indices.write(np.array([length], np.int64))
        if self._indexed != shape:
            self._logits_indices[:num_logits].write(np.arange(rows - num_logits, rows, dtype=np.int64))
            self._indexed = shape
        logits = self._logits[:num_logits]
        arrays = {
            "input_ids": self._ids[:rows][np.newaxis],
            "write_indices": self._write_indices,
            "logits_indices": self._logits_indices[:num_logits][np.newaxis],
            "logits": logits[np.newaxis],
            **self._caches,
        }
        graph = self._recorded(shape, arrays)
        if graph is None:
            self._engine.run(shape, arrays)
        else:
            graph.launch()
        return logits

    def gathered(self, device: str, num_logits: int) -> CudaArray:
        """Room for the logits of several passes."""
        return CudaArray.empty(device, (num_logits, self._logits.shape[1]), np.float32)

    def _recorded(self, shape: tuple[int, int], arrays: dict[str, DeviceArray]) -> CudaGraph | None:
        """The graph of a pass that reads and writes these arrays, recorded anew where it was for others."""
        if not (self._engine.records(shape) and self._engine.is_warm(shape)):
            return None
        addresses = tuple(array.pointer for array in arrays.values())
        known = self._graphs.get(shape)
        if known is None or known.addresses != addresses:
            graph = self._engine.record(shape, arrays)
            if graph is None:
                return None
            known = self._graphs[shape] = _Recorded(graph, addresses)
        return known.graph


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Numbers as bfloat16, cut off: the upper half of their bits."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
