"""How many cores this process may use, where that is less than the machine has.

ONNX Runtime starts one thread per physical core of the machine, also where `taskset`, a container's set of cores
(`--cpuset-cpus`) or its quota of processor time (`--cpus`) leaves a process fewer. Its threads spin while they wait for
each other, so each one too many takes time from those that compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cores"]

_ROOT = Path("/")


def usable_cores() -> int | None:
    """Physical cores that this process may use, at least 1; None where nothing keeps it from any of the machine's."""
    allowed, every = os.sched_getaffinity(0), set(range(os.cpu_count() or 1))
    cores = {_core(cpu) for cpu in allowed}
    quota = min(_quotas(), default=float("inf"))
    if allowed >= every and quota >= len(cores):
        return None
    return max(1, int(min(len(cores), quota)))


def _core(cpu: int) -> str:
    """What names the physical core of a logical processor: the list of all that share it."""
    return _read(_ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _quotas() -> Iterator[float]:
    """Processor time over time that the control groups of this process allow, of each that has a limit."""
    for line in _read(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _ROOT / "sys/fs/cgroup" / ("" if not controllers else "cpu")
        # In a container the path may be the host's, which is not mounted there; its own limit is at the top.
        for folder in {top, *(top / part for part in _parents(path))}:
            if controllers:
                limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            else:
                limit, _, period = _read(folder / "cpu.max").partition(" ")
            if limit.isdigit() and period.isdigit() and int(period) > 0:
                yield int(limit) / int(period)


def _parents(path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part not in {"", "..", "."}]
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
