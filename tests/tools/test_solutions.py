"""Programs that a model wrote: which pass, and that they are shut in."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_tools.benchmark.solutions import PASSED, Problem, run_program

from .conftest import environment

PROBLEM = Problem(
    prompt='from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """Their sum."""\n',
    entry_point="total",
    test="def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
)
RIGHT = "def total(numbers: List[int]) -> int:\n    return sum(numbers)"
SHUT_IN = run_program("pass").shut_in
FILES = pytest.mark.skipif(not SHUT_IN.get("files"), reason="this kernel has no Landlock")
NETWORK = pytest.mark.skipif(not SHUT_IN.get("network"), reason="this kernel gives no network namespace")


def test_this_machine_runs_programs() -> None:
    assert run_program("pass").outcome == PASSED
    assert SHUT_IN.keys() == {"network", "files"}


@pytest.mark.parametrize(
    ("answer", "raw", "outcome"),
    [
        (f"Here it is:\n\n```python\n{RIGHT}\n```\nIt adds.", False, "passed"),
        (f"```python\n{RIGHT}", False, "passed"),  # cut before the end of the block
        (f"```\nimport os\n```\nthen\n```py\n{RIGHT}\n```", False, "passed"),  # the block with the function
        (RIGHT, False, "passed"),
        ("```python\n    return sum(numbers)\n```", False, "passed"),  # the body alone
        ("    return sum(numbers)\n", True, "passed"),
        ("    return max(numbers)\n", True, "failed"),
        ("```python\ndef total(numbers):\n    return 3\n```", False, "failed"),
        ("I cannot do that.", False, "failed"),
        ("", False, "failed"),
        ("    return sum(numbers)\n\nraise SystemExit(0)", True, "failed"),
        ("    import os; os._exit(0)\n", True, "failed"),
    ],
)
def test_right_answers_pass_and_wrong_ones_fail(answer: str, raw: bool, outcome: str) -> None:
    assert run_program(PROBLEM.program(answer, raw=raw)).outcome.partition(":")[0] == outcome


def test_programs_are_ended_in_time() -> None:
    started = time.perf_counter()
    assert run_program("while True: pass", seconds=0.3).outcome == "timed out"
    stubborn = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    assert run_program(stubborn, seconds=0.3).outcome == "timed out"
    assert time.perf_counter() - started < 30


def test_memory_is_limited() -> None:
    assert run_program("x = bytearray(1 << 31)").outcome.startswith("failed: MemoryError")


@FILES
@pytest.mark.parametrize(
    "attempt",
    [
        "open({path!r}, 'w')",
        "open({path!r}, 'r+')",
        "import pathlib; pathlib.Path({path!r}).unlink()",
        # Behind Python's back, where nothing of `guard` is in the way.
        "import ctypes; assert ctypes.CDLL(None).unlink({path!r}.encode()) == 0",
        "import ctypes; assert ctypes.CDLL(None).mkdir({path!r}.encode() + b'.d', 0o700) == 0",
        "import ctypes; assert ctypes.CDLL(None).system(b'true') == 0",
    ],
)
def test_files_are_out_of_reach(tmp_path: Path, attempt: str) -> None:
    path = tmp_path / "kept.txt"
    path.write_text("kept", encoding="utf-8")
    assert run_program(attempt.format(path=str(path))).outcome.startswith("failed: ")
    assert path.read_text(encoding="utf-8") == "kept"
    assert [one.name for one in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize("module", ["os", "posix"])
@pytest.mark.parametrize("name", ["chmod", "utime", "link", "mkdir", "fork", "forkpty", "posix_spawn", "setsid"])
def test_functions_that_would_harm_are_taken_from_both_modules(module: str, name: str) -> None:
    assert run_program(f"import {module}\nassert {module}.{name} is None").outcome == PASSED


def test_posix_forks_for_no_program() -> None:
    attempt = "import posix, time\nif posix.fork() == 0:\n    posix.setsid()\n    time.sleep(40)"
    assert run_program(attempt).outcome.startswith("failed: TypeError")


# Behind Python's back, into a session of its own, from which a process without parent cannot be told by its group. It
# gives itself a name (PR_SET_NAME of prctl(2)), which the program waits for.
_LEAVE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
child = libc.fork()
if child == 0:
    libc.setsid()
    if libc.fork() == 0:
        libc.prctl(15, b"{name}", 0, 0, 0)
        time.sleep(600)
    os._exit(0)
os.waitpid(child, 0)
while not any(open(f"/proc/{{one}}/comm").read() == "{name}\\n" for one in os.listdir("/proc") if one.isdecimal()):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("end", "outcome"), [("", "passed"), ("raise ValueError", "failed"), ("while True: pass", "timed out")]
)
def test_processes_that_a_program_starts_do_not_outlast_it(end: str, outcome: str) -> None:
    name = f"left-{secrets.token_hex(4)}"
    found = run_program(_LEAVE.format(name=name) + end).outcome
    assert found.partition(":")[0] == outcome
    assert "Value" in found or outcome != "failed"
    assert name not in _process_names()


def test_processes_do_not_outlast_whoever_tests_programs_either() -> None:
    name = f"left-{secrets.token_hex(4)}"
    program = _LEAVE.format(name=name) + "time.sleep(600)"
    code = f"from paceline_tools.benchmark.solutions import run_program; run_program({program!r}, seconds=600)"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment())
    _wait_until(lambda: name in _process_names())
    process.kill()
    process.wait()
    _wait_until(lambda: name not in _process_names())


def _wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def _process_names() -> set[str]:
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            names.add(path.read_text().strip())
    return names


@FILES
def test_other_processes_are_out_of_reach() -> None:
    attempt = f"import ctypes; assert ctypes.CDLL(None).kill({os.getpid()}, 0) == 0"
    scoped = run_program("import ctypes; assert ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6").outcome == PASSED
    if not scoped:
        pytest.skip("this kernel's Landlock knows no signals")
    assert run_program(attempt).outcome.startswith("failed: AssertionError")


@NETWORK
def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert run_program(attempt).outcome.startswith("failed: ")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_program_cannot_say_itself_that_it_passed() -> None:
    forged = 'import os\nfor fd in range(3, 9):\n    try: os.write(fd, b\'{"token": "", "outcome": "passed"}\')\n'
    forged += "    except OSError: pass\nos._exit(0)"
    assert run_program(forged).outcome.startswith("failed: ")
