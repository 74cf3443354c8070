"""Run a model's TensorRT engine: in-place KV caches on the GPU, passes on one stream, rounds as CUDA graphs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, ModelEntry
from .cuda_array import CudaArray
from .device_array import AnyArray, fill_first
from .errors import InvalidInputError
from .kv_cache import KVCache, SavedKV
from .logit_ids import read_logit_ids
from .model import checked_ids
from .providers import Provider, find_provider
from .trt_engine import Engine
from .trt_memory import SequenceMemory, bfloat16_bits

__all__ = ["TrtKVCache", "TrtModel"]


class TrtKVCache(KVCache):
    """Keys and values of one sequence in device memory, which the engine updates in place; a rollback is a length.

    Attributes:
        seconds: wall time of the model's runs. Of those whose logits stay on the device it is the time to start them.
    """

    def __init__(self, model: TrtModel, max_length: int, memory: SequenceMemory) -> None:
        super().__init__(max_length)
        self.model = model
        self.memory = memory

    def save(self) -> SavedKV:
        """Copy what the cache holds to the host, where there is more room; see `KVCache.save`."""
        buffers = [buffer.numpy()[:, :, : self.length].copy() for buffer in self.memory.buffers]
        return SavedKV(buffers, sum(buffer.nbytes for buffer in buffers))

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with a copy of the first `length` positions; see `KVCache.restore`."""
        if self.length:
            raise InvalidInputError(f"Only an empty KV cache can be restored, this one holds {self.length} positions.")
        for mine, other in zip(self.memory.buffers, saved.state, strict=True):
            fill_first(mine, other[:, :, :length])
        self.advance(length)

    def pretend(self, length: int, rng: np.random.Generator) -> None:
        """Become as if `length` positions had been fed, with arbitrary keys and values: to measure times alone."""
        for buffer in self.memory.buffers:
            _, heads, _, head_size = buffer.shape
            values = rng.standard_normal((1, heads, length, head_size), np.float32)
            fill_first(buffer, bfloat16_bits(values) if buffer.dtype == np.uint16 else values)
        self.rollback(0)
        self.advance(length)


class TrtModel:
    """A causal language model run by a TensorRT engine; see `paceline.model.ResidentLM`."""

    def __init__(
        self, engine: Engine, entry: ModelEntry, logit_ids: NDArray[np.int64] | None, provider: Provider
    ) -> None:
        self.engine = engine
        self.entry = entry
        self.provider = provider
        self._logit_ids = logit_ids
        self._device = provider.device or "cpu"
        self._free: list[SequenceMemory] = []  # of sequences that have ended, for those that begin

    @classmethod
    def open(cls, bundle: Bundle, which: str, *, provider: str, folder: Path | None = None) -> TrtModel:
        """Load the engine of one of a bundle's models.

        Args:
            bundle: an opened bundle, whose engines `paceline build` has made.
            which: `"target"` or `"draft"`.
            provider: a key of `PROVIDERS` that runs engines.
            folder: of the engines, where they do not lie in the bundle.

        Raises:
            InvalidInputError: the bundle has no such model, or the GPU has no room for it.
            InstallationError: there is no GPU, or TensorRT is not installed.
            BundleError: the bundle has no engine for this GPU and version, with both sides of what does not fit, or it
                is damaged.
        """
        entry: ModelEntry | None = getattr(bundle.manifest, which)
        if entry is None:
            raise InvalidInputError(f"{bundle.root} has no {which} model.")
        row = find_provider(provider)
        return cls(Engine.open(bundle, which, row, folder), entry, read_logit_ids(bundle, entry), row)

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
        """Number of positions that the engine's caches have."""
        return self.engine.entry.max_length

    @property
    def prefill_rows(self) -> int:
        """Rows of a long prompt in one pass."""
        return self.engine.max_rows

    @property
    def max_draft_tokens(self) -> int:
        """Largest number of drafted tokens that a pass verifies."""
        return self.engine.entry.max_draft_tokens

    def new_cache(self, max_length: int) -> TrtKVCache:
        """Make an empty cache, in memory that an ended sequence has left, if there is some.

        Raises:
            InvalidInputError: longer than the engine's caches, or the GPU has no room for it.
        """
        if max_length > self.max_length:
            raise InvalidInputError(
                f"A cache of {max_length} positions exceeds the {self.max_length} that the engine was built for; build "
                "it with a larger --max-length."
            )
        memory = self._free.pop() if self._free else SequenceMemory(self.engine, self.entry, self._device)
        cache = TrtKVCache(self, max_length, memory)
        weakref.finalize(cache, self._free.append, memory).atexit = False
        return cache

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens` behind what `cache` holds; see `paceline.model.CausalLM.forward`."""
        ids = checked_ids(tokens, cache, num_logits, self.entry.num_input_ids)
        start = time.perf_counter()
        logits: NDArray[np.float32] = self._run(ids, cache, num_logits).numpy()
        cache.seconds += time.perf_counter() - start
        return logits

    def forward_resident(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward`, with logits that stay on the device."""
        return self.forward_in_place(
            checked_ids(tokens, cache, num_logits, self.entry.num_input_ids), cache, num_logits
        )

    def forward_in_place(self, ids: AnyArray, cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward_resident`, with ids `[count]` that other graphs have written: they are not looked at."""
        start = time.perf_counter()
        logits = self._run(ids, cache, num_logits)
        cache.seconds += time.perf_counter() - start
        return logits

    def _run(self, ids: AnyArray, cache: KVCache, num_logits: int) -> CudaArray:
        """As many passes as the engine's profiles ask for; the logits `[num_logits, vocab_size]` of the last rows."""
        if not isinstance(cache, TrtKVCache) or cache.model is not self:
            raise InvalidInputError("The KV cache was made by another model; use this model's new_cache().")
        memory, count = cache.memory, len(ids)
        if count > cache.room:  # a pass that writes behind the caches would write into other memory
            raise InvalidInputError(f"Cannot feed {count} tokens: the KV cache has room for {cache.room}.")
        passes = self.engine.passes(count, num_logits)
        scattered = sum(wanted > 0 for _, wanted in passes) > 1
        gathered = memory.gathered(self._device, num_logits) if scattered else None
        position = done = 0
        for rows, wanted in passes:
            logits = memory.run(ids[position : position + rows], cache.length, max(wanted, 1))
            cache.advance(rows)
            position += rows
            if gathered is not None and wanted:
                gathered[done : done + wanted].copy_from(logits)
                done += wanted
        return logits if gathered is None else gathered
