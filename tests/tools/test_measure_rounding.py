"""`measure_rounding`: that it rounds what a graph of the precision fp8 rounds, and prints a line for each dtype."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import sizes, tiny_checkpoint
from transformers import LlamaConfig

from paceline.bundle import Bundle
from paceline_export.export import export_bundle
from paceline_export.parity import reference_model
from paceline_export.source import resolve

from . import measure_rounding
from .measure_rounding import input_scales, logits, main, round_inputs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    checkpoint = tiny_checkpoint(folder / "model", LlamaConfig(**sizes()))
    source, path = resolve(str(checkpoint)), folder / "bundle"
    export_bundle(source, None, path, flavor="trt", precision="fp8", max_length=128, quality=False)
    return path


def test_scales_are_those_of_the_graph(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    scales = input_scales(opened.path(opened.manifest.target.path))
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    assert set(scales) == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    assert scales["model.layers.0.self_attn.q_proj"] == scales["model.layers.0.self_attn.v_proj"] > 0
    assert scales["model.layers.0.self_attn.q_proj"] != scales["model.layers.1.self_attn.q_proj"]


def test_inputs_become_float8_numbers_times_their_scale() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(5, 5, bias=False), "other": torch.nn.Linear(5, 5, bias=False)})
    for parameter in model.parameters():
        torch.nn.init.eye_(parameter)
    round_inputs(model, {"one": 2.0})
    x = torch.tensor([2.0, 2.1, 2.15, -2.4, 5000.0])  # the steps from 2 on are 0.25, and the largest number is 2 x 448
    with torch.inference_mode():
        assert model["one"](x).tolist() == [2.0, 2.0, 2.25, -2.5, 896.0]
        assert model["other"](x).tolist() == x.tolist()


def test_a_text_is_fed_in_passes(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    model = reference_model(opened, opened.manifest.target)
    ids = torch.arange(60) % 250
    whole = logits(model, ids, 28)
    assert whole.shape == (28, 272)
    torch.testing.assert_close(logits(model, ids, 5), whole, atol=1e-3, rtol=0)


def test_it_prints_a_line_for_each_dtype(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_rounding, "ROWS", 48)
    monkeypatch.setattr(sys, "argv", ["measure_rounding", str(bundle), "--dtypes", "float32,float8", "--texts", "1"])
    main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["dtype", "float32", "float8"]
    assert [line[1] for line in lines[1:]] == [str(4 * 16)] * 2
    assert all(0 <= float(line[2]) < 0.5 for line in lines[1:])


def test_a_bundle_that_rounds_no_inputs_has_no_float8(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_rounding", str(tiny_bundle), "--dtypes", "float8", "--texts", "1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "rounds no inputs to float8; export it with --flavor trt --precision fp8" in capsys.readouterr().err
