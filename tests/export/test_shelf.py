"""Calibrated weights wait on disk, and come back as they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle
from paceline_export.calibrate.shelf import Shelf
from paceline_export.export import export_bundle
from paceline_export.quantize.blockwise import Blockwise, quantize
from paceline_export.quantize.rows import quantize_rows_to_float8
from paceline_export.source import resolve


def weight(seed: int, bits: int, *, symmetric: bool) -> Blockwise:
    values = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
    return quantize(values, bits=bits, block_size=16, symmetric=symmetric)


def assert_same(found: Blockwise, expected: Blockwise) -> None:
    for field in dataclasses.fields(Blockwise):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name))


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    weights = {
        "model.layers.0.a.weight": weight(0, 4, symmetric=False),
        "b": weight(1, 8, symmetric=True),
        "c": quantize_rows_to_float8(torch.randn(4, 16), 3.0),
    }
    shelf = Shelf(tmp_path)
    shelf.update(weights)
    assert dict(shelf).keys() == weights.keys()
    for name, expected in weights.items():
        assert_same(shelf[name], expected)
    shelf["b"] = weight(2, 4, symmetric=True)
    assert_same(shelf["b"], weight(2, 4, symmetric=True))
    assert_same(shelf["c"], weights["c"])
    del shelf["model.layers.0.a.weight"]
    assert (list(shelf), len(list(tmp_path.iterdir()))) == (["b", "c"], 2)
    shelf["d"] = weights["model.layers.0.a.weight"]  # takes no other's file
    assert_same(shelf["c"], weights["c"])
    with pytest.raises(KeyError):
        shelf["model.layers.0.a.weight"]


def test_nothing_of_it_stays_in_the_bundle(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes(num_hidden_layers=1)))
    source = resolve(str(folder))
    export_bundle(source, source, tmp_path / "bundle", calibration="gptq", draft_calibration="gptq", quality=False)
    bundle = Bundle.open(tmp_path / "bundle", verify_hashes=True)
    assert bundle.manifest.target.calibration == "gptq"
    assert {path.name for path in bundle.root.iterdir() if path.is_dir()} == {"target", "draft", "sampler"}
