"""GGUF files: blocks of every kind are read as what they stand for; tokenizer and template come out of the file."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import TEMPLATE, WIDTH, Blocks, weights, write
from transformers.integrations.gguf import dequant

from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline.tokenizer import Tokenizer
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.gguf_reader import GGUF_KINDS
from paceline_export.parity import check_bundle
from paceline_export.source import resolve
from paceline_export.weight_reader import WeightReader

# Largest error of a value, as a share of the largest one, of the kinds that gguf can write.
WRITABLE = {
    Kind.F32: 0.0,
    Kind.F16: 2**-11,
    Kind.BF16: 2**-8,
    Kind.Q8_0: 1 / 127,
    Kind.Q5_1: 1 / 31,
    Kind.Q5_0: 1 / 16,
    Kind.Q4_1: 1 / 15,
    Kind.Q4_0: 1 / 8,
    Kind.MXFP4: 1 / 4,
    Kind.TQ1_0: 1 / 2,
    Kind.TQ2_0: 1 / 2,
}
PARAMETERS = {
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "token_embd.weight": "model.embed_tokens.weight",
}


def reader(path: Path) -> WeightReader:
    checkpoint = Checkpoint.open(resolve(str(path)))
    return checkpoint.weights(check_architecture(checkpoint.config))


def random_blocks(kind: Kind, rows: int) -> Blocks:
    """Rows of random bytes that are numbers of a usual size, whatever the kind's scales are."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    found: Blocks = np.random.default_rng(kind).integers(0, 256, (64 * rows * WIDTH // values, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        numbers = gguf.dequantize(found, kind)
        found = found[(np.abs(numbers) < 1000).all(1) & (np.abs(numbers) > 1e-4).any(1)]
    return found[: rows * WIDTH // values].reshape(rows, -1)


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_blocks_that_gguf_writes_are_the_values_they_were_made_of(kind: Kind, tmp_path: Path) -> None:
    tensors = weights(tied=False)
    name = "blk.0.ffn_up.weight"
    blocks = gguf.quants.quantize(tensors[name], kind)
    read = reader(write(tmp_path / "m.gguf", tensors, {name: (blocks, kind)})).read(PARAMETERS[name])
    largest = float(np.abs(tensors[name]).max())
    np.testing.assert_allclose(read.numpy(), tensors[name], rtol=0, atol=WRITABLE[kind] * largest * 1.01)


@pytest.mark.parametrize("kind", sorted(dequant.GGML_BLOCK), ids=lambda kind: Kind(kind).name)
@pytest.mark.parametrize("name", PARAMETERS)
def test_blocks_that_transformers_reads_are_read_alike(kind: int, name: str, tmp_path: Path) -> None:
    """Two readers that share nothing: gguf's, in numpy, and transformers', in torch."""
    tensors = weights(tied=False)
    rows = len(tensors[name])
    blocks = random_blocks(Kind(kind), rows)
    assert len(np.unique(blocks)) > 200
    read = reader(write(tmp_path / "m.gguf", tensors, {name: (blocks, Kind(kind))})).read(PARAMETERS[name])
    expected = dequant.dequantize(torch.from_numpy(blocks).reshape(-1), kind).reshape(rows, WIDTH)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6)


def test_every_kind_is_either_compared_or_refused() -> None:
    compared = {kind.name for kind in WRITABLE} | {Kind(kind).name for kind in dequant.GGML_BLOCK}
    assert compared == set(GGUF_KINDS)


@pytest.mark.parametrize("kind", [Kind.NVFP4, Kind.F64, Kind.I8], ids=lambda kind: kind.name)
def test_other_kinds_are_refused_before_the_trace(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_export.export.trace", lambda *args, **kwargs: pytest.fail("it was traced"))
    tensors = weights(tied=False)
    name = "blk.0.ffn_up.weight"
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.zeros((WIDTH, WIDTH // values * size), np.uint8)
    path = write(tmp_path / "m.gguf", tensors, {name: (blocks, kind)})
    with pytest.raises(CheckpointError, match=f"'{name}' in blocks of the type {kind.name}; expected one of F32"):
        export_bundle(resolve(str(path)), None, tmp_path / "bundle", precision="fp32")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", 4_000_000_000, r"says qwen2\.block_count = 4,000,000,000, and it has 14 tensors"),
        ("attention.head_count", 4_000_000_000, r"qwen2\.attention\.head_count = 4,000,000,000, .* 262 rows"),
        ("feed_forward_length", 2**31, r"qwen2\.feed_forward_length = 2,147,483,648"),
        ("attention.layer_norm_rms_epsilon", -1.0, "rms_norm_eps=-1.0; expected a small number"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "rms_norm_eps=nan; expected a small number"),
    ],
)
def test_counts_that_the_tensors_cannot_have_are_refused(key: str, value: float, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", weights(tied=True), {})
    content, name = path.read_bytes(), f"qwen2.{key}".encode()
    at = content.index(name) + len(name) + 4
    path.write_bytes(content[:at] + struct.pack("<f" if "epsilon" in key else "<I", value) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(resolve(str(path)))


@pytest.mark.parametrize("key", ["tokens", "merges", "model"])
def test_a_tokenizer_that_lacks_a_part_is_named(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", weights(tied=True), {})
    name = f"tokenizer.ggml.{key}".encode()
    path.write_bytes(path.read_bytes().replace(name, b"x" * len(name), 1))
    with pytest.raises(CheckpointError, match=rf"m\.gguf has no tokenizer\.ggml\.{key}: its tokenizer is missing"):
        Checkpoint.open(resolve(str(path)))


def test_a_file_without_tensors_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {}, {})
    with pytest.raises(CheckpointError, match=r"m\.gguf holds no tensors, only metadata"):
        resolve(str(path))


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_of_mixed_blocks_becomes_a_bundle(tied: bool, tmp_path: Path) -> None:
    tensors = weights(tied=tied, layers=2)
    blocks = {
        name: (gguf.quants.quantize(tensor, kind), kind)
        for name, tensor in tensors.items()
        if tensor.ndim == 2
        for kind in [Kind.Q8_0 if "attn" in name else Kind.Q5_1]
    }
    path = write(tmp_path / "m.gguf", tensors, blocks)
    export_bundle(resolve(str(path)), None, tmp_path / "bundle", precision="fp32", quality=False)
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.target.source.kind == "gguf"
    assert check_bundle(bundle).passed


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_and_template_come_out_of_the_file(add_bos: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", weights(tied=True), {}, add_bos_token=add_bos)
    export_bundle(resolve(str(path)), None, tmp_path / "bundle", precision="int4", calibration="none", quality=False)
    bundle = Bundle.open(tmp_path / "bundle")
    tokenizer = Tokenizer.from_bundle(bundle)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.chat_prompt([{"role": "user", "content": "the"}]) == "<s>the</s>"
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]) == [259, 257, 260]
    assert tokenizer.encode("the") == [259] * add_bos + [257]
    assert tokenizer.decode([257, 260]) == "the"
    assert bundle.manifest.tokenizer.eos_token_ids == (260,)
    assert bundle.manifest.tokenizer.bos_token_id == 259
