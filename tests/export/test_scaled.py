"""Checkpoints stored in 8 bits with scales (fp8, compressed-tensors): read as what they stand for, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, stored_weights
from paceline_export.source import resolve
from paceline_export.weight_reader import WeightReader

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"} | weights}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized"}
Stored = tuple[torch.Tensor, torch.Tensor]  # a weight and its scales


def by_blocks(dtype: torch.dtype) -> Callable[[torch.Tensor], Stored]:
    """Blocks of 32 x 32, the last ones not full, divided by their largest magnitude; one block at a time."""

    def store(weight: torch.Tensor) -> Stored:
        rows, columns = weight.shape
        scales = torch.empty(-(-rows // 32), -(-columns // 32))
        stored = torch.empty(weight.shape, dtype=dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
                scales[i, j] = weight[block].abs().max() / 400
                stored[block] = (weight[block] / scales[i, j]).to(dtype)
        return stored, scales

    return store


def by_rows(weight: torch.Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


def by_rows_float8(weight: torch.Tensor) -> Stored:
    scales = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return (weight / scales).to(E4M3), scales


def whole(weight: torch.Tensor) -> Stored:
    scale = weight.abs().max() / 448
    return (weight / scale).to(E4M3), scale


def powers_of_two(weight: torch.Tensor) -> Stored:
    stored, scales = by_blocks(E4M3)(weight)
    powers = torch.exp2(torch.log2(scales).ceil())
    values = stored.float() * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)[: len(weight), : weight.shape[1]]
    spread = powers.repeat_interleave(32, 0).repeat_interleave(32, 1)[: len(weight), : weight.shape[1]]
    return (values / spread).to(E4M3), powers.to(torch.float8_e8m0fnu)


CASES: dict[str, tuple[dict[str, Any], str, Callable[[torch.Tensor], Stored], float]] = {
    # settings, name of the scales, how to store a weight, its largest relative error
    "fp8, blocks": (FP8, "weight_scale_inv", by_blocks(E4M3), 2**-4),
    "fp8 e5m2, blocks": (FP8, "weight_scale_inv", by_blocks(E5M2), 2**-3),
    "fp8, blocks with powers of two": (FP8 | {"scale_fmt": "ue8m0"}, "weight_scale_inv", powers_of_two, 2**-3),
    "fp8, one scale": (PER_TENSOR, "weight_scale", whole, 2**-4),
    "fbgemm_fp8, rows": ({"quant_method": "fbgemm_fp8"}, "weight_scale", by_rows_float8, 2**-4),
    "compressed-tensors, fp8 rows": (
        compressed("float-quantized", type="float"),
        "weight_scale",
        by_rows_float8,
        2**-4,
    ),
    "compressed-tensors, fp8 blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[32, 32]),
        "weight_scale",
        by_blocks(E4M3),
        2**-4,
    ),
    "compressed-tensors, int8 rows": (compressed("int-quantized", type="int"), "weight_scale", by_rows, 2**-4),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # 160 and 80 are no multiples of a block in the one direction or the other.
    return tiny_checkpoint(
        tmp_path / "model", transformers.LlamaConfig(**sizes(hidden_size=80, head_dim=16, intermediate_size=160))
    )


def scale_down(
    folder: Path,
    settings: dict[str, Any],
    part: str,
    store: Callable[[torch.Tensor], Stored],
    chosen: str = r"_proj\.weight$",
) -> dict[str, Stored]:
    """Store a checkpoint's projections in 8 bits, in place; the LM head stays. Returns them by their names."""
    weights = load_file(folder / "model.safetensors")
    stored = {name: store(weights[name]) for name in weights if re.search(chosen, name)}
    for name, (weight, scale) in stored.items():
        weights[name] = weight
        weights[f"{name.removesuffix('.weight')}.{part}"] = scale.contiguous()
        weights[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor(0.1)
    save_file(weights, folder / "model.safetensors")
    configure(folder, settings)
    return stored


def configure(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def reader(checkpoint: Path) -> WeightReader:
    opened = Checkpoint.open(resolve(str(checkpoint)))
    return opened.weights(check_architecture(opened.config))


def number(stored: Stored, row: int, column: int) -> float:
    """One number of a weight, from the definition."""
    weight, scale = stored
    factors = scale.float()
    if factors.dim() < 2:
        factor = factors.reshape(-1)[0]
    elif factors.shape[1] == 1 and len(factors) == len(weight):
        factor = factors[row, 0]
    else:
        factor = factors[row // 32, column // 32]
    return float(weight[row, column].float() * factor)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_the_numbers_stand_for(name: str, model: Path) -> None:
    settings, part, store, error = CASES[name]
    original = load_file(model / "model.safetensors")
    stored = scale_down(model, settings, part, store)
    weights = reader(model)
    assert len(stored) == 14
    for parameter, numbers in stored.items():
        read = weights.read(parameter)
        assert weights.packed(parameter) is None
        assert weights.shape(parameter) == tuple(read.shape) == tuple(original[parameter].shape)
        rows, columns = read.shape
        for row, column in ((0, 0), (rows - 1, columns - 1), (rows - 1, 31), (31, 33), (rows // 2, columns // 2)):
            assert float(read[row, column]) == pytest.approx(number(numbers, row, column), rel=1e-6)
        assert (read - original[parameter]).abs().max() <= error * original[parameter].abs().max()


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_they_are_exported_in_any_precision(precision: str, model: Path) -> None:
    settings, part, store, _ = CASES["fp8, blocks"]
    scale_down(model, settings, part, store)
    weights = reader(model)
    export_bundle(resolve(str(model)), None, model.parent / "bundle", precision=precision, quality=False)
    bundle = Bundle.open(model.parent / "bundle")
    assert bundle.manifest.target.prequantized is None
    assert check_bundle(bundle).passed
    if precision == "fp32":
        for name, tensor in stored_weights(bundle.root / "target/model.onnx").items():
            torch.testing.assert_close(tensor, weights.read(name), rtol=0, atol=0)


def test_experts_are_stacked_as_what_their_numbers_stand_for(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", transformers.MixtralConfig(**sizes(num_local_experts=2)))
    names = [f"model.layers.1.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    plain = [reader(folder).read(name) for name in names]
    settings, part, store, error = CASES["fp8, blocks"]
    stored = scale_down(folder, settings, part, store, r"\.experts\.\d+\.w[123]\.weight$")
    assert len(stored) == 2 * 2 * 3
    weights = reader(folder)
    for name, original in zip(names, plain, strict=True):
        assert weights.shape(name) == tuple(original.shape)
        assert 0 < (weights.read(name) - original).abs().max() <= error * original.abs().max()
    one = stored["model.layers.1.block_sparse_moe.experts.1.w2.weight"]
    assert float(weights.read(names[1])[1, 40, 70]) == pytest.approx(number(one, 40, 70), rel=1e-6)
    assert weights.packed(names[1]) is None
    numbers = load_file(folder / "model.safetensors")
    numbers["model.layers.1.block_sparse_moe.experts.1.w2.weight"] = torch.zeros(2, 3, 4).to(E4M3)
    save_file(numbers, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.1.w2.weight' is stored in 8 bits with the shape \(2, 3, 4\)"):
        reader(folder).shape(names[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (FP8 | {"weight_block_size": [32]}, r"weight_block_size in its quantization_config is \[32\]"),
        (FP8 | {"weight_block_size": [32, 0]}, "expected two positive numbers"),
        (FP8 | {"expert_dtype": "fp4"}, "its experts are stored as 'fp4'"),
        (FP8 | {"weight_block_size": [64, 64]}, r"scales of shape \(2, 3\); expected one, .* block of 64 x 64"),
        (compressed("pack-quantized", num_bits=4), "format pack-quantized with 4 bits; expected float-quantized"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format nvfp4-pack-quantized"),
        (compressed("int-quantized", symmetric=False), "with zero points"),
        (compressed("int-quantized", num_bits=[8]), r"num_bits in its quantization_config is \[8\]; expected a whole"),
        (compressed("int-quantized", block_structure=5), "block_structure in its quantization_config is 5; expected"),
        (compressed("int-quantized", block_structure=[[1], 2]), r"block_structure .* is \[\[1\], 2\]; expected two"),
        (
            COMPRESSED | {"config_groups": {"a": {"weights": "x"}}},
            "weights in its .* is 'x'; expected settings by name",
        ),
        (COMPRESSED | {"config_groups": {"a": 1}}, "a in its quantization_config is 1; expected the settings"),
        (COMPRESSED | {"config_groups": [1]}, r"config_groups in its quantization_config is \[1\]"),
        ({"quant_method": "compressed-tensors"}, "format None"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' in config.json"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "Expected gptq, awq, fp8, fbgemm_fp8 or compressed"),
    ],
)
def test_other_storage_is_refused(model: Path, settings: dict[str, Any], message: str) -> None:
    scale_down(model, FP8, "weight_scale_inv", by_blocks(E4M3))
    configure(model, settings)
    with pytest.raises(CheckpointError, match=message):
        reader(model).read("model.layers.0.self_attn.q_proj.weight")


NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale_inv": None}, f"'{NAME}.weight' is stored in 8 bits .* with no tensor of scales"),
        (
            {"weight_scale_inv": torch.ones(2, 3, dtype=torch.uint8)},
            r"weight_scale_inv' are stored as U8: expected one",
        ),
        ({"weight_scale_inv": torch.ones(2, 3, dtype=torch.int32)}, r"weight_scale_inv' are stored as I32: expected"),
        ({"weight_scale": torch.ones(1)}, "with two tensors of scales"),
        ({"weight_scale_inv": torch.full((2, 3), float("inf"))}, f"scales of '{NAME}' hold NaN"),
        ({"weight_scale_inv": torch.ones(7)}, r"64 x 80 with scales of shape \(7,\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    model: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    scale_down(model, FP8, "weight_scale_inv", by_blocks(E4M3))
    weights: dict[str, torch.Tensor | None] = {**load_file(model / "model.safetensors")}
    weights |= {f"{NAME}.{part}": tensor for part, tensor in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reader(model).read(f"{NAME}.weight")
    if "NaN" not in message:  # what headers tell is told before anything is read
        with pytest.raises(CheckpointError, match=message):
            reader(model).shape(f"{NAME}.weight")
