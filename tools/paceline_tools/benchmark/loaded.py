"""A bundle that is loaded for a benchmark, what is written down about a run of it, and how a run can end early."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

import paceline
from paceline import Bundle, SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME, ModelEntry
from paceline.ort_session import pool_threads
from paceline_tools.measure import machine

from .meters import read_bandwidth

__all__ = ["Loaded", "gather", "hold_signals", "say_broken"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A bundle's models, ready to write.

    Attributes:
        bundle: opened.
        decoder: over its models.
        load_s: seconds that loading took.
        threads: that run the models.
        on_host: whether they lie in the host's memory.
    """

    bundle: Bundle
    decoder: SpeculativeDecoder
    load_s: float
    threads: int
    on_host: bool

    @classmethod
    def load(
        cls, folder: Path, provider: str, threads: int | None, profile: str, engines: Path | None = None
    ) -> Loaded:
        """Load a bundle; the arguments are the options of `paceline bench`.

        Raises:
            PacelineError: it cannot be loaded so.
        """
        bundle = Bundle.open(folder)
        started = time.perf_counter()
        decoder = paceline.load(
            folder,
            provider=provider,
            threads=threads,
            profile=None if profile == "none" else profile,
            engines=engines,
        )
        seconds = time.perf_counter() - started
        number = pool_threads() or len(os.sched_getaffinity(0))
        return cls(bundle, decoder, seconds, number, provider in ("cpu", "openvino"))

    @property
    def context(self) -> int:
        """Positions that both models have."""
        return min(model.max_length for model in (self.decoder.target, self.decoder.draft) if model is not None)

    def about(self) -> dict[str, Any]:
        """What tells the bundle from others."""
        manifest = self.bundle.manifest
        return {
            "manifest_sha256": hashlib.sha256((self.bundle.root / MANIFEST_NAME).read_bytes()).hexdigest(),
            "target": _model(manifest.target),
            "draft": manifest.draft and _model(manifest.draft),
        }

    def run(
        self,
        begun: datetime.datetime,
        seconds: float,
        broken: BaseException | None,
        settings: Mapping[str, Any],
        peers: Mapping[str, Any],
    ) -> dict[str, Any]:
        """A document's `run`; see models/benchmark.md. `broken` is what ended the run early."""
        manifest = self.bundle.manifest
        fault = None
        if broken is not None:
            signals = {KeyboardInterrupt: "Ctrl-C", SystemExit: "SIGTERM"}  # as what their handlers raise
            fault = signals.get(type(broken)) or str(broken) or type(broken).__name__
        run = {
            "paceline": paceline.__version__,
            "command": ["paceline", *sys.argv[1:]],
            "started": begun.isoformat(timespec="seconds"),
            "seconds": seconds,
            "complete": broken is None,
            "ended_by": fault,
            "machine": machine(),
            "bundle": self.about(),
            "settings": settings,
            "peers": peers,
            "load_s": self.load_s,
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "target_bytes": sum(entry.size for name, entry in manifest.files.items() if name.startswith("target/")),
            "read_bytes_per_s": read_bandwidth(self.threads) if self.on_host else None,
        }
        found: dict[str, Any] = json.loads(json.dumps(run))  # as a run that was saved has it
        return found


def gather(source: Iterable[_T], found: list[_T]) -> BaseException | None:
    """Put what comes into `found`; what ended it early, if anything did: Ctrl-C, SIGTERM or a fault.

    What was measured until then shall not be lost: whoever calls saves it, and raises what is returned.
    """
    try:
        for one in source:
            found.append(one)  # noqa: PERF402 - what came before a fault shall stay
    except BaseException as error:
        return error
    return None


def hold_signals() -> None:
    """Let Ctrl-C and SIGTERM wait until the command at hand has ended: first what was measured is saved and shown."""
    click.get_current_context().with_resource(_signals_held())


@contextmanager
def _signals_held() -> Iterator[None]:
    seen: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: seen.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if seen:
        signal.raise_signal(seen[0])


def say_broken(broken: BaseException, anything: bool) -> None:
    """Say on stderr that a run ended early; raise `broken` where there is nothing to save."""
    if not anything:
        click.echo("\nBroken off before a text was complete; nothing is saved.", err=True)
        raise broken
    click.echo("\nBroken off; what was measured is kept.", err=True)


def _model(entry: ModelEntry) -> dict[str, str]:
    return {"source": entry.source.name, "precision": entry.precision}
