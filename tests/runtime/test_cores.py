"""Threads where a process may use fewer cores than the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import cores

COUNT = """
import os, sys, numpy
before = len(os.listdir("/proc/self/task"))
import paceline
paceline.load(sys.argv[1])
print(len(os.listdir("/proc/self/task")) - before + 1)
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight logical processors on four cores, in a folder."""
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(cores, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    may_use(monkeypatch, range(8))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def may_use(monkeypatch: pytest.MonkeyPatch, cpus: range | set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))


@pytest.mark.parametrize(
    ("cpus", "expected"), [(range(8), None), ({0, 4}, 1), ({0, 1}, 2), ({0, 1, 5}, 2), (range(7), 4), ({3}, 1)]
)
def test_cores_are_counted_and_not_their_threads(
    machine: Path, monkeypatch: pytest.MonkeyPatch, cpus: range | set[int], expected: int | None
) -> None:
    may_use(monkeypatch, cpus)
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"": "200000 100000"}, 2),
        ({"": "max 100000"}, None),
        ({"": "50000 100000"}, 1),
        ({"": "250000 100000"}, 2),
        ({"": "1600000 100000"}, None),
        ({"a": "300000 100000", "a/b": "max 100000"}, 3),
        ({"a": "300000 100000", "a/b": "100000 100000"}, 1),
        ({"": "nonsense"}, None),
    ],
)
def test_quotas_of_a_group_and_of_those_above_it_count(
    machine: Path, limits: dict[str, str], expected: int | None
) -> None:
    write(machine / "proc/self/cgroup", "0::/a/b")
    for name, limit in limits.items():
        write(machine / "sys/fs/cgroup" / name / "cpu.max", limit)
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("200000", 2)])
def test_quotas_of_the_first_version_count(machine: Path, quota: str, expected: int | None) -> None:
    write(machine / "proc/self/cgroup", "4:memory:/x\n2:cpu,cpuacct:/../y\n1:name=systemd:/")
    write(machine / "sys/fs/cgroup/cpu/y/cpu.cfs_quota_us", quota)
    write(machine / "sys/fs/cgroup/cpu/y/cpu.cfs_period_us", "100000")
    assert cores.usable_cores() == expected


def test_a_quota_and_fewer_cores_count_together(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(monkeypatch, {0, 1, 2})
    write(machine / "proc/self/cgroup", "0::/")
    write(machine / "sys/fs/cgroup/cpu.max", "800000 100000")
    assert cores.usable_cores() == 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process has one core already")
def test_models_run_on_as_many_threads_as_there_are_cores_to_use(tiny_bundle: Path) -> None:
    allowed = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(allowed), sys.executable, "-c", COUNT, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"  # no thread beside the caller's
