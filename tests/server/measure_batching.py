"""Measures whether one pass over several texts pays: milliseconds by texts and rows, beside as many passes of one text.

    PYTHONPATH=runtime:export:tools python tests/server/measure_batching.py BUNDLE [--which draft] [--length 128]

The graphs of the flavour ort take several texts with one row each, those of the flavour trt any number of rows. Runs
are interleaved; medians are printed. Caches are updated in place. Weights, not what they say, decide the time: the ids
are any.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from paceline.bundle import Bundle
from paceline.device_array import bind_input, bind_output
from paceline.ort import OrtModel

ROOM = 64  # positions behind the valid ones


class Pass:
    """A pass over `texts` texts of different lengths, with `rows` new tokens each."""

    def __init__(self, model: OrtModel, texts: int, rows: int, length: int) -> None:
        entry = model.entry
        inputs = {spec.name: spec for spec in entry.inputs}
        fixed = inputs[model.past_names[0]].shape[2]
        positions = fixed if isinstance(fixed, int) else length + ROOM
        lengths = np.array([length - 7 * number for number in range(texts)])
        indices = np.tile(np.arange(rows), (texts, 1))
        given: dict[str, Any] = {
            "input_ids": np.ones((texts, rows), np.int64),
            "seqlens_k": (lengths + rows - 1).astype(np.int32),
            "total_sequence_length": np.array(length + rows, np.int32),
            "write_indices": lengths.astype(np.int64),
            "logits_indices": indices if len(inputs["logits_indices"].shape) == 2 else np.arange(rows),
        }
        self._session = model.session
        self._binding = model.session.io_binding()
        self._kept: list[Any] = []
        for name in inputs:
            if name in given:
                self._kept.append(given[name])
                bind_input(self._binding, name, given[name])
        shape = (texts, entry.num_kv_heads, positions, entry.head_size)
        for past, present in zip(model.past_names, model.present_names, strict=True):
            self._kept.append(np.zeros(shape, entry.kv_dtype))
            bind_input(self._binding, past, self._kept[-1])
            bind_output(self._binding, present, self._kept[-1])
        self._kept.append(np.empty((texts, rows, entry.vocab_size), np.float32))
        bind_output(self._binding, "logits", self._kept[-1])

    def run(self) -> float:
        """Milliseconds."""
        started = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return 1000 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--which", choices=["target", "draft"], default="target")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    model = OrtModel.open(Bundle.open(options.bundle), options.which)
    all_rows = (1,) if model.entry.flavor == "ort" else (1, 3)
    passes = {(texts, rows): Pass(model, texts, rows, options.length) for rows in all_rows for texts in (1, 2, 4, 8)}
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in passes}
    for repeat in range(options.repeats + 2):
        for shape, one in passes.items():
            elapsed = one.run()
            if repeat >= 2:  # behind the warm-up
                times[shape].append(elapsed)
    print(f"{model.entry.flavor} {model.entry.precision}, {options.length} positions, medians of {options.repeats}")
    print("texts  rows      ms  times as fast as one by one")
    for (texts, rows), found in times.items():
        alone = statistics.median(times[1, rows])
        print(f"{texts:5}  {rows:4}  {statistics.median(found):6.1f}  {texts * alone / statistics.median(found):.2f}")


if __name__ == "__main__":
    main()
