"""Print what ONNX Runtime's sessions cost around their kernels: `python tests/runtime/measure_sessions.py PART BUNDLE`.

`threads`: a plain step, a draft step, and a round of three draft steps and a pass of four rows, with pools, spinning
and affinities of several kinds. Each kind runs in processes of its own, in turns, with nothing else running.
`load`: what optimising the graph and packing the weights take of loading the draft, and whether saving either pays.
`calls`: how much of a draft step lies outside the kernels, which is all that one graph for several steps could save.
The latter two run on one thread and take processor time, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.bundle import Bundle
from paceline.huge_pages import huge_pages
from paceline.ort import OrtModel
from paceline.ort_session import import_onnxruntime

PAST, DRAFTED = 256, 3
# Settings of sessions with pools of their own; `shared…` is one pool of all, which spins.
POOLS: dict[str, dict[str, str]] = {
    "shared": {},
    "shared, pinned": {},
    "shared, 1 thread": {},
    "own, stop spinning": {"session.force_spinning_stop": "1"},
    "own, stop, affinity": {"session.force_spinning_stop": "1", "session.intra_op_thread_affinities": "2"},
    "own, stop, spin 100 us": {"session.force_spinning_stop": "1", "session.intra_op.spin_duration_us": "100"},
    "own, stop, spin 2 ms": {"session.force_spinning_stop": "1", "session.intra_op.spin_duration_us": "2000"},
    "own, no spinning": {"session.intra_op.allow_spinning": "0"},
    "own, the draft 1 thread": {"session.force_spinning_stop": "1"},
}
SAVED: dict[str, dict[str, str]] = {
    "optimised, saved": {},
    "packed, saved": {"session.save_external_prepacked_constant_initializers": "1"},
    "ORT format, saved": {"session.save_model_format": "ORT"},
}
LOADS = ("as it is", "not optimised", "not packed", *SAVED)


def open_model(bundle: Bundle, which: str, pool: str) -> OrtModel:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level, options.use_per_session_threads = 3, not pool.startswith("shared")
    if options.use_per_session_threads:
        options.intra_op_num_threads = 1 if pool.endswith("draft 1 thread") and which == "draft" else 2
    for key, value in POOLS[pool].items():
        if not (key.endswith("affinities") and options.intra_op_num_threads == 1):
            options.add_session_config_entry(key, value)
    entry = getattr(bundle.manifest, which)
    return OrtModel(ort.InferenceSession(str(bundle.path(entry.path)), options), entry)


def run_pool(bundle: Bundle, pool: str, rounds: int) -> None:
    """Print the medians of one kind of pool, in milliseconds, as JSON."""
    if pool.startswith("shared"):
        import_onnxruntime().set_global_thread_pool_sizes(1 if pool.endswith("1 thread") else 2, 1)
    with huge_pages(bundle.manifest.weight_bytes):
        target, draft = (open_model(bundle, which, pool) for which in ("target", "draft"))
    if pool.endswith("pinned"):
        first, *others = sorted(int(thread) for thread in os.listdir("/proc/self/task"))
        os.sched_setaffinity(first, {0})
        for other in others:
            os.sched_setaffinity(other, {1})
    text, drafted = target.new_cache(2 * PAST), draft.new_cache(2 * PAST)
    text.advance(PAST)
    drafted.advance(PAST)
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds + 2):
        started = time.perf_counter()
        target.forward([5], text, 1)
        text.rollback(PAST)
        plain = time.perf_counter()
        for _ in range(DRAFTED):
            draft.forward([7], drafted, 1).argmax()
        steps = time.perf_counter()
        target.forward([5] * (DRAFTED + 1), text, DRAFTED + 1).argmax(-1)
        ended = time.perf_counter()
        text.rollback(PAST)
        drafted.rollback(PAST)
        times.append((plain - started, (steps - plain) / DRAFTED, ended - plain))
    print(json.dumps([statistics.median(column) * 1e3 for column in zip(*times[2:], strict=True)]))


def measure_threads(folder: Path, repeats: int, rounds: int) -> None:
    found: dict[str, list[list[float]]] = {pool: [] for pool in POOLS}
    for _ in range(repeats):
        for pool, times in found.items():
            times.append(json.loads(_fresh("threads", folder, "--pool", pool, "--rounds", str(rounds))))
    for pool, times in found.items():
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        pairs = zip(zip(*times, strict=True), zip(*found["shared"], strict=True), strict=True)
        ratios = [statistics.median(a / b for a, b in zip(mine, base, strict=True)) for mine, base in pairs]
        texts = (f"{time:6.1f} ms ({ratio:.3f})" for time, ratio in zip(medians, ratios, strict=True))
        print(f"{pool:26} plain, draft step, round: {'  '.join(texts)}", flush=True)


def run_load(bundle: Bundle, way: str, saved: Path) -> None:
    """Load the draft in one way; print seconds of the processor, and of a step, and megabytes, as JSON."""
    ort = import_onnxruntime()
    ort.set_global_thread_pool_sizes(1, 1)
    entry: Any = bundle.manifest.draft
    options = ort.SessionOptions()
    options.log_severity_level, options.use_per_session_threads = 3, False
    if way in ("not optimised", "optimised, saved", "packed, saved"):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if way == "not packed":
        options.add_session_config_entry("session.disable_prepacking", "1")
    path = _saved(saved, way) if way in SAVED else bundle.path(entry.path)
    started = time.process_time()
    with huge_pages(0 if way == "packed, saved" else bundle.manifest.weight_bytes):
        model = OrtModel(ort.InferenceSession(str(path), options), entry)
    loaded = time.process_time()
    cache = model.new_cache(2 * PAST)
    steps: list[float] = []
    cache.advance(PAST)
    for _ in range(3 if way == "not packed" else 9):
        before = time.process_time()
        model.forward([5], cache, 1)
        steps.append(time.process_time() - before)
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(json.dumps([loaded - started, statistics.median(steps), resident / 1e6]))


def _saved(folder: Path, way: str) -> Path:
    return folder / way / ("model.ort" if way.startswith("ORT") else "model.onnx")


def measure_load(folder: Path, repeats: int) -> None:
    bundle, ort = Bundle.open(folder), import_onnxruntime()
    entry: Any = bundle.manifest.draft
    with tempfile.TemporaryDirectory() as saved:
        for way, config in SAVED.items():
            path = _saved(Path(saved), way)
            path.parent.mkdir()
            options = ort.SessionOptions()
            options.log_severity_level, options.optimized_model_filepath = 3, str(path)
            if path.suffix == ".onnx":
                prefix = "session.optimized_model_external_initializers_"
                options.add_session_config_entry(f"{prefix}file_name", "model.onnx.data")
                options.add_session_config_entry(f"{prefix}min_size_in_bytes", "1024")
            for key, value in config.items():
                options.add_session_config_entry(key, value)
            ort.InferenceSession(str(bundle.path(entry.path)), options)
            print(f"{way}: {sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6:.0f} MB on disk")
        found: dict[str, list[list[float]]] = {way: [] for way in LOADS}
        for _ in range(repeats):
            for way, times in found.items():
                times.append(json.loads(_fresh("load", folder, "--way", way, "--saved", saved)))
    for way, times in found.items():
        load, step, resident = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{way:20} load {load:.2f} s  step {step * 1e3:.1f} ms  resident {resident:.0f} MB", flush=True)


def measure_calls(folder: Path, rounds: int) -> None:
    bundle, ort = Bundle.open(folder), import_onnxruntime()
    ort.set_global_thread_pool_sizes(1, 1)
    options = ort.SessionOptions()
    options.log_severity_level, options.use_per_session_threads, options.enable_profiling = 3, False, True
    with tempfile.TemporaryDirectory() as scratch, huge_pages(bundle.manifest.weight_bytes):
        options.profile_file_prefix = str(Path(scratch, "profile"))
        entry: Any = bundle.manifest.draft
        model = OrtModel(ort.InferenceSession(str(bundle.path(entry.path)), options), entry)
        cache = model.new_cache(2 * PAST)
        cache.advance(PAST)
        around: list[float] = []
        choice: list[float] = []
        for _ in range(rounds):
            before, inside = time.perf_counter(), cache.seconds
            logits = model.forward([5], cache, 1)
            done = time.perf_counter()
            logits[0].argmax()
            choice.append(time.perf_counter() - done)
            around.append(done - before - (cache.seconds - inside))
        events = json.loads(Path(model.session.end_profiling()).read_text(encoding="utf-8"))
    runs = [event for event in events if event["name"] == "model_run"][2:]
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    outside = []
    for run in runs:
        spent = sum(one["dur"] for one in kernels if run["ts"] <= one["ts"] < run["ts"] + run["dur"])
        outside.append(1 - spent / run["dur"])
    step = statistics.median(run["dur"] for run in runs) / 1e3
    print(f"a draft step on one thread, profiled: {step:.1f} ms, of which outside of kernels {_percent(outside)}")
    print(
        f"Python around the run: {statistics.median(around) * 1e3:.3f} ms, argmax {statistics.median(choice) * 1e3:.3f}"
    )


def _percent(shares: list[float]) -> str:
    return f"{100 * statistics.median(shares):.1f} %"


def _fresh(part: str, folder: Path, *options: str) -> str:
    command = [sys.executable, __file__, part, str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("threads", "load", "calls"))
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pool", choices=list(POOLS), help=argparse.SUPPRESS)  # of a process of its own
    parser.add_argument("--way", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pool is not None:
        run_pool(Bundle.open(options.bundle), options.pool, options.rounds)
    elif options.way is not None:
        run_load(Bundle.open(options.bundle), options.way, options.saved)
    elif options.part == "threads":
        measure_threads(options.bundle, options.repeats, options.rounds)
    elif options.part == "load":
        measure_load(options.bundle, options.repeats)
    else:
        measure_calls(options.bundle, options.rounds)


if __name__ == "__main__":
    main()
