"""Graphs for several texts in one pass, added to a bundle: its weights, and everything else, stay as they are."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx_ir as ir

from paceline.bundle import MANIFEST_NAME, MOST_LANES, Bundle, FileEntry, LanesEntry, ModelEntry, write_whole
from paceline.errors import InvalidInputError, PacelineError

from .passes.lanes import split_into_lanes

__all__ = ["LanesReport", "add_lanes"]


@dataclass(frozen=True, slots=True)
class LanesReport:
    """What was added to a bundle: its folder, bytes of each model's graph by its name, lanes, and seconds."""

    path: Path
    max_batch: int
    graphs: dict[str, int]
    seconds: float


def add_lanes(bundle: Bundle, max_batch: int) -> LanesReport:
    """Give a bundle's models graphs that take up to `max_batch` texts in one pass, in the place of earlier ones.

    The bundle is usable all the time; what was loaded from it goes on.

    Raises:
        InvalidInputError: `max_batch` out of its range, or graphs that cannot take several texts.
        PacelineError: the bundle cannot be written to.
    """
    started = time.perf_counter()
    if not isinstance(max_batch, int) or isinstance(max_batch, bool) or not 2 <= max_batch <= MOST_LANES:
        raise InvalidInputError(f"max_batch must be an integer from 2 to {MOST_LANES}, got {max_batch!r:.80}.")
    manifest = bundle.manifest
    models = {"target": manifest.target, **({"draft": manifest.draft} if manifest.draft else {})}
    for which, entry in models.items():
        if entry.flavor != "ort":
            raise InvalidInputError(
                f"{bundle.root}: the {which}'s graph has the flavour {entry.flavor!r}, and only those of the flavour "
                "'ort' take several texts in this way; an engine does with `paceline build --max-batch`."
            )
    graphs: dict[str, bytes] = {}
    for which, entry in models.items():
        try:
            graphs[which] = _graph(bundle.root / entry.path, max_batch)
        except InvalidInputError as error:
            raise InvalidInputError(f"{bundle.root}, {which}: {error}") from error
    files = dict(manifest.files)
    changed: dict[str, ModelEntry] = {}
    old = {entry.lanes.path for entry in models.values() if entry.lanes is not None}
    try:
        for which, content in graphs.items():
            path = str(PurePosixPath(models[which].path).with_name(f"lanes-{max_batch}.onnx"))
            write_whole(bundle.root / path, content)
            files[path] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
            changed[which] = dataclasses.replace(models[which], lanes=LanesEntry(path, max_batch))
        gone = old - {entry.lanes.path for entry in changed.values() if entry.lanes is not None}
        new = dataclasses.replace(
            manifest,
            target=changed["target"],
            draft=changed.get("draft"),
            files={name: entry for name, entry in sorted(files.items()) if name not in gone},
        )
        write_whole(bundle.root / MANIFEST_NAME, new.to_json())
    except OSError as error:
        raise PacelineError(
            f"{bundle.root} cannot be written to ({error.strerror or error}); mend its permissions, free some space, "
            "or copy the bundle elsewhere."
        ) from error
    for name in gone:
        (bundle.root / name).unlink(missing_ok=True)
    return LanesReport(
        bundle.root,
        max_batch,
        {which: len(content) for which, content in graphs.items()},
        time.perf_counter() - started,
    )


def _graph(path: Path, count: int) -> bytes:
    """A model's graph with so many lanes; its weights stay in the file of the one at `path`."""
    model = ir.load(path)
    split_into_lanes(model, count)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content
