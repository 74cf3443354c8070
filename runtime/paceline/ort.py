"""Run an exported graph with ONNX Runtime: in-place KV caches, bound buffers, one shared thread pool."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, ModelEntry
from .errors import BundleError, InstallationError, InvalidInputError, shown
from .kv_cache import KVCache, SavedKV
from .logit_ids import read_logit_ids

__all__ = ["PROVIDERS", "OrtKVCache", "OrtModel", "Provider"]

# Rows per run while a long prompt is fed: bounds the memory of attention scores (heads × rows × length).
PREFILL_ROWS = 256
# Saved caches are copied where less than this share of them is used.
_FULL_ENOUGH = 0.8
# Bytes of a buffer from which it asks for huge pages, as numpy does for its own.
_HUGE = 1 << 22


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider of ONNX Runtime: its name there and the session options it wants."""

    name: str
    session_config: tuple[tuple[str, str], ...] = ()


PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider"),
}

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
# operators are standard ones that this provider runs too, so nothing speaks against binding it.
_COUNTERS = {
    "seqlens_k": _Counter(np.int32, (1,), lambda length, rows: length + rows - 1),
    "total_sequence_length": _Counter(np.int32, (), lambda length, rows: length + rows),
    "write_indices": _Counter(np.int64, (1,), lambda length, rows: length),
}

_pool_lock = threading.Lock()
_pool_threads: int | None = None  # size of the process-wide pool once it exists; 0 is one per physical core


class OrtKVCache(KVCache):
    """Key and value buffers of one sequence, bound once; the graph writes into them in place."""

    def __init__(self, model: OrtModel, max_length: int) -> None:
        super().__init__(max_length)
        self.model = model
        entry = model.entry
        shapes = {spec.name: spec.shape for spec in entry.inputs}
        fixed = shapes[model.past_names[0]][2]  # a number where the graph has caches of one length only
        positions = fixed if isinstance(fixed, int) else max_length
        shape = (1, entry.num_kv_heads, positions, entry.head_size)
        self.buffers = [_untouched(shape, entry.kv_dtype) for _ in range(2 * entry.num_layers)]
        self.binding = model.session.io_binding()
        for buffer, past, present in zip(self.buffers, model.past_names, model.present_names, strict=True):
            pointer = buffer.ctypes.data
            self.binding.bind_input(past, "cpu", 0, buffer.dtype.type, shape, pointer)
            self.binding.bind_output(present, "cpu", 0, buffer.dtype.type, shape, pointer)
        counters = {name: _COUNTERS[name] for name in shapes if name in _COUNTERS}
        self._counters = [(np.zeros(given.shape, given.dtype), given.value) for given in counters.values()]
        for name, (array, _) in zip(counters, self._counters, strict=True):
            self._bind(name, array)
        self._ids = np.empty((1, 0), np.int64)
        self._reads_in_place = False
        self._logits_indices = np.empty(0, np.int64)
        self._indices_shape = (1,) * (len(shapes["logits_indices"]) - 1)  # a graph may have one row of them a sequence
        self._logits = np.empty((0, entry.vocab_size), np.float32)

    def prepare(self, ids: NDArray[np.int64], num_logits: int, *, in_place: bool = False) -> NDArray[np.float32]:
        """Bind one run's inputs and its logits `[num_logits, vocab_size]`, which are returned to be read afterwards.

        Buffers are kept from run to run: where the shapes are those of the run before, nothing is bound again. With
        `in_place` the graph reads `ids` itself when it runs, not what it holds now.
        """
        rows = len(ids)
        if in_place or self._reads_in_place or self._ids.shape[1] != rows or len(self._logits_indices) != num_logits:
            self._reads_in_place = in_place
            self._ids = ids[np.newaxis] if in_place else np.empty((1, rows), np.int64)
            self._logits_indices = np.arange(rows - num_logits, rows, dtype=np.int64)
            if len(self._logits) < num_logits:
                self._logits = np.empty((num_logits, self._logits.shape[1]), np.float32)
            self._bind("input_ids", self._ids)
            self._bind("logits_indices", self._logits_indices.reshape(*self._indices_shape, num_logits))
            logits = self._logits[:num_logits]
            self.binding.bind_output("logits", "cpu", 0, np.float32, (1, *logits.shape), logits.ctypes.data)
        if not in_place:
            self._ids[0] = ids
        for array, value in self._counters:
            array[...] = value(self.length, rows)
        return self._logits[:num_logits]

    def save(self) -> SavedKV:
        """Give away the buffers, or copies of what they hold where much of them is free; see `KVCache.save`."""
        buffers = self.buffers
        if self.length < _FULL_ENOUGH * self.max_length:
            buffers = [buffer[:, :, : self.length].copy() for buffer in buffers]
        return SavedKV(buffers, sum(buffer.nbytes for buffer in buffers))

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with a copy of the first `length` positions; see `KVCache.restore`."""
        if self.length:
            raise InvalidInputError(f"Only an empty KV cache can be restored, this one holds {self.length} positions.")
        for mine, other in zip(self.buffers, saved.state, strict=True):
            mine[:, :, :length] = other[:, :, :length]
        self.advance(length)

    def pretend(self, length: int, rng: np.random.Generator) -> None:
        """Become as if `length` positions had been fed, with arbitrary keys and values: to measure times alone."""
        for buffer in self.buffers:
            buffer[:, :, :length] = rng.standard_normal((*buffer.shape[1:2], length, buffer.shape[3]), np.float32)
        self.rollback(0)
        self.advance(length)

    def _bind(self, name: str, array: NDArray[Any]) -> None:
        self.binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


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

    def __init__(self, session: Any, entry: ModelEntry, logit_ids: NDArray[np.int64] | None = None) -> None:
        self.session = session
        self.entry = entry
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
            threads: of the pool that all models of the process share; None means one per physical core. The first
                model of the process decides.

        Raises:
            InvalidInputError: an unknown provider, or a number of threads that differs from the existing pool's.
            InstallationError: ONNX Runtime is missing, installed twice, or lacks the provider.
            BundleError: the graph cannot be loaded or does not match the manifest.
        """
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
        model = cls(session, entry, logit_ids)
        model._check_against_manifest(bundle.root)
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

    def new_cache(self, max_length: int) -> OrtKVCache:
        """Make an empty cache.

        Raises:
            InvalidInputError: longer than the model's `max_length`.
        """
        if max_length > self.max_length:
            raise InvalidInputError(f"A cache of {max_length} positions exceeds the model's {self.max_length}.")
        return OrtKVCache(self, max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens` behind what `cache` holds; see `paceline.model.CausalLM.forward`."""
        if not isinstance(cache, OrtKVCache) or cache.model is not self:
            raise InvalidInputError("The KV cache was made by another model; use this model's new_cache().")
        count = len(tokens)
        if not 1 <= count <= cache.room:
            raise InvalidInputError(
                f"Cannot feed {count} tokens: at least 1 is needed and the KV cache has room for {cache.room}."
            )
        if not 1 <= num_logits <= count:
            raise InvalidInputError(f"num_logits must be between 1 and the {count} tokens fed, got {num_logits}.")
        ids = np.array(tokens, np.int64)
        num_ids = self.entry.num_input_ids
        if ids.min() < 0 or ids.max() >= num_ids:
            bad = next(int(token) for token in tokens if not 0 <= token < num_ids)
            raise InvalidInputError(f"Token id {bad} is outside the model's {num_ids} ids.")
        # Long inputs go in pieces; the last piece holds every row whose logits are wanted.
        last = max(min(count, PREFILL_ROWS), num_logits)
        position = 0
        while position < count - last:
            step = min(PREFILL_ROWS, count - last - position)
            self._run(ids[position : position + step], cache, 1)
            position += step
        return self._run(ids[position:], cache, num_logits)

    def forward_in_place(self, ids: NDArray[np.int64], cache: OrtKVCache, num_logits: int) -> NDArray[np.float32]:
        """As `forward`, in one piece, with ids that other graphs have written: they are not looked at.

        Args:
            ids: `[count]`, ids of the vocabulary.
            cache: made by this model's `new_cache`, with room for them.
            num_logits: between 1 and `count`.
        """
        return self._run(ids, cache, num_logits, in_place=True)

    def _run(
        self, ids: NDArray[np.int64], cache: OrtKVCache, num_logits: int, *, in_place: bool = False
    ) -> NDArray[np.float32]:
        """One run of the graph over at most a piece of the input."""
        logits = cache.prepare(ids, num_logits, in_place=in_place)
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
            listed = sorted((spec.name, list(spec.shape), _TYPES.get(spec.dtype)) for spec in specs)
            if listed != sorted((value.name, value.shape, value.type) for value in found):
                raise BundleError(
                    f"{root}: the {kind}s of {self.entry.path} are not those of the manifest; export the bundle again."
                )


def open_session(
    graph: Path | bytes,
    *,
    provider: str = "cpu",
    threads: int | None = None,
    session_config: tuple[tuple[str, str], ...] = (),
) -> Any:
    """Open an `onnxruntime.InferenceSession` of a graph's file, or of its bytes, on the shared thread pool.

    Raises:
        InvalidInputError: an unknown provider, or a number of threads that differs from the existing pool's.
        InstallationError: ONNX Runtime is missing, installed twice, or lacks the provider.
        BundleError: ONNX Runtime cannot load the graph.
    """
    if not isinstance(provider, str) or provider not in PROVIDERS:
        raise InvalidInputError(f"Unknown provider {shown(provider)}: expected one of {', '.join(PROVIDERS)}.")
    row = PROVIDERS[provider]
    ort = import_onnxruntime()
    if row.name not in ort.get_available_providers():
        raise InstallationError(
            f"ONNX Runtime {ort.__version__} has no {row.name}: it offers {', '.join(ort.get_available_providers())}."
        )
    _share_pool(ort, threads)
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    for key, value in (*row.session_config, *session_config):
        options.add_session_config_entry(key, value)
    try:
        # Without the fallback, which would try again and print a banner to stdout.
        session = ort.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph), options, providers=[row.name], enable_fallback=0
        )
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        name = "the graph" if isinstance(graph, bytes) else graph
        raise BundleError(f"ONNX Runtime cannot load {name}: {error}") from error
    if row.name not in session.get_providers():
        raise InstallationError(f"{row.name} did not start; ONNX Runtime fell back to {session.get_providers()}.")
    return session


def pool_threads() -> int:
    """Threads of the pool that the models of this process share; 0 is one per physical core."""
    return _pool_threads or 0


def import_onnxruntime() -> Any:
    """Import ONNX Runtime, which exactly one installed package must provide.

    Raises:
        InstallationError: none is installed, or several that overwrite each other's files.
    """
    owners = sorted(
        {
            name
            for name in importlib.metadata.packages_distributions().get("onnxruntime", ())
            if name.startswith("onnxruntime")
        }
    )
    if len(owners) > 1:
        raise InstallationError(
            f"{' and '.join(owners)} are both installed and overwrite each other. Uninstall all of them "
            f"(pip uninstall {' '.join(owners)}), then install one: pip install 'paceline[cpu]' or 'paceline[gpu]'."
        )
    try:
        import onnxruntime
    except ImportError as error:
        raise InstallationError(
            f"ONNX Runtime cannot be imported ({error}). Install one of its two packages: "
            "pip install 'paceline[cpu]' or 'paceline[gpu]'."
        ) from error
    return onnxruntime


def _share_pool(ort: Any, threads: int | None) -> None:
    """Create the process-wide thread pool once.

    Two sessions with pools of their own fight for the cores, since idle threads spin: the pair runs 1.6 times slower.
    """
    global _pool_threads
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024):
        raise InvalidInputError(f"threads must be an integer from 1 to 1024, got {shown(threads)}.")
    with _pool_lock:
        if _pool_threads is None:
            try:
                ort.set_global_thread_pool_sizes(threads or 0, 1)  # 0: one thread per physical core
            except Exception as error:  # onnxruntime's exceptions share no base class of their own
                if threads is not None:
                    raise InvalidInputError(
                        f"threads={threads} comes too late: something else in this process has already made ONNX "
                        "Runtime's global thread pool; leave threads out to share it."
                    ) from error
            _pool_threads = threads or 0
        elif threads is not None and threads != _pool_threads:
            shared = f"{_pool_threads} threads" if _pool_threads else "one thread per core"
            raise InvalidInputError(
                f"threads={threads} comes too late: the models of this process already share {shared}."
            )
