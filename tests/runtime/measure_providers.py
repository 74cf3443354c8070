"""Print what runs of a bundle's models take by execution provider: `python -m tests.runtime.measure_providers BUNDLE`.

Each provider runs in a process of its own, since the first model of a process settles its threads. The processes take
turns, a run of every kind each; medians in milliseconds. The KV caches hold `--length` positions of arbitrary numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from paceline import Bundle, PacelineError
from paceline.huge_pages import huge_pages
from paceline.ort import OrtKVCache, OrtModel
from paceline.providers import PROVIDERS

from .openvino_plugin import installed_folder, patched_folder

ROWS = (1, 3, 5)
CHOICES = [name for name, row in PROVIDERS.items() if row.engine is None]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("bundle", type=Path)
    made.add_argument("--providers", nargs="+", choices=CHOICES, default=["cpu", "openvino"])
    made.add_argument("--length", type=int, default=256, help="positions in the cache (default: %(default)s)")
    made.add_argument("--repeats", type=int, default=21, help="runs of each kind (default: %(default)s)")
    made.add_argument("--threads", type=int, help="of each process (default: one per core)")
    made.add_argument(
        "--patched-openvino",
        action="store_true",
        help="on an AMD processor: use a patched copy of OpenVINO's plugin, which no user has (see openvino_plugin.py)",
    )
    made.add_argument("--worker", choices=CHOICES, help=argparse.SUPPRESS)
    return made


def work(options: argparse.Namespace) -> None:
    """Run every kind once for each line of stdin, and print the milliseconds as a line of JSON."""
    bundle, rng = Bundle.open(options.bundle), np.random.default_rng(0)
    models: dict[str, tuple[OrtModel, OrtKVCache]] = {}
    weights = bundle.manifest.weight_bytes
    with huge_pages(weights) if options.worker == "cpu" else contextlib.nullcontext():
        for which in ("target", "draft"):
            if getattr(bundle.manifest, which) is not None:
                model = OrtModel.open(bundle, which, provider=options.worker, threads=options.threads)
                cache = model.new_cache(options.length + max(ROWS))
                cache.pretend(options.length, rng)
                models[which] = model, cache
    print("ready", flush=True)
    kinds = [("target", rows) for rows in ROWS] + [("draft", 1)] * ("draft" in models)
    for _ in sys.stdin:
        times = {}
        for which, rows in kinds:
            model, cache = models[which]
            tokens = rng.integers(0, model.vocab_size, rows).tolist()
            started = time.perf_counter()
            model.forward(tokens, cache, rows)
            times[f"{which}, {rows} row{'s' * (rows > 1)}"] = 1000 * (time.perf_counter() - started)
            cache.rollback(options.length)
        print(json.dumps(times), flush=True)


def measure(options: argparse.Namespace, scratch: Path) -> None:
    folders = [folder for folder in sys.path if folder]
    if options.patched_openvino:
        installed = installed_folder()
        if installed is None:
            raise SystemExit("OpenVINO's plugin is not installed: pip install 'paceline[openvino]'.")
        folders.insert(0, str(patched_folder(installed, scratch)))
    workers = {}
    for provider in options.providers:
        command = [sys.executable, "-m", "tests.runtime.measure_providers", *sys.argv[1:], "--worker", provider]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert worker.stdin is not None
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise SystemExit(f"{provider} did not come up; see above.")
        workers[provider] = worker.stdin, worker.stdout
    times: dict[str, dict[str, list[float]]] = {provider: defaultdict(list) for provider in workers}
    for repeat in range(options.repeats + 2):
        for provider, (ask, answer) in workers.items():
            ask.write("\n")
            ask.flush()
            found = json.loads(answer.readline())
            if repeat >= 2:  # the first runs allocate, and compile for their shapes
                for kind, milliseconds in found.items():
                    times[provider][kind].append(milliseconds)
    if options.patched_openvino:
        print("openvino: a patched copy of the plugin, not what users get")
    print(f"{'median ms (quartiles)':24}" + "".join(f"{provider:>26}" for provider in workers))
    for kind in times[options.providers[0]]:
        cells = []
        for provider in workers:
            low, median, high = statistics.quantiles(times[provider][kind], n=4, method="inclusive")
            cells.append(f"{median:8.1f} ({low:.1f}-{high:.1f})")
        print(f"{kind:24}" + "".join(f"{cell:>26}" for cell in cells))
    for ask, _ in workers.values():
        ask.close()


if __name__ == "__main__":
    try:
        parsed = parser().parse_args()
        with tempfile.TemporaryDirectory() as folder:
            work(parsed) if parsed.worker else measure(parsed, Path(folder))
    except PacelineError as error:
        raise SystemExit(f"Error: {error}") from error
