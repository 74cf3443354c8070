"""GGUF files: blocks of every kind are read as what they stand for; tokenizer and template come out of the file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import TEMPLATE, WIDTH, Blocks, weights, write
from transformers import PreTrainedConfig, Qwen2Config
from transformers.integrations.gguf import dequant
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline.tokenizer import Tokenizer
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.gguf_reader import GGUF_KINDS
from paceline_export.leftovers import check_left_over
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


def in_layers(path: Path, blocks: Sequence[tuple[Blocks, Kind]]) -> Iterator[torch.Tensor]:
    """What is read of one projection of each layer of a model, which are stored in these blocks."""
    names = [f"blk.{i}.ffn_up.weight" for i in range(len(blocks))]
    tensors = weights(tied=False, layers=len(blocks))
    read = reader(write(path, tensors, dict(zip(names, blocks, strict=True)))).read
    return (read(f"model.layers.{i}.mlp.up_proj.weight") for i in range(len(blocks)))


def test_blocks_that_gguf_writes_are_the_values_they_were_made_of(tmp_path: Path) -> None:
    values = weights(tied=False)["blk.0.ffn_up.weight"]
    blocks = [(gguf.quants.quantize(values, kind), kind) for kind in WRITABLE]
    for kind, read in zip(WRITABLE, in_layers(tmp_path / "m.gguf", blocks), strict=True):
        atol = WRITABLE[kind] * float(np.abs(values).max()) * 1.01
        np.testing.assert_allclose(read.numpy(), values, rtol=0, atol=atol, err_msg=kind.name)


def test_blocks_that_transformers_reads_are_read_alike(tmp_path: Path) -> None:
    """Two readers that share nothing: gguf's, in numpy, and transformers', in torch."""
    kinds = [Kind(kind) for kind in sorted(dequant.GGML_BLOCK)]
    blocks = [(random_blocks(kind, WIDTH), kind) for kind in kinds]
    for (packed, kind), read in zip(blocks, in_layers(tmp_path / "m.gguf", blocks), strict=True):
        assert len(np.unique(packed)) > 200
        expected = dequant.dequantize(torch.from_numpy(packed).reshape(-1), kind).reshape(WIDTH, WIDTH)
        torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, kind))


def test_blocks_of_an_embedding_are_read_alike(tmp_path: Path) -> None:
    tensors, name = weights(tied=False), "token_embd.weight"
    blocks = random_blocks(Kind.Q4_K, len(tensors[name]))
    read = reader(write(tmp_path / "m.gguf", tensors, {name: (blocks, Kind.Q4_K)})).read("model.embed_tokens.weight")
    expected = dequant.dequantize(torch.from_numpy(blocks).reshape(-1), Kind.Q4_K).reshape(tensors[name].shape)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6)


def test_every_kind_is_either_compared_or_refused() -> None:
    compared = {kind.name for kind in WRITABLE} | {Kind(kind).name for kind in dequant.GGML_BLOCK}
    assert compared == set(GGUF_KINDS)


@pytest.mark.parametrize("kind", [Kind.NVFP4, Kind.F64, Kind.I8], ids=lambda kind: kind.name)
def test_other_kinds_are_refused_before_the_trace(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_export.one_model.trace", lambda *args, **kwargs: pytest.fail("it was traced"))
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


def test_a_file_without_a_number_of_layers_is_refused(tmp_path: Path) -> None:
    """transformers would take its own default, and build a model of it."""
    path = write(tmp_path / "m.gguf", weights(tied=True), {})
    path.write_bytes(path.read_bytes().replace(b"block_count", b"block_comnt", 1))
    with pytest.raises(CheckpointError, match=r"does not say how many layers it has \(block_count\)"):
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


def frequencies(config: PreTrainedConfig) -> torch.Tensor:
    """What torch rotates by."""
    inverse: torch.Tensor = Qwen2RotaryEmbedding(config).inv_freq
    return inverse


@pytest.mark.parametrize(
    ("scaling", "stated"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64, "finetuned": 1},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_a_scaled_rotation_comes_out_of_the_file(
    scaling: dict[str, Any], stated: dict[str, Any], tmp_path: Path
) -> None:
    config = Checkpoint.open(resolve(str(write(tmp_path / "m.gguf", weights(tied=True), {}, scaling)))).config
    assert config.rope_parameters == {"rope_theta": 10000.0} | stated


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_frequencies_of_llama_3_come_out_of_the_file(factor: float, tmp_path: Path) -> None:
    """llama.cpp keeps a tensor of what Llama 3.1's scaling divides the frequencies by; transformers leaves it out."""
    config = Qwen2Config(hidden_size=WIDTH, num_attention_heads=4, max_position_embeddings=256)
    plain = frequencies(config)
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config.rope_parameters |= {"rope_type": "llama3", "factor": factor} | llama3
    scaled = frequencies(config)
    tensors = weights(tied=True) | {"rope_freqs.weight": (plain / scaled).numpy()}
    found = Checkpoint.open(resolve(str(write(tmp_path / "m.gguf", tensors, {})))).config
    torch.testing.assert_close(frequencies(found), scaled, rtol=1e-6, atol=0)
    assert found.rope_parameters["rope_type"] == ("default" if factor == 1 else "llama3")


@pytest.mark.parametrize(
    ("tensor", "scaling", "message"),
    [
        (
            "rope_freqs.weight",
            {},
            r"'rope_freqs\.weight' divides the frequencies of the rotation by 32 numbers from 2 to",
        ),
        ("rope_factors_long.weight", {}, "its rotation is scaled by 'longrope'"),
        (None, {"type": "longrope"}, "its rotation is scaled by 'longrope'"),
        (None, {"type": "yarn", "factor": 4.0}, "expected a factor of at least 1, original_context_length"),
        (None, {"type": "linear"}, "expected a factor of at least 1 and no other settings"),
        (None, {"type": "yarn", "factor": 2.0, "original_context_length": 9, "yarn_log_multiplier": 0.1}, "no other"),
    ],
)
def test_other_scalings_are_refused(tensor: str | None, scaling: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = weights(tied=True)
    if tensor is not None:
        tensors[tensor] = np.linspace(2, 3, 32, dtype=np.float32)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(resolve(str(write(tmp_path / "m.gguf", tensors, {}, scaling))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.0.attn_q_norm.weight", "'blk.0.attn_q_norm.weight', and Qwen2ForCausalLM .* has no such"),
        ("v.x.weight", ""),
    ],
)
def test_tensors_that_no_parameter_is_made_of(name: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", weights(tied=True) | {name: np.ones(64, np.float32)}, {})
    checkpoint = Checkpoint.open(resolve(str(path)))
    model = check_architecture(checkpoint.config)
    left_over = checkpoint.weights(model).left_over()
    if message:
        with pytest.raises(CheckpointError, match=message):
            check_left_over("it", left_over, model, cut=False)
    else:
        (note,) = check_left_over("it", left_over, model, cut=False)
        assert note.endswith("has no such parts: v.x (1)")
