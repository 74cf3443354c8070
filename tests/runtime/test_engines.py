"""Which engine of a bundle serves a GPU, and what is said where none does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.bundle import MANIFEST_NAME, Bundle, EngineEntry, EngineProfile, FileEntry, file_sha256
from paceline.engines import INDEX_NAME, find_engine, read_index
from paceline.errors import BundleError

HERE: dict[str, Any] = {"backend": "tensorrt-rtx", "backend_version": "1.7.1.116", "sm": "8.9"}


def engine(bundle: Bundle, path: str, **changes: Any) -> EngineEntry:
    graph = bundle.manifest.graph_sha256(bundle.manifest.target)
    profile = EngineProfile("verify", {"input_ids": ((1, 1), (1, 5), (1, 5))})
    entry = EngineEntry(
        *(path, "target", HERE["backend"], HERE["backend_version"], HERE["sm"], "fp16", graph, 64, 4, 1, (profile,))
    )
    return dataclasses.replace(entry, **changes)


def listed(path: Path) -> FileEntry:
    return FileEntry(path.stat().st_size, file_sha256(path))


def with_engines(bundle: Bundle, *engines: EngineEntry) -> Bundle:
    """The bundle with files for these engines, and their list in its manifest."""
    files = dict(bundle.manifest.files)
    for entry in engines:
        path = bundle.root / entry.path
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(entry.sm.encode())
        files[entry.path] = listed(path)
    manifest = dataclasses.replace(bundle.manifest, engines=engines, files=files)
    (bundle.root / MANIFEST_NAME).write_text(manifest.to_json())
    return Bundle.open(bundle.root)


def test_the_engine_of_this_gpu_is_taken(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    mine, other = engine(bundle, "engines/mine.engine"), engine(bundle, "engines/other.engine", sm="8.6")
    bundle = with_engines(bundle, other, mine)
    assert find_engine(bundle, "target", **HERE) == (damaged / "engines/mine.engine", mine)
    assert find_engine(bundle, "target", **{**HERE, "sm": "8.6"}, verify_hash=True)[1] == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tensorrt"}, "the target's engine was built for tensorrt, and what runs it is tensorrt-rtx"),
        ({"sm": "8.6"}, "the target's engine was built for compute capability 8.6, and this GPU has 8.9"),
        (
            {"backend_version": "1.6.0"},
            r"the target's engine was built by tensorrt-rtx 1\.6\.0, and what is installed is 1\.7\.1\.116",
        ),
        ({"graph_sha256": "0" * 64}, r"built from the graph with SHA-256 0{64}, and the bundle's has [0-9a-f]{64}\."),
    ],
)
def test_a_mismatch_names_both_sides(change: dict[str, Any], message: str, damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    bundle = with_engines(bundle, engine(bundle, "engines/a.engine", **change))
    with pytest.raises(BundleError, match=message) as caught:
        find_engine(bundle, "target", **HERE)
    assert f"Build it: `paceline build {damaged} --backend tensorrt-rtx --sm 8.9`." in str(caught.value)


def test_a_graph_that_was_changed_after_the_build_is_told(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    bundle = with_engines(bundle, engine(bundle, "engines/a.engine"))
    name = f"{bundle.manifest.target.path}.data"
    assert name in bundle.manifest.files
    (damaged / name).write_bytes(b"other weights")
    files = {**bundle.manifest.files, name: listed(damaged / name)}
    changed = Bundle(damaged, dataclasses.replace(bundle.manifest, files=files))
    with pytest.raises(BundleError, match="built from the graph with SHA-256"):
        find_engine(changed, "target", **HERE)


def _missing(path: Path) -> None:
    path.unlink()


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _altered(path: Path) -> None:
    path.write_bytes(b"9.8")


def _linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_missing, "the engine 'engines/a.engine' is missing. Build it"),
        (_truncated, "the engine 'engines/a.engine' has 2 bytes, expected 3. Build it"),
        (_altered, "the engine 'engines/a.engine' has SHA-256 .*, expected .*. Build it"),
        (_linked, "leads out of the folder"),
    ],
)
def test_a_damaged_engine_is_told(damage: Callable[[Path], None], message: str, damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    bundle = with_engines(bundle, engine(bundle, "engines/a.engine"))
    damage(damaged / "engines/a.engine")
    with pytest.raises(BundleError, match=message):
        find_engine(bundle, "target", **HERE, verify_hash=True)


def test_no_engine_and_no_model(damaged: Path) -> None:
    bundle = Bundle.open(damaged)
    with pytest.raises(BundleError, match=r"has no engine of the target\. Build it"):
        find_engine(bundle, "target", **HERE)
    alone = Bundle(damaged, dataclasses.replace(bundle.manifest, draft=None))
    with pytest.raises(BundleError, match="has no draft model, and so no engine of one"):
        find_engine(alone, "draft", **HERE)


def test_engines_in_a_folder_of_their_own(damaged: Path, tmp_path: Path) -> None:
    bundle, folder = Bundle.open(damaged), tmp_path / "engines"
    with pytest.raises(BundleError, match=r"has no engines\.json: `paceline build DIR -o "):
        find_engine(bundle, "target", **HERE, folder=folder)
    folder.mkdir()
    (folder / "a.engine").write_bytes(b"8.9")
    entry = engine(bundle, "a.engine")
    index = {
        "engines": [dataclasses.asdict(entry)],
        "files": {"a.engine": dataclasses.asdict(listed(folder / "a.engine"))},
    }
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert find_engine(bundle, "target", **HERE, folder=folder, verify_hash=True) == (folder / "a.engine", entry)
    for text, message in (
        ("{", "is not valid JSON"),
        (json.dumps({**index, "files": {}}), "names the engine 'a.engine' but does not list it"),
        (json.dumps({**index, "files": {"../a": {"size": 1, "sha256": "0"}}}), "Unsafe file name"),
        (json.dumps({"engines": []}), "lacks files"),
    ):
        (folder / INDEX_NAME).write_text(text)
        with pytest.raises(BundleError, match=message):
            read_index(folder)
