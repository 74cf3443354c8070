"""`paceline export`: which sources it resolves, what it hands on, and what it prints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import paceline_export.export
import paceline_export.source
from paceline.bundle import QualityEntry, TextQuality
from paceline.errors import IncompatiblePairError, InvalidInputError
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
        quality = QualityEntry(TextQuality(512, 0.04321, 0.91, 9.1, 8.9), TextQuality(640, 0.02, 0.96, 2.75, 2.7))
        notes = ("something was left out",)
        models = (ModelReport("target", "big", "int4", 1_120_000_000, 1_540_000_000, "gptq", quality, notes, 510.0),)
        return ExportReport(out, 125.3, 3_400_000_000, 1_130_000_000, models)

    monkeypatch.setattr(paceline_export.source, "resolve", resolve)
    monkeypatch.setattr(paceline_export.export, "export_bundle", export_bundle)
    return seen


def test_all_options_arrive(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    result = invoke(
        *("export", "--target", "big", "--draft", "small", "-o", out, "--precision", "int8", "--draft-precision"),
        *(
            "fp16",
            "--draft-vocab",
            5000,
            "--draft-method",
            "text",
            "--max-length",
            4096,
            "--block-size",
            32,
            "--overwrite",
            "--cache-dir",
            tmp_path,
        ),
        *("--calibration", "none", "--draft-calibration", "none", "--no-quality", "--max-file-size", "2GB"),
        "--long-context",
        *("--adapter", tmp_path / "lora", "--draft-adapter", tmp_path / "other"),
    )
    assert result.exit_code == 0, result.output
    assert seen.exports == [("source big", "source small", out)]
    assert seen.cache_dirs == [tmp_path, tmp_path]
    del seen.options["on_progress"]
    assert seen.options == {
        "flavor": "ort",
        "precision": "int8",
        "draft_precision": "fp16",
        "draft_vocab": 5000,
        "draft_method": "text",
        "draft_layers": None,
        "max_length": 4096,
        "block_size": 32,
        "calibration": "none",
        "draft_calibration": "none",
        "quality": False,
        "adapter": tmp_path / "lora",
        "draft_adapter": tmp_path / "other",
        "max_file_size": 2_000_000_000,
        "long_context": True,
        "overwrite": True,
    }
    assert "1,540 M" in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "target: calibrated by gptq in 8 min 30 s." in lines
    assert "target: something was left out" in lines
    assert "prompts 512 0.0432 91.0 % 9.100 8.900" in lines
    assert f"Wrote 1.13 GB to {out} in 2 min 05 s; peak memory 3.4 GB." in result.stdout
    assert result.stderr.splitlines() == [" 10%  target: trace", "100%  done"]


def test_the_defaults(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    assert invoke("export", "--target", "big", "-o", tmp_path / "b").exit_code == 0
    assert seen.sources == ["big"]
    assert seen.exports[0][1] is None
    del seen.options["on_progress"]
    assert seen.options == {
        "flavor": "ort",
        "precision": "int4",
        "draft_precision": None,
        "draft_vocab": None,
        "draft_method": None,
        "draft_layers": None,
        "max_length": None,
        "block_size": 128,
        "calibration": None,
        "draft_calibration": None,
        "quality": True,
        "adapter": None,
        "draft_adapter": None,
        "max_file_size": None,
        "long_context": False,
        "overwrite": False,
    }


def test_full_is_no_cut(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    options = ("--target", "big", "--draft", "small", "-o", tmp_path / "b", "--draft-vocab", "full")
    assert invoke("export", *options).exit_code == 0
    assert seen.options["draft_vocab"] == 0


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
                "calibration": "gptq",
                "quality": {
                    "prompts": {
                        "positions": 512,
                        "kl": 0.04321,
                        "argmax_agreement": 0.91,
                        "perplexity": 9.1,
                        "full_perplexity": 8.9,
                    },
                    "code": {
                        "positions": 640,
                        "kl": 0.02,
                        "argmax_agreement": 0.96,
                        "perplexity": 2.75,
                        "full_perplexity": 2.7,
                    },
                },
                "notes": ["something was left out"],
                "layers_seconds": 510.0,
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
        (["--target", "big", "-o", "new", "--draft-vocab", "64"], "--draft-vocab 64 is for a draft model"),
        (["--target", "big", "-o", "new", "--draft-vocab", "-1"], "got '-1'; full or a number of ids of at"),
        (
            ["--target", "big", "--draft", "small", "-o", "new", "--draft-vocab", "0"],
            "got '0'; full or a number of ids of",
        ),
        (["--target", "big", "-o", "new", "--draft-vocab", "all"], "got 'all'; full or a number of ids of at"),
        (["--target", "big", "-o", "new", "--draft-calibration", "gptq"], "is for a draft model"),
        (["--target", "big", "-o", "new", "--calibration", "awq"], "'awq' is not one of"),
        (["--target", "big", "-o", "new", "--calibration", "gptq", "--precision", "int8"], "these are int8"),
        (["--target", "big", "-o", str(Path(__file__).parent)], "exists already"),
        (["--target", "", "-o", "new"], "got ''; the name or path of a source is expected"),
        (["--target", "big", "--draft", "", "-o", "new"], "got ''; the name or path of a source is expected"),
        (["--target", "big\udcff", "-o", "new"], "is not valid UTF-8 at character 3"),
        (["--target", "big", "-o", ""], "got an empty text where a path is expected"),
        (["--target", "big", "-o", "new", "--cache-dir", ""], "got an empty text where a path is expected"),
        (["--target", "big", "-o", __file__], "is a file"),
        (["--target", "big", "-o", f"{__file__}/below/it"], "is no folder; choose another place"),
        (["--target", "big", "-o", "/proc/bundle"], "no folder can be made in /proc"),
        (["--target", "big", "-o", "a" * 250], "File name too long"),
        (["--target", "big", "-o", "new", "--max-length", "1"], "--max-length must be at least 74 positions"),
        (["--target", "big", "-o", "new", "--max-length", "73"], "`paceline check` needs to compare"),
        (["--target", "qwen2.5-coder", "--draft", "small", "-o", "new"], "leave --draft small out, or give the pair's"),
        (["--target", "big", "--draft", "qwen2.5-coder", "-o", "new"], "give the pair's draft, --draft qwen2.5-coder-"),
    ],
)
def test_wrong_usage_exits_before_anything_is_fetched(
    invoke: Invoke, seen: Seen, args: list[str], message: str
) -> None:
    result = invoke("export", *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert seen.sources == []


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
@pytest.mark.parametrize("aim", ["nowhere", "link"])
def test_a_link_to_nothing_is_no_place_for_a_bundle(
    invoke: Invoke, seen: Seen, tmp_path: Path, aim: str, options: list[str]
) -> None:
    (tmp_path / "link").symlink_to(aim)
    result = invoke("export", "--target", "big", "-o", tmp_path / "link", *options)
    assert result.exit_code == 2
    assert f"is a link to {aim}, which does not exist; remove the link" in result.stderr
    assert seen.sources == []
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_check_of_the_place_leaves_nothing_behind(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    assert invoke("export", "--target", "big", "-o", tmp_path / "a" / "b", "--max-length", 74).exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"out": None}, "out must be of type str or PathLike, got None"),
        ({"out": ""}, "out must be the path of a folder, got ''"),
        ({"out": "a\0b"}, "out must be the path of a folder"),
        ({"precision": ["int4"]}, "precision must be of type str, got"),
        ({"draft_precision": 4}, "draft_precision must be of type str or None, got 4"),
        ({"max_length": "x"}, "max_length must be of type int or None, got 'x'"),
        ({"max_length": True}, "max_length must be of type int or None, got True"),
        ({"block_size": 128.0}, "block_size must be of type int, got 128.0"),
        ({"overwrite": "yes"}, "overwrite must be of type bool, got 'yes'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_from_python_too(wrong: dict[str, Any], message: str) -> None:
    source: Any = None  # never looked at
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        paceline_export.export.export_bundle(source, None, **{"out": "new", **wrong})


def test_the_shortest_context_is_what_the_check_needs(invoke: Invoke, tmp_path: Path) -> None:
    from tiny import sizes, tiny_checkpoint

    source = tiny_checkpoint(tmp_path / "source", LlamaConfig(**sizes()))
    result = invoke(
        *("export", "--target", source, "-o", tmp_path / "bundle", "--precision", "fp32", "--max-length", 74),
        "--no-quality",
    )
    assert result.exit_code == 0, result.output
    assert invoke("check", tmp_path / "bundle").exit_code == 0


@pytest.mark.parametrize("draft", ["self:0", "self:", "self:x", "self:-1", "self:٢"])
def test_own_layers_are_a_number(invoke: Invoke, seen: Seen, tmp_path: Path, draft: str) -> None:
    result = invoke("export", "--target", "big", "--draft", draft, "-o", tmp_path / "b")
    assert result.exit_code == 2
    assert "a number of layers of at least 1 is expected, such as self:8" in result.stderr


def test_more_own_layers_than_there_are_is_wrong_usage(invoke: Invoke, tmp_path: Path) -> None:
    from tiny import sizes, tiny_checkpoint

    source = tiny_checkpoint(tmp_path / "source", LlamaConfig(**sizes()))
    result = invoke("export", "--target", source, "--draft", "self:99", "-o", tmp_path / "bundle")
    assert result.exit_code == 2
    assert "has 2 layers, so a draft of its first 99 is not possible; choose from 1 to 1" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--flavor", "cuda", "--precision", "fp32"), "--precision fp32 is none that graphs of the flavour cuda have"),
        (
            ("--draft", "small", "--draft-precision", "fp8"),
            "--draft-precision fp8 is none that graphs of the flavour ort",
        ),
        (
            ("--flavor", "trt", "--long-context"),
            "--long-context is for graphs of the flavour 'ort', and 'trt' is asked for; leave it out",
        ),
        (("--max-file-size", "50KB"), "--max-file-size must be at least 1,000,000 bytes, which is 1 MB; got 50,000"),
        (("--max-file-size", "50 parsecs"), "a size such as 512MB or 2GB is expected, in B, kB, MB, GB, KiB, MiB, GiB"),
    ],
)
def test_what_cannot_be_honoured_is_told_in_options(
    invoke: Invoke, seen: Seen, tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    result = invoke("export", "--target", "big", "-o", tmp_path / "b", *args)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
    assert seen.exports == []


def test_own_layers_are_no_source(invoke: Invoke, seen: Seen, tmp_path: Path) -> None:
    assert invoke("export", "--target", "big", "--draft", "self:8", "-o", tmp_path / "b").exit_code == 0
    assert seen.exports == [("source big", None, tmp_path / "b")]
    assert seen.options["draft_layers"] == 8


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
