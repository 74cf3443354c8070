"""`paceline build`: what it hands on, what it prints, and what it refuses before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline_export.engine.bundle
from paceline.bundle import Bundle, EngineEntry, EngineProfile
from paceline.errors import BuildError
from paceline_export.engine.build import ProfileReport
from paceline_export.engine.bundle import BuildReport, EngineReport
from paceline_export.engine.profiles import ProfileRows

from .conftest import Invoke, write_table_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_table_bundle(tmp_path / "tables")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the library's work."""
    seen: dict[str, Any] = {}

    def build_engines(bundle: Bundle, sms: Any, **options: Any) -> BuildReport:
        seen.update(options, sms=sms, root=bundle.root)
        options["on_progress"]("target, compute capability 8.9", 0.25)
        profiles = (
            EngineProfile("verify", {"input_ids": ((1, 1), (2, 5), (2, 5))}),
            EngineProfile("prefill", {"input_ids": ((1, 1), (2, 256), (2, 256))}),
        )
        entry = EngineEntry(
            *("engines/a.engine", "target", "tensorrt-rtx", "1.7.1.116", "8.9", "int4", "0" * 64, 4096, 4, 2, profiles)
        )
        said = (ProfileReport("verify", 12_300_000, 30), ProfileReport("prefill", None, 29))
        engine = EngineReport(entry, ("8.9", "12.0"), 333_000_000, 34.0, 30, said, ("something was dropped",))
        return BuildReport(bundle.root, 65.0, 1_600_000_000, (engine,))

    monkeypatch.setattr(paceline_export.engine.bundle, "build_engines", build_engines)
    return seen


def test_all_options_arrive(invoke: Invoke, seen: dict[str, Any], bundle: Path, tmp_path: Path) -> None:
    result = invoke(
        *("build", bundle, "--backend", "tensorrt-rtx", "--sm", "8.6,12.0", "--max-length", 2048),
        *("--max-draft-tokens", 4, "--max-batch", 2, "--workspace", "1.5GiB", "--timing-cache", tmp_path / "timings"),
        *("--profile", "target:verify=1,5,9", "--profile", "draft:long=64,256,512"),
        *("--no-strict", "--engine-per-gpu", "-o", tmp_path / "out"),
    )
    assert result.exit_code == 0, result.output
    del seen["on_progress"]
    assert seen == {
        "root": bundle,
        "sms": ("8.6", "12.0"),
        "backend": "tensorrt-rtx",
        "max_length": 2048,
        "max_draft_tokens": 4,
        "max_batch": 2,
        "profile_rows": (
            ProfileRows("target", "verify", (1, 5, 9)),
            ProfileRows("draft", "long", (64, 256, 512)),
        ),
        "workspace": 3 << 29,
        "timing_cache": tmp_path / "timings",
        "strict": False,
        "engine_per_gpu": True,
        "out": tmp_path / "out",
    }
    assert result.stdout.endswith(f"--engines {tmp_path / 'out'}`.\n")
    assert result.stderr == " 25%  target, compute capability 8.9\n"


def test_the_report(invoke: Invoke, seen: dict[str, Any], bundle: Path) -> None:
    result = invoke("build", bundle, "--sm", "8.9")
    assert (seen["strict"], seen["engine_per_gpu"]) == (True, False)
    assert (seen["max_length"], seen["max_draft_tokens"], seen["max_batch"]) == (None, 8, 1)
    assert seen["profile_rows"] == ()
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "engine time on disk weights",
        "target, int4, SM 8.9, 12.0 34 s 333 MB –",
        "target, SM 8.9, 12.0, verify 1 … 5, tuned at 5 12.3 MB 30 of 30",
        "target, SM 8.9, 12.0, prefill 1 … 256, tuned at 256 – 29 of 30",
        "Warning: target, SM 8.9, 12.0: something was dropped.",
        "Built by tensorrt-rtx 1.7.1.116 for caches of 4096 positions, at most 4 drafted tokens and 2 texts at once; "
        "not run on a GPU.",
        f"Wrote 333 MB to {bundle} in 1 min 05 s; peak memory 1.6 GB.",
    ):
        assert line in lines


def test_json_is_one_document(invoke: Invoke, seen: dict[str, Any], bundle: Path) -> None:
    found = json.loads(invoke("build", bundle, "--sm", "8.9", "--json").stdout)
    (engine,) = found["engines"]
    assert engine["entry"]["profiles"][0]["shapes"] == {"input_ids": [[1, 1], [2, 5], [2, 5]]}
    assert engine["profiles"][1] == {"name": "prefill", "activation_bytes": None, "fused_attention": 29}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "flavour ort, which TensorRT cannot read"),
        (["--sm", "8.9", "--profile", "verify=1,5,9"], "got 'verify=1,5,9'; MODEL:NAME=LEAST,USUAL,MOST is expected"),
        (["--sm", "8.9", "--profile", "target:verify=9,5,1"], "expected a least, a usual and a largest number"),
        (
            ["--sm", "8.9", "--profile", "target:v=1,5,9", "--profile", "target:v=1,5,9"],
            "--profile names a profile twice",
        ),
        (["--sm", "89"], "got '89'; different compute capabilities with commas between them are expected"),
        (["--sm", "8.9,8.9"], "got '8.9,8.9'; different compute capabilities"),
        (["--sm", "8.9", "--backend", "openvino"], "'openvino' is not one of 'tensorrt-rtx', 'tensorrt'"),
        (["--sm", "8.9", "--workspace", "much"], "got 'much'; a size such as 512MB or 2GB is expected"),
        (["--sm", "8.9", "--workspace", "0"], "got '0'; a size such as"),
        (
            ["--sm", "8.9"],
            "flavour ort, which TensorRT cannot read; export the models with --flavor trt",
        ),
    ],
)
def test_wrong_usage_is_said_before_any_work(invoke: Invoke, bundle: Path, args: list[str], message: str) -> None:
    result = invoke("build", bundle, *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_failed_build_is_one_sentence(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_engines(*args: Any, **options: Any) -> None:
        raise BuildError("tensorrt-rtx cannot build this: out of memory")

    monkeypatch.setattr(paceline_export.engine.bundle, "build_engines", build_engines)
    result = invoke("build", bundle, "--sm", "8.9")
    assert (result.exit_code, result.stderr) == (1, "Error: tensorrt-rtx cannot build this: out of memory\n")


def test_no_bundle(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("build", tmp_path / "none", "--sm", "8.9")
    assert result.exit_code == 1
    assert "There is no bundle at" in result.stderr
