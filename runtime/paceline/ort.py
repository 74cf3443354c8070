"""Run an exported graph with ONNX Runtime: in-place KV caches and bound buffers, in host memory or a device's."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, ModelEntry, TensorSpec
from .device_array import AnyArray, DeviceArray, bind_input, bind_output, fill, fill_first, on_host
from .errors import BundleError, InvalidInputError
from .kv_cache import KVCache, SavedKV
from .logit_ids import read_logit_ids
from .model import checked_ids
from .ort_session import open_session
from .providers import PROVIDERS, Provider, find_provider

__all__ = ["OrtKVCache", "OrtModel", "check_specs"]

# Rows per run while a long prompt is fed: bounds the memory of attention scores (heads × rows × length).
PREFILL_ROWS = 256
# Saved caches are copied where less than this share of them is used.
_FULL_ENOUGH = 0.8
# Bytes of a buffer from which it asks for huge pages, as numpy does for its own.
_HUGE = 1 << 22
# Names of dtypes as ONNX Runtime says them.
_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
}


@dataclass(frozen=True, slots=True)
class _Counter:
    """An input that says where a step's rows go: its dtype, its shape, and its value from cache length and rows."""

    dtype: type[np.generic]
    shape: tuple[int, ...]
    value: Callable[[int, int], int]


# By their names in the graphs; each flavour has its own. A graph of the flavour `trt` is made for TensorRT, but its
# operators are standard ones that ONNX Runtime's CPU provider runs too, so nothing speaks against binding it.
_COUNTERS = {
    "seqlens_k": _Counter(np.int32, (1,), lambda length, rows: length + rows - 1),
    "total_sequence_length": _Counter(np.int32, (), lambda length, rows: length + rows),
    "write_indices": _Counter(np.int64, (1,), lambda length, rows: length),
}


class OrtKVCache(KVCache):
    """Key and value buffers of one sequence, bound once; the graph writes into them in place."""

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
        self.binding = model.session.io_binding()
        for buffer, past, present in zip(self.buffers, model.past_names, model.present_names, strict=True):
            bind_input(self.binding, past, buffer)
            bind_output(self.binding, present, buffer)
        counters = {name: _COUNTERS[name] for name in shapes if name in _COUNTERS}
        self._counters = {name: np.zeros(given.shape, given.dtype) for name, given in counters.items()}
        self._ids: AnyArray = np.empty((1, 0), np.int64)
        self._reads_in_place = self._stays = False
        self._logits_indices = np.empty(0, np.int64)
        self._indices_shape = (1,) * (len(shapes["logits_indices"]) - 1)  # a graph may have one row of them a sequence
        self._logits = np.empty((0, entry.vocab_size), np.float32)
        self._device_logits: DeviceArray | None = None
        self._bind_inputs()

    def prepare(self, ids: AnyArray, num_logits: int, *, in_place: bool = False, stay: bool = False) -> AnyArray:
        """Bind one run's inputs and its logits `[num_logits, vocab_size]`, which are returned to be read afterwards.

        Buffers are kept from run to run: where the shapes are those of the run before, nothing is bound again. With
        `in_place` the graph reads `ids` itself when it runs, not what it holds now. With `stay` the logits are not
        brought to the host.
        """
        rows, device = len(ids), self.model.provider.device
        stay = stay and device is not None
        changed = (
            in_place
            or self._reads_in_place
            or self._stays != stay
            or self._ids.shape[1] != rows
            or len(self._logits_indices) != num_logits
        )
        if changed:
            self._reads_in_place, self._stays = in_place, stay
            self._ids = ids[np.newaxis] if in_place else np.empty((1, rows), np.int64)
            self._logits_indices = np.arange(rows - num_logits, rows, dtype=np.int64)
        if not in_place:
            cast(NDArray[np.int64], self._ids)[0] = cast(NDArray[np.int64], ids)
        for name, counter in self._counters.items():
            counter[...] = _COUNTERS[name].value(self.length, rows)
        logits = self._room_for_logits(num_logits, device if stay else None)
        if changed:
            bind_output(self.binding, "logits", logits[np.newaxis])
        if changed or self.model.provider.reads_when_bound:
            self._bind_inputs()
        return logits

    def _room_for_logits(self, num_logits: int, device: str | None) -> AnyArray:
        """The first rows of the buffer for logits, which grows where it is too small."""
        if device is None:
            if len(self._logits) < num_logits:
                self._logits = np.empty((num_logits, self._logits.shape[1]), np.float32)
            return self._logits[:num_logits]
        if self._device_logits is None or len(self._device_logits) < num_logits:
            self._device_logits = DeviceArray.empty(device, (num_logits, self._logits.shape[1]), np.float32)
        return self._device_logits[:num_logits]

    def _bind_inputs(self) -> None:
        indices = self._logits_indices.reshape(*self._indices_shape, -1)
        for name, array in {"input_ids": self._ids, "logits_indices": indices, **self._counters}.items():
            if array.shape[-1:] != (0,):  # nothing is bound before the first run
                bind_input(self.binding, name, array)

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


class OrtModel:
    """A causal language model run by ONNX Runtime; see `paceline.model.CausalLM`."""

    def __init__(
        self,
        session: Any,
        entry: ModelEntry,
        logit_ids: NDArray[np.int64] | None = None,
        provider: Provider = PROVIDERS["cpu"],
    ) -> None:
        """Run `entry`'s graph with a session that `open_session` has opened for this provider."""
        self.session = session
        self.entry = entry
        self.provider = provider
        self._logit_ids = logit_ids
        self.past_names = [spec.name for spec in entry.inputs if spec.name.startswith("past_key_values.")]
        self.present_names = [name.replace("past_key_values.", "present.") for name in self.past_names]

    @classmethod
    def open(cls, bundle: Bundle, which: str, *, provider: str = "cpu", threads: int | None = None) -> OrtModel:
        """Load one model of a bundle.

        Args:
            bundle: an opened bundle.
            which: `"target"` or `"draft"`.
            provider: a key of `PROVIDERS`.
            threads: of the pool that all models of the process share; None means one per physical core that the
                process may use. The first model of the process decides.

        Raises:
            InvalidInputError: an unknown provider, or a number of threads that differs from the existing pool's.
            InstallationError: ONNX Runtime is missing, installed twice, lacks the provider, or the provider does not
                start.
            BundleError: the graph cannot be loaded, does not match the manifest, or the provider cannot update its KV
                caches where they lie.
        """
        row = find_provider(provider)
        entry: ModelEntry | None = getattr(bundle.manifest, which)
        if entry is None:
            raise InvalidInputError(f"{bundle.root} has no {which} model.")
        if entry.kv_dtype == "bfloat16":
            raise InvalidInputError(
                f"{bundle.root}: the {which} computes in bfloat16, which ONNX Runtime's CPU provider does not. Export "
                "it with fp16, or build an engine of it (`paceline build`)."
            )
        logit_ids = read_logit_ids(bundle, entry)
        session = open_session(bundle.path(entry.path), provider=provider, threads=threads)
        model = cls(session, entry, logit_ids, row)
        model._check_against_manifest(bundle.root)
        if provider != "cpu":
            model._check_attention(bundle.root)
            model._check_in_place(bundle.root)
        return model

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.entry.vocab_size

    @property
    def logit_ids(self) -> NDArray[np.int64] | None:
        """The id that each logit stands for, rising; None where the i-th stands for id i."""
        return self._logit_ids

    @property
    def max_length(self) -> int:
        """Largest number of positions of a cache."""
        return self.entry.max_length

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that a cache takes for each of its positions."""
        return self.entry.kv_bytes_per_position

    @property
    def prefill_rows(self) -> int:
        """Rows of a long prompt in one run of the graph."""
        return PREFILL_ROWS

    def new_cache(self, max_length: int) -> OrtKVCache:
        """Make an empty cache.

        Raises:
            InvalidInputError: longer than the model's `max_length`.
        """
        if max_length > self.max_length:
            raise InvalidInputError(f"A cache of {max_length} positions exceeds the model's {self.max_length}.")
        return self._new_cache(max_length)

    def _new_cache(self, max_length: int) -> OrtKVCache:
        return OrtKVCache(self, max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens` behind what `cache` holds; see `paceline.model.CausalLM.forward`."""
        return cast(NDArray[np.float32], self._forward(tokens, cache, num_logits, stay=False))

    def forward_resident(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward`, with logits that stay on the device, where the provider has one."""
        return self._forward(tokens, cache, num_logits, stay=True)

    def _forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int, *, stay: bool) -> AnyArray:
        cache = self._own(cache)
        ids = checked_ids(tokens, cache, num_logits, self.entry.num_input_ids)
        count = len(ids)
        # Long inputs go in pieces; the last piece holds every row whose logits are wanted.
        last = max(min(count, PREFILL_ROWS), num_logits)
        position = 0
        while position < count - last:
            step = min(PREFILL_ROWS, count - last - position)
            self._run(ids[position : position + step], cache, 1, stay=stay)
            position += step
        return self._run(ids[position:], cache, num_logits, stay=stay)

    def _own(self, cache: KVCache) -> OrtKVCache:
        if not isinstance(cache, OrtKVCache) or cache.model is not self:
            raise InvalidInputError("The KV cache was made by another model; use this model's new_cache().")
        return cache

    def forward_in_place(self, ids: AnyArray, cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward_resident`, in one piece, with ids that other graphs have written: they are not looked at.

        Args:
            ids: `[count]`, ids of the vocabulary.
            cache: made by this model's `new_cache`, with room for them.
            num_logits: between 1 and `count`.
        """
        return self._run(ids, cast(OrtKVCache, cache), num_logits, in_place=True, stay=True)

    def _run(
        self, ids: AnyArray, cache: OrtKVCache, num_logits: int, *, in_place: bool = False, stay: bool = False
    ) -> AnyArray:
        """One run of the graph over at most a piece of the input."""
        logits = cache.prepare(ids, num_logits, in_place=in_place, stay=stay)
        start = time.perf_counter()
        try:
            self.session.run_with_iobinding(cache.binding)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise BundleError(
                f"ONNX Runtime cannot run {self.entry.path} on positions {cache.length} to {cache.length + len(ids)}: "
                f"{error}"
            ) from error
        cache.seconds += time.perf_counter() - start
        cache.advance(len(ids))
        return logits

    def _check_against_manifest(self, root: Path) -> None:
        for kind, specs, found in (
            ("input", self.entry.inputs, self.session.get_inputs()),
            ("output", self.entry.outputs, self.session.get_outputs()),
        ):
            check_specs(root, self.entry.path, kind, specs, found)

    def _check_attention(self, root: Path) -> None:
        """See that attention runs where the KV caches lie: elsewhere every step would copy all of them."""
        if self.provider.device in (None, "cpu"):
            return
        nodes = (
            (part.ep_name, node.op_type)
            for part in self.session.get_provider_graph_assignment_info()
            for node in part.get_nodes()
        )
        if ("CPUExecutionProvider", "GroupQueryAttention") in nodes:
            raise BundleError(
                f"{root}: {self.provider.name} leaves the attention of {self.entry.path} to the CPU, so each step "
                f"would copy its {self.entry.kv_dtype} KV caches there and back. On a GPU caches must be float16: "
                "export the bundle with --flavor cuda, or with --precision fp16."
            )

    def _check_in_place(self, root: Path) -> None:
        """See that a step writes its own positions into the bound buffers, and leaves the others as they are."""
        mark, cache = 7.5, self.new_cache(min(4, self.max_length))
        for buffer in cache.buffers:
            fill(buffer, np.full(buffer.shape, mark, buffer.dtype))
        seen = []
        for tokens in ([0], [1, 0]):
            self.forward(tokens, cache, 1)
            seen.append([on_host(buffer).copy() for buffer in cache.buffers])
        for first, second in zip(*seen, strict=True):
            written = (first[:, :, :1] != mark).any() and (second[:, :, 1:3] != mark).any()
            kept = (first[:, :, 1:] == mark).all() and (second[:, :, 3:] == mark).all()
            if not (written and kept and (first[:, :, :1] == second[:, :, :1]).all()):
                raise BundleError(
                    f"{root}: {self.provider.name} does not update the KV caches of {self.entry.path} where they lie; "
                    "load the bundle with another provider."
                )


def check_specs(root: Path, path: str, kind: str, specs: Sequence[TensorSpec], found: Sequence[Any]) -> None:
    """Compare what a graph should read or write with what its session says.

    Raises:
        BundleError: they differ.
    """
    listed = sorted((spec.name, list(spec.shape), _TYPES.get(spec.dtype)) for spec in specs)
    if listed != sorted((value.name, value.shape, value.type) for value in found):
        raise BundleError(f"{root}: the {kind}s of {path} are not those of the manifest; export the bundle again.")
