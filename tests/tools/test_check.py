"""`paceline check`: how a comparison is shown, and when it fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline_export.parity
from paceline.bundle import Bundle
from paceline_export.parity import ModelParity, ParityReport, PhaseParity

from .conftest import Invoke, run_paceline, write_table_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_table_bundle(tmp_path / "tables")


def report_of(monkeypatch: pytest.MonkeyPatch, max_logit_diff: float) -> None:
    """Let the library find this difference."""

    def check_bundle(bundle: Bundle, *, on_progress: Callable[[str], None]) -> ParityReport:
        on_progress("target: torch")
        phases = (
            PhaseParity("prefill", 64, 1e-5, 1e-9, 1.0, 0, 0),
            PhaseParity("after rollback", 5, max_logit_diff, 2e-9, 0.8, 1, 0),
        )
        return ParityReport((ModelParity("target", "int4", "fp32", phases, 2e-3, 1e-6),))

    monkeypatch.setattr(paceline_export.parity, "check_bundle", check_bundle)


def test_within_tolerance(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report_of(monkeypatch, 1e-4)
    result = invoke("check", bundle)
    assert result.exit_code == 0, result.output
    assert "target, weights int4, arithmetic fp32: passed (tolerance: logits 0.002, KL 1e-06)" in result.stdout
    assert ["after", "rollback", "5", "0.0001", "2e-09", "80.0", "%", "1", "0"] in map(
        str.split, result.stdout.splitlines()
    )
    assert result.stderr == "target: torch\n"


@pytest.mark.parametrize("difference", [0.5, math.nan])
def test_past_tolerance(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    report_of(monkeypatch, difference)
    result = invoke("check", bundle)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert f"a logit differs by {difference:.3g}, more than 0.002" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(("difference", "passed"), [(1e-4, True), (0.5, False), (math.nan, False)])
def test_json(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch, difference: float, passed: bool) -> None:
    report_of(monkeypatch, difference)
    result = invoke("check", bundle, "--json")
    assert result.exit_code == (0 if passed else 1)
    found = json.loads(result.stdout)
    assert found["passed"] is passed
    (model,) = found["models"]
    assert model["passed"] is passed
    assert (model["reason"] is None) is passed
    assert model["phases"][1]["max_logit_diff"] == (difference if math.isfinite(difference) else None)


def test_a_real_bundle_passes(smol_bundle: Path) -> None:
    done = run_paceline("check", smol_bundle, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"]
    assert {(model["which"], model["arithmetic"]) for model in found["models"]} == {
        ("target", "fp32"),
        ("draft", "fp32"),
        ("draft", "int8"),
    }


def test_no_bundle(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("check", tmp_path / "none")
    assert result.exit_code == 1
    assert "There is no bundle at" in result.stderr
