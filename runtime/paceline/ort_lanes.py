"""Several texts in one pass of ONNX Runtime: rows of all go through the weights together, and attend in lanes.

What a graph with lanes reads and writes, beside a flavour's usual graph; N is the number of lanes:

```
input_ids                       int64 [1, rows]      of all texts, one behind the other
lane_rows                       int64 [N]            rows of each lane; 1 for an idle one, whose result is left out
rows_in                         int64 [their sum]    which of `rows` each row of the lanes is
rows_out                        int64 [rows]         and where each of `rows` stands among those of the lanes
logits_indices                  int64 [num_logits]   rows whose logits are wanted
lanes.{j}.seqlens_k             int32 [1]            the lane's valid length after this step, less one
lanes.{j}.total_sequence_length int32 []             that length
lanes.{j}.past_key_values.{i}.key / .value           [1, kv_heads, positions of the lane, head_size]
→ logits                        float32 [1, num_logits, vocab_size]
→ lanes.{j}.present.{i}.key / .value                 the same buffers, updated in place
```
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, ModelEntry, TensorSpec
from .device_array import bind_input, bind_output
from .errors import BundleError, InvalidInputError, shown
from .model import Feed, checked_ids
from .ort import OrtKVCache, OrtModel, check_specs
from .ort_session import open_session
from .pass_cost import PassCost

__all__ = ["LaneCache", "LanesModel", "lane_specs"]

# What an idle lane reads.
_ANY_ROW: NDArray[np.int64] = np.zeros(1, np.int64)


def lane_specs(entry: ModelEntry, count: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the graph with `count` lanes for a model whose usual graph is as `entry` says."""
    shared = {
        "input_ids": TensorSpec("input_ids", "int64", (1, "rows")),
        "logits_indices": TensorSpec("logits_indices", "int64", ("num_logits",)),
        "logits": TensorSpec("logits", "float32", (1, "num_logits", entry.vocab_size)),
    }
    inputs = [
        shared["input_ids"],
        TensorSpec("lane_rows", "int64", (count,)),
        TensorSpec("rows_in", "int64", ("rows_of_lanes",)),
        TensorSpec("rows_out", "int64", ("rows",)),
        shared["logits_indices"],
    ]
    outputs = [shared["logits"]]
    for lane in range(count):
        shape = (1, entry.num_kv_heads, f"positions_{lane}", entry.head_size)
        inputs.append(TensorSpec(f"lanes.{lane}.seqlens_k", "int32", (1,)))
        inputs.append(TensorSpec(f"lanes.{lane}.total_sequence_length", "int32", ()))
        for specs, all_specs in ((inputs, entry.inputs), (outputs, entry.outputs)):
            specs += [
                TensorSpec(f"lanes.{lane}.{spec.name}", entry.kv_dtype, shape)
                for spec in all_specs
                if spec.name.startswith(("past_key_values.", "present."))
            ]
    return tuple(inputs), tuple(outputs)


class LaneCache(OrtKVCache):
    """Buffers of one sequence, which are bound to the usual graph, and to the lane that a pass over several gives them.

    Attributes:
        values: the buffers as ONNX Runtime takes them; they keep the memory alive.
        lane: where they are bound; None is nowhere.
    """

    def __init__(self, model: OrtModel, max_length: int) -> None:
        import onnxruntime

        super().__init__(model, max_length)
        self.values: list[Any] = [onnxruntime.OrtValue.ortvalue_from_numpy(buffer) for buffer in self.buffers]
        self.lane: int | None = None


class LanesModel(OrtModel):
    """A model that has a graph with lanes beside its usual one; see `paceline.model.BatchedLM`.

    A pass over one text runs the usual graph, since idle lanes cost time. Each graph's session keeps weights as its
    kernels want them, so these are in memory twice.

    A cache stays in its lane while it is in each pass, so that texts that go on together are bound once.
    """

    def __init__(
        self, session: Any, lanes: Any, entry: ModelEntry, count: int, logit_ids: NDArray[np.int64] | None = None
    ) -> None:
        """Run two graphs of the model that `entry` describes: the usual one, and one that has `count` lanes."""
        import onnxruntime

        super().__init__(session, entry, logit_ids)
        self._lanes = lanes
        self._count = count
        self._lock = threading.Lock()  # the lanes take one pass at a time
        self._cost = PassCost()
        self._binding = lanes.io_binding()
        self._holders: list[weakref.ref[LaneCache] | None] = [None] * count  # who is bound to each lane
        nothing = np.zeros((1, entry.num_kv_heads, 1, entry.head_size), entry.kv_dtype)
        self._idle = [onnxruntime.OrtValue.ortvalue_from_numpy(nothing)] * len(self.past_names)
        self._rows = np.zeros(count, np.int64)
        self._seqlens = [np.zeros(1, np.int32) for _ in range(count)]
        self._totals = [np.zeros((), np.int32) for _ in range(count)]
        bind_input(self._binding, "lane_rows", self._rows)
        for lane in range(count):
            bind_input(self._binding, f"lanes.{lane}.seqlens_k", self._seqlens[lane])
            bind_input(self._binding, f"lanes.{lane}.total_sequence_length", self._totals[lane])
            self._bind(lane, self._idle)

    @classmethod
    def open(
        cls, bundle: Bundle, which: str, *, provider: str = "cpu", threads: int | None = None, max_batch: int = 2
    ) -> LanesModel:
        """Load both graphs of one model of a bundle; see `OrtModel.open`.

        Args:
            bundle: an opened bundle.
            which: `"target"` or `"draft"`.
            provider: only "cpu".
            threads: as in `OrtModel.open`.
            max_batch: texts in one pass, at most as many as the graph has lanes.

        Raises:
            InvalidInputError: another provider; the bundle has no such graph, or one with fewer lanes; or as
                `OrtModel.open`.
            InstallationError: ONNX Runtime is missing, or installed twice.
            BundleError: the graph cannot be loaded, or is not what the manifest says.
        """
        if provider != "cpu":
            raise InvalidInputError(f"Graphs with lanes run with the provider 'cpu', got {shown(provider)}.")
        entry: ModelEntry | None = getattr(bundle.manifest, which)
        has = entry.lanes if entry is not None else None
        if entry is not None and (has is None or has.count < max_batch):
            have = "one text" if has is None else f"at most {has.count} texts"
            raise InvalidInputError(
                f"max_batch={max_batch}: the {which}'s graph in {bundle.root} takes {have} in a pass; add one with "
                f"`paceline batch {bundle.root} --max-batch {max_batch}`, or ask for fewer."
            )
        single = OrtModel.open(bundle, which, threads=threads)
        assert has is not None  # a model that is not there has been refused
        lanes = open_session(bundle.path(has.path), threads=threads, same_shapes=False)
        for kind, specs, found in zip(
            ("input", "output"),
            lane_specs(single.entry, has.count),
            (lanes.get_inputs(), lanes.get_outputs()),
            strict=True,
        ):
            check_specs(bundle.root, has.path, kind, specs, found)
        return cls(single.session, lanes, single.entry, has.count, single.logit_ids)

    @property
    def max_batch(self) -> int:
        """Most texts in one pass."""
        return self._count

    def _new_cache(self, max_length: int) -> LaneCache:
        return LaneCache(self, max_length)

    def forward_all(self, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
        """Feed several caches in one pass; see `BatchedLM.forward_all`."""
        if not 1 <= len(feeds) <= self._count:
            raise InvalidInputError(f"A pass takes 1 to {self._count} texts, got {len(feeds)}.")
        caches = [cast(LaneCache, self._own(feed.cache)) for feed in feeds]
        if len(set(map(id, caches))) < len(caches):
            raise InvalidInputError("A KV cache can be fed only once in a pass.")
        ids = [checked_ids(feed.tokens, feed.cache, feed.num_logits, self.entry.num_input_ids) for feed in feeds]
        if len(feeds) == 1:
            return [self.forward(feeds[0].tokens, feeds[0].cache, feeds[0].num_logits)]
        return self._pass(ids, caches, [feed.num_logits for feed in feeds])

    def _pass(
        self, ids: Sequence[NDArray[np.int64]], caches: Sequence[LaneCache], num_logits: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        with self._lock:
            lanes = self._seat(caches)
            in_lane: list[NDArray[np.int64]] = [_ANY_ROW] * self._count  # rows of the input
            wanted: list[NDArray[np.int64]] = []
            first = 0
            for lane, x, cache, count in zip(lanes, ids, caches, num_logits, strict=True):
                last = first + len(x)
                in_lane[lane] = np.arange(first, last)
                self._seqlens[lane].fill(cache.length + len(x) - 1)
                self._totals[lane].fill(cache.length + len(x))
                wanted.append(np.arange(last - count, last))
                first = last
            for lane, rows in enumerate(in_lane):
                self._rows[lane] = len(rows)
                if rows is _ANY_ROW:
                    self._seqlens[lane].fill(0)
                    self._totals[lane].fill(1)
            starts = np.cumsum(self._rows) - self._rows
            given = {
                "input_ids": np.concatenate(ids)[np.newaxis],
                "rows_in": np.concatenate(in_lane),
                "rows_out": np.concatenate(
                    [starts[lane] + np.arange(len(x)) for lane, x in zip(lanes, ids, strict=True)]
                ),
                "logits_indices": np.concatenate(wanted),
            }
            # Made anew for each pass: the texts of the one before may not have read theirs.
            logits = np.empty((1, sum(num_logits), self.entry.vocab_size), np.float32)
            for name, array in given.items():
                bind_input(self._binding, name, array)
            bind_output(self._binding, "logits", logits)
            started = time.perf_counter()
            try:
                self._lanes.run_with_iobinding(self._binding)
            except Exception as error:  # onnxruntime's exceptions share no base class of their own
                fed = ", ".join(
                    f"{cache.length} to {cache.length + len(x)}" for cache, x in zip(caches, ids, strict=True)
                )
                raise BundleError(
                    f"ONNX Runtime cannot run {self._path} on positions {fed} of {len(caches)} texts: {error}"
                ) from error
            seconds = self._cost.share(time.perf_counter() - started, [len(x) for x in ids])
            for cache, x, own in zip(caches, ids, seconds, strict=True):
                cache.seconds += own
                cache.advance(len(x))
            return np.split(logits[0], np.cumsum(num_logits)[:-1])

    @property
    def _path(self) -> str:
        return self.entry.lanes.path if self.entry.lanes is not None else self.entry.path

    def _seat(self, caches: Sequence[LaneCache]) -> list[int]:
        """Give each cache a lane, and return them; lanes of all others become idle, for an idle lane is written to."""
        for lane, holder in enumerate(self._holders):
            if holder is not None and holder() not in caches:
                self._leave(lane)
        free = [lane for lane, holder in enumerate(self._holders) if holder is None]
        for cache in caches:
            if cache.lane is None:
                cache.lane = free.pop(0)
                self._holders[cache.lane] = weakref.ref(cache, partial(self._gone, cache.lane))
                self._bind(cache.lane, cache.values)
        return [cast(int, cache.lane) for cache in caches]

    def _gone(self, lane: int, holder: weakref.ref[LaneCache]) -> None:
        """A cache is gone: free its buffers at once, unless a pass runs, whose successor does it."""
        if self._lock.acquire(blocking=False):
            try:
                if self._holders[lane] is holder:
                    self._leave(lane)
            finally:
                self._lock.release()

    def _leave(self, lane: int) -> None:
        holder = self._holders[lane]
        if holder is not None and (cache := holder()) is not None:
            cache.lane = None
        self._holders[lane] = None
        self._bind(lane, self._idle)

    def _bind(self, lane: int, values: Sequence[Any]) -> None:
        for past, present, value in zip(self.past_names, self.present_names, values, strict=True):
            self._binding.bind_ortvalue_input(f"lanes.{lane}.{past}", value)
            self._binding.bind_ortvalue_output(f"lanes.{lane}.{present}", value)
