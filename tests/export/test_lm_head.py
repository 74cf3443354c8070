"""An LM head of its own: its first rows, those of the most frequent ids, are stored in 8 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, stored_weights
from paceline_export.quantize import PRECISIONS
from paceline_export.source import resolve

CONFIGS = {
    "plain": transformers.LlamaConfig(**sizes()),
    "scaled": transformers.GraniteConfig(**sizes(logits_scaling=2.0)),
    "of 72 columns": transformers.Qwen2Config(**sizes(hidden_size=72, head_dim=16)),
}


ROWS = 100


def export(
    checkpoint: Path, out: Path, rows: int, monkeypatch: pytest.MonkeyPatch, *, draft: bool = False
) -> tuple[Bundle, torch.Tensor]:
    """A bundle whose head has so many rows in 8 bits, and this head, float32 `[vocab, width]`."""
    monkeypatch.setitem(PRECISIONS, "int4", replace(PRECISIONS["int4"], head_rows=rows))
    source = resolve(str(checkpoint))
    made = source if draft else None
    export_bundle(source, made, out, precision="int4", calibration="none", block_size=32, quality=False)
    return Bundle.open(out, verify_hashes=True), stored_weights(out / "target/model.onnx")["lm_head.weight"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_rows_are_nearer_and_the_others_as_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", CONFIGS[name])
    original = load_file(checkpoint / "model.safetensors")["lm_head.weight"].float()
    plain, in_4_bits = export(checkpoint, tmp_path / "plain", 0, monkeypatch)
    assert "lm_head.weight" not in (plain.manifest.target.mixed_bits or {})
    bundle, mixed = export(checkpoint, tmp_path / "mixed", ROWS, monkeypatch)
    errors = (mixed - original).norm(dim=1) / (in_4_bits - original).norm(dim=1)
    assert float(errors[:ROWS].max()) < 0.2  # 16 times the levels, of one that an end of symmetric blocks lacks
    assert torch.equal(mixed[ROWS:], in_4_bits[ROWS:])
    assert (bundle.manifest.target.mixed_bits or {})[f"lm_head.weight[:{ROWS}]"] == 8
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]


def test_a_head_of_few_rows_is_in_8_bits_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", CONFIGS["plain"])
    rows = CONFIGS["plain"].vocab_size
    bundle, head = export(checkpoint, tmp_path / "bundle", PRECISIONS["int4"].head_rows, monkeypatch, draft=True)
    original = load_file(checkpoint / "model.safetensors")["lm_head.weight"].float()
    assert float((head - original).abs().max()) < float(original.abs().max()) / 100
    assert (bundle.manifest.target.mixed_bits or {})[f"lm_head.weight[:{rows}]"] == 8
    assert bundle.manifest.draft is not None
    assert not bundle.manifest.draft.mixed_bits  # a draft's speed counts for more
    assert check_bundle(bundle).passed
