"""`paceline batch`, and what commands say of bundles with and without its graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bundle import Bundle

from .conftest import Invoke


def test_graphs_are_added_and_told(invoke: Invoke, damaged: Path) -> None:
    result = invoke("batch", damaged, "--max-batch", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Added graphs for 3 texts in one pass to {damaged} in ")
    assert f"`paceline serve {damaged} --max-batch 3`" in result.stdout
    manifest = Bundle.open(damaged, verify_hashes=True).manifest
    assert manifest.draft is not None
    assert [model.lanes.count for model in (manifest.target, manifest.draft) if model.lanes] == [3, 3]
    told = invoke("info", damaged)
    assert told.exit_code == 0
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("texts in one pass")]
    assert line.split()[-2:] == ["3", "3"]


def test_json(invoke: Invoke, damaged: Path) -> None:
    result = invoke("batch", damaged, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["max_batch"] == 4
    assert document["graphs"] == {
        which: Bundle.open(damaged).manifest.files[f"{which}/lanes-4.onnx"].size for which in ("target", "draft")
    }


@pytest.mark.parametrize("bad", ["1", "65", "x"])
def test_bad_numbers(invoke: Invoke, damaged: Path, bad: str) -> None:
    result = invoke("batch", damaged, "--max-batch", bad)
    assert result.exit_code == 2
    assert "--max-batch" in result.stderr


def test_what_is_no_bundle(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("batch", tmp_path / "missing")
    assert result.exit_code == 1
    assert "There is no bundle" in result.stderr


def test_engines_are_built_otherwise(invoke: Invoke, tiny_engines: Path) -> None:
    result = invoke("batch", tiny_engines)
    assert result.exit_code == 2
    assert "`paceline build --max-batch`" in result.stderr


def test_a_server_says_what_its_bundle_lacks(invoke: Invoke, damaged: Path) -> None:
    result = invoke("serve", damaged, "--max-batch", 2)
    assert result.exit_code == 2
    assert f"add one with `paceline batch {damaged} --max-batch 2`" in result.stderr
    assert "--max-batch 2: the target's graph" in result.stderr
