"""What a build says, how far it is, and what Python raises meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paceline.engines import Interruption, shared_log

__all__ = ["Messages", "listeners"]


class Messages:
    """What TensorRT says, by how grave it is."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget what was said."""
        self.errors: list[str] = []
        self.warnings: list[str] = []
        self.infos: list[str] = []
        self.details: list[str] = []

    def add(self, severity: Any, message: str, severities: Any) -> None:
        """Keep a message if a build asks for such; `severities` are TensorRT's."""
        if severity <= severities.ERROR:
            self.errors.append(message.strip())
        elif severity == severities.WARNING:
            self.warnings.append(message)
        elif severity == severities.INFO:
            self.infos.append(message)
        elif message.startswith(("Layers:", "Name: ")):  # of many thousands
            self.details.append(message)


@functools.cache
def listeners(trt: Any) -> tuple[Messages, Any, Interruption]:
    """What a build talks to: one in a process, as the logger is."""
    interruption = Interruption()
    messages = Messages()
    shared_log(trt).listeners.append(
        interruption.keep(lambda severity, message: messages.add(severity, message, trt.ILogger))
    )

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Turns phases within phases into one share, and cancels the build after an interruption."""

        def __init__(self) -> None:
            super().__init__()
            self.start(lambda share: None)

        def start(self, report: Callable[[float], None]) -> None:
            self.report = report
            self.phases: dict[str, tuple[str | None, int, int]] = {}  # parent, steps behind, steps

        @interruption.keep
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = (parent_phase, 0, max(num_steps, 1))

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.advance(phase_name, step)
            return interruption.error is None

        @interruption.keep
        def advance(self, phase_name: str, step: int) -> None:
            parent, _, steps = self.phases[phase_name]
            self.phases[phase_name] = (parent, step + 1, steps)
            share, name = 0.0, phase_name
            while name in self.phases:
                parent, done, steps = self.phases[name]
                share = min(1.0, (done + share) / steps)
                if parent is None:
                    self.report(share)
                    break
                name = parent

        @interruption.keep
        def phase_finish(self, phase_name: str) -> None:
            parent, _, _ = self.phases.pop(phase_name, ("", 0, 1))
            if parent is None:
                self.report(1.0)

    return messages, Monitor(), interruption
