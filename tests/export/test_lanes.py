"""Graphs for several texts in one pass: which bundles get them, and that every architecture says the same in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import ARCHITECTURES
from measure_architectures import exported
from tiny import tiny_checkpoint

from paceline.bundle import MANIFEST_NAME, Bundle
from paceline.errors import InvalidInputError
from paceline.model import Feed
from paceline.ort import OrtModel
from paceline.ort_lanes import LanesModel
from paceline_export.lanes import add_lanes

LANES = 3
# `pytest -m slow` has all.
FAST = ("gemma 2", "gpt2", "qwen3, ")
# Outside attention they look up tables of positions, rotate, or make a bias.
BY_POSITION = (
    *("gpt2", "gpt-bigcode", "opt", "falcon-rw", "mpt", "bloom"),
    *("gpt-neox", "gpt-j", "gpt-oss", "llama, heads of 24", "phi", "stablelm", "glm 4", "hunyuan"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith(FAST) else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_every_architecture_says_the_same_in_lanes(name: str, tmp_path: Path) -> None:
    """Texts of different lengths, which cross windows, and rows of different numbers; or the refusal."""
    exported(tiny_checkpoint(tmp_path / "model", ARCHITECTURES[name]), "ort", "fp32", tmp_path / "bundle")
    before = (tmp_path / "bundle" / MANIFEST_NAME).read_text()
    if name.startswith(BY_POSITION):
        with pytest.raises(InvalidInputError, match="target: This graph cannot take several texts in one pass"):
            add_lanes(Bundle.open(tmp_path / "bundle"), 2)
        assert (tmp_path / "bundle" / MANIFEST_NAME).read_text() == before
        return
    add_lanes(Bundle.open(tmp_path / "bundle"), 2)
    bundle = Bundle.open(tmp_path / "bundle")
    lanes, single = LanesModel.open(bundle, "target", max_batch=2), OrtModel.open(bundle, "target")
    mine, others = ([model.new_cache(60) for _ in range(2)] for model in (lanes, single))
    rng = np.random.default_rng(0)
    for shapes in ((30, 13), (1, 4), (5, 1), (1, 1)):
        fed = [rng.integers(0, 255, rows).tolist() for rows in shapes]
        found = lanes.forward_all(
            [Feed(tokens, cache, rows) for tokens, cache, rows in zip(fed, mine, shapes, strict=True)]
        )
        for logits, tokens, cache, rows in zip(found, fed, others, shapes, strict=True):
            np.testing.assert_allclose(logits, single.forward(tokens, cache, rows), atol=2e-3, rtol=1e-3)
        for cache in (mine[1], others[1]):
            cache.rollback(cache.length - 1)


def test_a_bundle_gets_other_lanes_and_stays_whole(lanes_bundle: Path) -> None:
    before = Bundle.open(lanes_bundle).manifest
    report = add_lanes(Bundle.open(lanes_bundle), 2)
    after = Bundle.open(lanes_bundle, verify_hashes=True).manifest
    assert report.max_batch == 2
    assert set(report.graphs) == {"target", "draft"}
    assert not (lanes_bundle / "target" / f"lanes-{LANES}.onnx").exists()
    assert set(after.files) ^ set(before.files) == {
        f"{which}/lanes-{count}.onnx" for which in ("target", "draft") for count in (2, LANES)
    }
    assert after.graph_sha256(after.target) == before.graph_sha256(before.target)
    assert after.weight_bytes == before.weight_bytes
    assert LanesModel.open(Bundle.open(lanes_bundle), "draft", max_batch=2).max_batch == 2
    assert sorted(path.name for path in (lanes_bundle / "target").iterdir()) == [
        *("config.json", "lanes-2.onnx", "model.onnx", "model.onnx.data"),
    ]


@pytest.mark.parametrize("bad", [1, 0, 65, True, 2.0, "3"])
def test_bad_numbers_of_texts(bad: Any, tiny_bundle: Path) -> None:
    with pytest.raises(InvalidInputError, match="max_batch must be an integer from 2 to 64"):
        add_lanes(Bundle.open(tiny_bundle), bad)


def test_other_flavors_are_refused(tiny_engines: Path) -> None:
    with pytest.raises(InvalidInputError, match="the target's graph has the flavour 'trt'"):
        add_lanes(Bundle.open(tiny_engines), 2)
