"""`measure_rounding`: that it rounds what a graph of the precision fp8 rounds, and prints a line for each dtype."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline.bundle import Bundle, ModelEntry
from paceline_export.parity import reference_model

from . import measure_rounding
from .measure_rounding import compared, input_scales, logits, main, round_inputs, round_products


@pytest.fixture
def draft(tiny_few_bits: Path) -> tuple[Bundle, ModelEntry]:
    """A bundle whose draft has the precision fp8."""
    opened = Bundle.open(tiny_few_bits)
    assert opened.manifest.draft is not None
    return opened, opened.manifest.draft


def test_scales_are_those_of_the_graph(draft: tuple[Bundle, ModelEntry]) -> None:
    bundle, entry = draft
    scales = input_scales(bundle.path(entry.path))
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


def test_products_are_rounded_once() -> None:
    """bfloat16 has 258, and not 257."""
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.inference_mode():
        model.weight.copy_(torch.tensor([[1.0, 1.0, 1 + 2**-9]]))  # the last is rounded to 1
        round_products(model, torch.bfloat16)
        found = model(torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16))
    assert (found.dtype, found.item()) == (torch.bfloat16, 258.0)  # 256 + 1 would be 256


def test_texts_are_fed_in_passes(draft: tuple[Bundle, ModelEntry]) -> None:
    model = reference_model(*draft)
    ids = torch.arange(120).reshape(2, 60) % 250
    whole = logits(model, ids, 28)
    assert whole.shape == (2, 28, 272)
    torch.testing.assert_close(logits(model, ids, 5), whole, atol=1e-3, rtol=0)
    assert compared(whole[0], whole[0]) == ([0.0] * 28, 0.0, [])
    other = whole[0].clone()
    best, value = int(other[3].argmax()), float(other[3].max())
    other[3, best] = -1e9
    varied, largest, gaps = compared(whole[0], other)
    assert varied[3] > 0 == varied[4]
    assert largest > 1e8
    assert gaps == [value - float(other[3].max())]


def test_it_prints_a_line_for_each_dtype(
    tiny_few_bits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_rounding, "ROWS", 48)
    arguments = [str(tiny_few_bits), "--draft", "--dtypes", "float32,float8", "--texts", "2"]
    monkeypatch.setattr(sys, "argv", ["measure_rounding", *arguments])
    main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["dtype", "float32", "float8"]
    assert [line[1] for line in lines[1:]] == [str(2 * 4 * 16)] * 2
    assert all(0 <= float(line[2]) < 0.5 for line in lines[1:])


def test_a_bundle_that_rounds_no_inputs_has_no_float8(
    tiny_few_bits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_rounding", str(tiny_few_bits), "--dtypes", "float8", "--texts", "1"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "rounds no inputs to float8; export it with --flavor trt --precision fp8" in capsys.readouterr().err
