"""`measure_rounding`: that it rounds what a graph of the precision fp8 rounds, and prints a line for each dtype."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import sizes, tiny_checkpoint
from transformers import LlamaConfig

from paceline.bundle import Bundle
from paceline.tokenizer import Tokenizer
from paceline_export.cpu import open_on_cpu
from paceline_export.export import export_bundle
from paceline_export.parity import TEXT, reference_model
from paceline_export.source import resolve

from . import measure_rounding
from .measure_rounding import input_scales, logits, main, round_inputs


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    checkpoint = tiny_checkpoint(folder / "model", LlamaConfig(**sizes()))
    options = {"flavor": "trt", "precision": "fp8", "max_length": 128, "quality": False}
    export_bundle(resolve(str(checkpoint)), None, folder / "bundle", **options)  # type: ignore[arg-type]
    return folder / "bundle"


def test_inputs_are_rounded_as_the_graph_rounds_them(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    entry = opened.manifest.target
    scales = input_scales(opened.path(entry.path))
    parts = [*(f"self_attn.{part}_proj" for part in "qkvo"), *(f"mlp.{part}_proj" for part in ("gate", "up", "down"))]
    assert set(scales) == {f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts}
    ids = torch.tensor(Tokenizer.from_bundle(opened).encode(TEXT, add_special_tokens=False)[:96])
    graph = open_on_cpu(opened.path(entry.path), entry, 128)
    found = torch.from_numpy(graph.forward(ids.tolist(), graph.new_cache(128), len(ids)).copy())
    whole = reference_model(opened, entry)
    with torch.inference_mode():
        as_they_are = whole(ids[None]).logits[0]
        round_inputs(whole, scales)
        rounded = whole(ids[None]).logits[0]
    apart = (as_they_are - found).abs().mean()
    assert (rounded - found).abs().mean() < 0.25 * apart


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
    assert 0 < float(lines[1][2]) < float(lines[2][2]) <= 1
