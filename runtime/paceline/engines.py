"""Engines of a bundle: how they are listed, the one that serves a GPU, and what building and running them share.

A bundle's manifest lists its engines. In a folder of their own `engines.json` does, in the same words.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec

from .bundle import Bundle, EngineEntry, FileEntry, build_dataclass, check_safe_path, file_sha256
from .errors import BundleError

__all__ = [
    "INDEX_NAME",
    "EngineIndex",
    "Interruption",
    "build_command",
    "engine_fault",
    "find_engine",
    "read_index",
    "shared_log",
]

INDEX_NAME = "engines.json"

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class EngineIndex:
    """What `engines.json` says: engines, and the size and hash of their files, by paths relative to it."""

    engines: tuple[EngineEntry, ...]
    files: Mapping[str, FileEntry]

    def __post_init__(self) -> None:
        for name in self.files:
            check_safe_path(name)
        for engine in self.engines:
            if engine.path not in self.files:
                raise BundleError(
                    f"{INDEX_NAME} names the engine {engine.path!r} but does not list it among its files."
                )


def read_index(folder: Path) -> EngineIndex:
    """Read the list of a folder of engines.

    Raises:
        BundleError: there is none, it is not JSON, or a field is missing, unknown or of the wrong type.
    """
    try:
        data = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(f"{folder} has no {INDEX_NAME}: `paceline build DIR -o {folder}` makes one.") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / INDEX_NAME} is not valid JSON ({error}); build the engines again.") from error
    return build_dataclass(EngineIndex, data, INDEX_NAME)


def find_engine(
    bundle: Bundle,
    which: str,
    *,
    backend: str,
    backend_version: str,
    sm: str,
    folder: Path | None = None,
    verify_hash: bool = False,
) -> tuple[Path, EngineEntry]:
    """The engine of one of a bundle's models for the GPU and the version of TensorRT at hand, and its file.

    Args:
        bundle: whose graphs the engine must be of.
        which: `target` or `draft`.
        backend: what runs it, such as `tensorrt-rtx`.
        backend_version: of what runs it; no other version's engine will do.
        sm: compute capability of the GPU, such as `8.9`.
        folder: of engines that are not in the bundle.
        verify_hash: compare the file's SHA-256, too, and not its size alone.

    Raises:
        BundleError: there is none, with what the engines were built for beside what is at hand; or its file is missing,
            truncated or altered.
    """
    model = getattr(bundle.manifest, which)
    if model is None:
        raise BundleError(f"{bundle.root} has no {which} model, and so no engine of one.")
    root = bundle.root if folder is None else folder
    index = EngineIndex(bundle.manifest.engines, bundle.manifest.files) if folder is None else read_index(folder)
    mend = f"Build it: {build_command(bundle, backend, sm, folder)}."
    left = [engine for engine in index.engines if engine.model == which]
    if not left:
        raise BundleError(f"{root} has no engine of the {which}. {mend}")
    model_sha256 = bundle.manifest.graph_sha256(model)
    for built, here, field, wanted in (
        ("for", "what runs it is", "backend", backend),
        ("for compute capability", "this GPU has", "sm", sm),
        (f"by {backend}", "what is installed is", "backend_version", backend_version),
        ("from the graph with SHA-256", "the bundle's has", "graph_sha256", model_sha256),
    ):
        found = sorted({getattr(engine, field) for engine in left})
        left = [engine for engine in left if getattr(engine, field) == wanted]
        if not left:
            raise BundleError(
                f"{root}: the {which}'s engine was built {built} {', '.join(found)}, and {here} {wanted}. {mend}"
            )
    (engine,) = left[-1:]
    path, listed = root / engine.path, index.files[engine.path]
    if fault := engine_fault(root, engine.path, listed, verify_hash=verify_hash):
        raise BundleError(f"{root}: {fault} {mend}")
    return path, engine


def build_command(bundle: Bundle, backend: str, sm: str, folder: Path | None = None) -> str:
    """What builds the engines of a bundle for a GPU, into the bundle or a folder of their own, in backticks."""
    where = "" if folder is None else f" -o {folder}"
    return f"`paceline build {bundle.root} --backend {backend} --sm {sm}{where}`"


def engine_fault(root: Path, name: str, listed: FileEntry, *, verify_hash: bool = False) -> str:
    """What is wrong with the file of an engine, as a sentence; empty if nothing is."""
    path = root / name
    if not path.is_file():
        return f"the engine {name!r} is missing."
    if not path.resolve().is_relative_to(root.resolve()):
        return f"{name!r} is a link that leads out of the folder; refusing to follow it."
    if (size := path.stat().st_size) != listed.size:
        return f"the engine {name!r} has {size} bytes, expected {listed.size}."
    if verify_hash and (digest := file_sha256(path)) != listed.sha256:
        return f"the engine {name!r} has SHA-256 {digest}, expected {listed.sha256}."
    return ""


@functools.cache
def shared_log(trt: Any) -> Any:
    """The logger of a process, whose `listeners`, functions of a severity and a message, hear what TensorRT says.

    While anything lives that was given another logger, TensorRT warns that it ignores a new one. In TensorRT-RTX 1.7 a
    build's messages reach the new one all the same; those of its global logger do not. So builds and runtimes share
    this one.
    """

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.listeners: list[Any] = []

        def log(self, severity: Any, message: str) -> None:
            for listener in self.listeners:
                listener(severity, message)

    return Log()


class Interruption:
    """What Python raises while TensorRT's code runs, kept until that code has returned.

    TensorRT loses what its callbacks raise, and what a signal's handler raises inside one of them: Ctrl-C among it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def keep(self, function: Callable[_P, object]) -> Callable[_P, None]:
        """The function, which raises no more."""

        @functools.wraps(function)
        def kept(*args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.error = self.error or error

        return kept

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it signals' handlers raise nothing; at its end what was kept is raised, before any other error."""
        self.error = None
        # A handler can run before a callback's first line, where no `try` of the callback would catch what it raises.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        mine = threading.current_thread() is threading.main_thread()
        changed = {number: handler for number, handler in handlers.items() if mine and callable(handler)}
        try:
            for number, handler in changed.items():
                signal.signal(number, self.keep(handler))
            yield
        finally:
            for number, handler in changed.items():
                signal.signal(number, handler)
            if self.error is not None:
                raise self.error
