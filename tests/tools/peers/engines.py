"""The processes of all engines, of which one at a time works and the others are stopped: idle threads cannot spin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["EngineError", "EngineProcess"]

_ROOT = Path(__file__).parents[3]


class EngineError(Exception):
    """An engine could not do what it was asked for."""


class EngineProcess:
    """One engine in a Python of its own, behind `line_server.serve`.

    Attributes:
        name: as reports print it.
        methods: what it can run.
        versions: of its packages.
    """

    def __init__(self, name: str, adapter: str, arguments: Sequence[str], python: str = sys.executable) -> None:
        self.name = name
        self._opened: set[str] = set()
        try:
            self._process = subprocess.Popen(
                [python, "-m", f"tests.tools.peers.run_{adapter}", *arguments],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise EngineError(f"{name} does not start: {error}") from error
        ready = self._read()["ready"]
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
        """Memory that the process holds, mapped files included."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def _ask(self, document: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(document) + "\n")
            self._process.stdin.flush()
            return self._read()
        except BrokenPipeError as error:
            raise EngineError(f"{self.name} has ended; what it wrote stands above.") from error
        finally:
            self._stop()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.name} has ended; what it wrote stands above.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
