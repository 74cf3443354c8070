"""`paceline export`: which sources it resolves, what it hands on, and what it prints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import paceline_export.export
import paceline_export.source
from paceline.errors import IncompatiblePairError
from paceline_export.export import ExportReport, ModelReport

from .conftest import Invoke


@dataclass
class Seen:
    """What the command asked the library for."""

    sources: list[str] = field(default_factory=list)
    cache_dirs: list[Path | None] = field(default_factory=list)
    exports: list[tuple[Any, Any, Path]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Replaces the library's work."""
    seen = Seen()

    def resolve(text: str, *, cache_dir: Path | None, progress: bool) -> str:
        seen.sources.append(text)
        seen.cache_dirs.append(cache_dir)
        return f"source {text}"

    def export_bundle(target: Any, draft: Any, out: Path, **options: Any) -> ExportReport:
        seen.exports.append((target, draft, out))
        seen.options = options
        for stage, done in (("target: trace", 0.1), ("target: trace", 0.2), ("done", 1.0)):
            options["on_progress"](stage, done)
        models = (ModelReport("target", "big", "int4", 1_120_000_000, 1_540_000_000),)
        return ExportReport(out, 125.3, 3_400_000_000, 1_130_000_000, models)

    monkeypatch.setattr(paceline_export.source, "resolve", resolve)
    monkeypatch.setattr(paceline_export.export, "export_bundle", export_bundle)
    return seen


def test_all_options_arrive(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = invoke(
        *("export", "--target", "big", "--draft", "small", "-o", out, "--precision", "int8", "--draft-precision"),
        *("fp16", "--max-length", 4096, "--block-size", 32, "--overwrite", "--cache-dir", tmp_path),
    )
    assert result.exit_code == 0, result.output
    assert seen.exports == [("source big", "source small", out)]
    assert seen.cache_dirs == [tmp_path, tmp_path]
    del seen.options["on_progress"]
    assert seen.options == {
        "precision": "int8",
        "draft_precision": "fp16",
        "max_length": 4096,
        "block_size": 32,
        "overwrite": True,
    }
    assert "1,540 M" in result.stdout
    assert f"Wrote 1.13 GB to {out} in 2 min 05 s; peak memory 3.4 GB." in result.stdout
    assert result.stderr.splitlines() == [" 10%  target: trace", "100%  done"]


def test_the_defaults(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    assert invoke("export", "--target", "big", "-o", tmp_path / "b").exit_code == 0
    assert seen.sources == ["big"]
    assert seen.exports[0][1] is None
    del seen.options["on_progress"]
    assert seen.options == {
        "precision": "int4",
        "draft_precision": None,
        "max_length": None,
        "block_size": 128,
        "overwrite": False,
    }


def test_the_recipe_of_a_pair_brings_both(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    assert invoke("export", "--target", "qwen2.5-coder", "-o", tmp_path / "b").exit_code == 0
    assert seen.sources == ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]


def test_json_is_one_document(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    result = invoke("export", "--target", "big", "-o", tmp_path / "b", "--json")
    assert json.loads(result.stdout) == {
        "path": str(tmp_path / "b"),
        "seconds": 125.3,
        "peak_memory": 3_400_000_000,
        "bytes_written": 1_130_000_000,
        "models": [
            {
                "which": "target",
                "name": "big",
                "precision": "int4",
                "bytes": 1_120_000_000,
                "parameters": 1_540_000_000,
            }
        ],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "new"], "Missing option '--target'"),
        (["--target", "big"], "Missing option '-o' / '--out'"),
        (["--target", "big", "-o", "new", "--precision", "int3"], "'int3' is not one of"),
        (["--target", "big", "-o", "new", "--draft-precision", "int4"], "is for a draft model"),
        (["--target", "big", "-o", str(Path(__file__).parent)], "exists already"),
    ],
)
def test_wrong_usage_exits_before_anything_is_fetched(
    invoke: Invoke, seen: Seen, args: list[str], message: str
) -> None:
    result = invoke("export", *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert seen.sources == []


def test_the_librarys_refusals_reach_the_user(
    invoke: Invoke, seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise IncompatiblePairError("The vocabularies differ first at id 7.")

    monkeypatch.setattr(paceline_export.export, "export_bundle", refuse)
    result = invoke("export", "--target", "big", "--draft", "small", "-o", tmp_path / "b")
    assert result.exit_code == 1
    assert result.stderr == "Error: The vocabularies differ first at id 7.\n"
    assert result.stdout == ""


def test_an_unknown_source_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("export", "--target", "qwen2.5-codr", "-o", tmp_path / "b")
    assert result.exit_code == 1
    assert "Did you mean 'qwen2.5-coder" in result.stderr
    assert list(tmp_path.iterdir()) == []
