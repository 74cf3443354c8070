"""The processes of all engines, of which one at a time works and the others are stopped: idle threads cannot spin."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["EngineError", "EngineProcess", "adapter_command"]

# Runs a module of this folder in a Python that need not have paceline: what it lacks is told as an answer.
_START = """
import json, runpy, sys, types
folder, name = sys.argv[1:3]
package = types.ModuleType("peers")
package.__path__ = [folder]
sys.modules["peers"] = package
sys.argv[1:3] = []
try:
    runpy.run_module("peers." + name, run_name="__main__", alter_sys=True)
except ModuleNotFoundError as error:
    print(json.dumps({"error": "the package " + repr(error.name) + " is missing"}), flush=True)
"""


class EngineError(Exception):
    """An engine could not do what it was asked for."""


def adapter_command(python: str, adapter: str, arguments: Sequence[str]) -> list[str]:
    """What starts `run_ADAPTER.py` of this folder in a Python, which needs the peer's package and no paceline."""
    return [python, "-c", _START, str(Path(__file__).parent), f"run_{adapter}", *arguments]


class EngineProcess:
    """One engine in a Python of its own, behind `line_server.serve`.

    Attributes:
        name: as reports print it.
        methods: what it can run.
        versions: of its packages.
    """

    def __init__(self, name: str, command: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Start it.

        Args:
            name: as reports print it.
            command: of a process that runs `line_server.serve`.
            timeout_s: an answer that takes longer ends the process; None waits.
        """
        self.name = name
        self._timeout_s = timeout_s
        self._opened: set[str] = set()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for whoever asks
            )
        except OSError as error:
            raise EngineError(f"{name} does not start: {error}") from error
        try:
            ready = self._read()["ready"]
        except EngineError:
            self.close()
            raise
        self.methods: list[str] = ready["methods"]
        self.versions: dict[str, str] = ready["versions"]
        self._stop()

    def open(self, method: str) -> None:
        """Load what the method needs; a second time costs nothing."""
        if method not in self._opened:
            self._ask({"open": method})
            self._opened.add(method)

    def run(self, method: str, **request: Any) -> dict[str, Any]:
        """Write one text; see `line_server.Request` and `line_server.Figures`."""
        return self._ask({"run": method, **request})

    def resident_bytes(self) -> int:
        """Memory that the process holds, mapped files included; 0 where it has ended."""
        if self._process.poll() is not None:
            return 0
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of a request that was not read
                    stream.close()

    def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        if self._process.stdin.closed:  # it was ended when it gave no answer
            raise EngineError(f"{self.name} has ended ({_reason(self._process)}).")
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError as error:
            raise EngineError(f"{self.name} has ended ({_reason(self._process)}).") from error
        finally:
            self._stop()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            self.close()
            raise EngineError(f"{self.name} gave no answer within {self._timeout_s:g} s, and was ended.")
        line = self._process.stdout.readline()  # an answer is one line, written at once
        if not line:
            raise EngineError(f"{self.name} has ended ({_reason(self._process)}); what it wrote stands above.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)


def _reason(process: subprocess.Popen[str]) -> str:
    """How an ended process ended."""
    code = process.wait()
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
