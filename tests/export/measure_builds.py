"""How long TensorRT-RTX's strict builds of SmolLM2-135M take, and how much memory: as target and as its own draft.

`PYTHONPATH=runtime:export:tools python tests/export/measure_builds.py WORK` exports it into WORK, unless it is there,
and builds its engines for four GPUs, first in fp16, then in int4, each in a process of its own. It exits with 1 where both
together take more than 3 minutes, or one more than 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

GPUS = "8.0,8.6,8.9,12.0"
PRECISIONS = ("fp16", "int4")
SECONDS, BYTES = 180.0, 4e9


def paceline(*arguments: object) -> str:
    """What `paceline` prints to stdout."""
    command = [sys.executable, "-m", "paceline_tools", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def processor_s() -> float:
    """Seconds of processor time that ended children took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    source = ("--target", "smollm2-135m", "--draft", "smollm2-135m")
    for precision in PRECISIONS:
        if not (work / precision / "paceline.json").exists():
            options = ("--precision", precision, "--draft-precision", precision, "--max-length", 2048)
            paceline(
                "export",
                *source,
                "--flavor",
                "trt",
                *options,
                "--calibration",
                "none",
                "--no-quality",
                "-o",
                work / precision,
            )
    whole, peak = 0.0, 0
    print(f"{'precision':9} {'engines':>7} {'seconds':>8} {'processor s':>11} {'peak GB':>8}")
    for precision in PRECISIONS:
        started, used = time.perf_counter(), processor_s()
        engines = work / f"engines-{precision}"
        report = json.loads(paceline("build", work / precision, "--sm", GPUS, "-o", engines, "--json"))
        seconds = time.perf_counter() - started
        whole, peak = whole + seconds, max(peak, report["peak_memory"])
        print(
            f"{precision:9} {len(report['engines']):7} {seconds:8.1f} {processor_s() - used:11.1f} "
            f"{report['peak_memory'] / 1e9:8.2f}",
            flush=True,
        )
    print(f"both: {whole:.1f} s of {SECONDS:.0f}, {peak / 1e9:.2f} GB of {BYTES / 1e9:.0f}")
    sys.exit(whole > SECONDS or peak > BYTES)


if __name__ == "__main__":
    main()
