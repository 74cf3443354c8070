from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import PacelineError, errors
from paceline.drafters import DRAFTERS, DraftModelDrafter

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_pinned() -> None:
    assert sorted(paceline.__all__) == [
        "AsyncEngine",
        "Bundle",
        "CausalLM",
        "Draft",
        "Drafter",
        "Generation",
        "KVCache",
        "PacelineError",
        "PrefixCache",
        "SamplingParams",
        "SpeculativeDecoder",
        "Stats",
        "Step",
        "__version__",
        "load",
    ]
    assert all(hasattr(paceline, name) for name in paceline.__all__)


def test_the_version_is_the_projects() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == paceline.__version__  # type: ignore[index]


def test_the_package_ships_its_types() -> None:
    assert (ROOT / "runtime" / "paceline" / "py.typed").is_file()


def test_the_error_tree_is_drawn_in_full() -> None:
    drawn = errors.__doc__ or ""
    for name in errors.__all__:
        assert re.search(rf"\b{name}\b", drawn)
        assert issubclass(getattr(errors, name), PacelineError)


def test_drafters_are_found_by_name() -> None:
    assert DRAFTERS["draft-model"] is DraftModelDrafter


@pytest.mark.parametrize("unwanted", ["torch", "transformers", "onnx", "onnxruntime", "llguidance"])
def test_import_paceline_stays_lean(unwanted: str) -> None:
    code = f"import sys, paceline, paceline.grammar, paceline.testing; sys.exit({unwanted!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "runtime")})
