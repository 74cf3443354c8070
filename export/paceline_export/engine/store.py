"""Engines on disk: written beside their final name, then named and listed in one step.

In a bundle the manifest lists them. In a folder of their own, `engines.json` does, in the same words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bundle import MANIFEST_NAME, Bundle, EngineEntry, FileEntry, Manifest, file_sha256, write_whole
from paceline.engines import INDEX_NAME, EngineIndex, read_index
from paceline.errors import InvalidInputError, PacelineError

__all__ = ["EngineStore"]


class EngineStore:
    """Where engines go: the bundle that their graphs lie in, or a folder of their own.

    Use it as a context. Engines that were written become visible together in `commit`; without it nothing stays.
    """

    def __init__(self, bundle: Bundle, out: Path | None) -> None:
        self._bundle = bundle
        self._root = bundle.root if out is None else out
        self._own = out is not None
        self._folder = self._root if self._own else self._root / "engines"
        self._written: list[tuple[tuple[EngineEntry, ...], Path, FileEntry]] = []

    def __enter__(self) -> EngineStore:
        if self._own and (self._root / MANIFEST_NAME).exists():
            raise InvalidInputError(f"{self._root} is a bundle; leave -o out to put engines into the one they are of.")
        with self._refusals_told(self._root):
            self._folder.mkdir(parents=True, exist_ok=True)
        for folder in (self._root, self._folder):
            with self._refusals_told(folder):
                self._try(folder)  # before a build of many minutes
        for left in self._folder.glob(".*.partial-*"):  # of builds that were killed
            pid = left.name.rpartition("-")[2]
            if not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
                left.unlink(missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for _, path, _ in self._written:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: it holds engines
            self._folder.rmdir()

    def _try(self, folder: Path) -> None:
        """Make and remove a file."""
        trial = folder / f".trial.partial-{os.getpid()}"
        try:
            trial.touch()
            trial.unlink()
        except OSError:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
            raise

    def write(self, entries: Sequence[EngineEntry], content: Any) -> int:
        """Write an engine under a name that nobody looks for; returns its size in bytes.

        Args:
            entries: what it was built for, one for each GPU that it serves; its path is chosen here.
            content: the engine, a buffer.
        """
        entry, sms = entries[0], "-".join(each.sm.replace(".", "") for each in entries)
        partial = self._folder / f".{entry.model}-{sms}.partial-{os.getpid()}"
        with self._refusals_told(self._root):
            try:
                with partial.open("wb") as file:
                    file.write(memoryview(content))
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        listed = FileEntry(partial.stat().st_size, file_sha256(partial))
        # A new name for other content: until the list is exchanged, the engines of the old one must stay.
        name = f"{entry.model}-{entry.backend}-sm{sms}-{listed.sha256[:12]}.engine"
        path = name if self._own else f"engines/{name}"
        named = tuple(dataclasses.replace(each, path=path) for each in entries)
        self._written.append((named, partial, listed))
        return listed.size

    def commit(self) -> tuple[EngineEntry, ...]:
        """Name and list the engines, in the place of those for the same models, backend and GPUs."""
        with self._refusals_told(self._root):
            new = tuple(entry for entries, _, _ in self._written for entry in entries)
            manifest, old, files = self._listed()
            keys = {(entry.model, entry.backend, entry.sm) for entry in new}
            replaced = [entry for entry in old if (entry.model, entry.backend, entry.sm) in keys]
            engines = tuple(entry for entry in old if entry not in replaced) + new
            gone = {entry.path for entry in replaced} - {entry.path for entry in engines}  # one may serve other GPUs
            files = {name: entry for name, entry in files.items() if name not in gone}
            files |= {entries[0].path: listed for entries, _, listed in self._written}
            try:
                for entries, partial, _ in self._written:
                    partial.replace(self._root / entries[0].path)
                if manifest is None:
                    index = EngineIndex(engines, files)
                    write_whole(self._root / INDEX_NAME, json.dumps(dataclasses.asdict(index), indent=1) + "\n")
                else:
                    changed = dataclasses.replace(manifest, engines=engines, files=files)
                    write_whole(self._root / MANIFEST_NAME, changed.to_json())
            except BaseException:
                kept = self._listed()[2]  # Ctrl-C may have come after the exchange
                for entry in new:
                    if entry.path not in kept:
                        (self._root / entry.path).unlink(missing_ok=True)
                raise
            self._written = []
        for name in gone:
            (self._root / name).unlink(missing_ok=True)
        return new

    def _listed(self) -> tuple[Manifest | None, Sequence[EngineEntry], Mapping[str, FileEntry]]:
        """The bundle's manifest, if engines go there, and engines and files as they are listed by now."""
        if not self._own:
            manifest = Bundle.open(self._root).manifest
            return manifest, manifest.engines, manifest.files
        if not (self._root / INDEX_NAME).exists():
            return None, (), {}
        index = read_index(self._root)
        return None, index.engines, index.files

    @contextlib.contextmanager
    def _refusals_told(self, folder: Path) -> Iterator[None]:
        """Turn what the system refuses into what to do about it."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(folder).free
                raise PacelineError(
                    f"The disk is full: {free / 1e9:.1f} GB are left at {folder}. No engine was kept; free some "
                    "space and build again."
                ) from error
            elsewhere = (
                "name another folder with -o"
                if self._own
                else "pass -o FOLDER for engines elsewhere, which --engines FOLDER loads"
            )
            raise PacelineError(
                f"{folder} cannot be written ({error.strerror or error}); {elsewhere}, or mend its permissions. No "
                "engine was kept."
            ) from error
