"""Checkpoints that GPTQ or AWQ quantised keep their numbers, bit for bit, and say what cannot be kept."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from prequantized import awq, gptq, quantized_checkpoint
from safetensors.torch import load_file, save_file
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, stored_weights
from paceline_export.source import resolve
from paceline_export.weight_reader import WeightReader

GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "version": "gemm", "zero_point": True}
gptq_v2 = functools.partial(gptq, offset=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**sizes(intermediate_size=160))
    return tiny_checkpoint(tmp_path / "model", config)


def export(checkpoint: Path, precision: str = "int4", **options: Any) -> Bundle:
    export_bundle(resolve(str(checkpoint)), None, checkpoint.parent / "bundle", precision=precision, **options)
    return Bundle.open(checkpoint.parent / "bundle")


def nodes(bundle: Bundle) -> dict[str, onnx.NodeProto]:
    """Nodes of few-bit products by the names of their weights."""
    graph = onnx.load(bundle.root / "target/model.onnx", load_external_data=False).graph
    return {node.input[1].removesuffix(".q"): node for node in graph.node if node.op_type == "MatMulNBits"}


def attributes(node: onnx.NodeProto) -> dict[str, int]:
    return {attribute.name: attribute.i for attribute in node.attribute}


CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "gptq": (GPTQ, gptq, {}),
    "gptq, symmetric": (GPTQ, gptq, {"symmetric": True}),
    "gptq, second format": (GPTQ_V2, gptq_v2, {}),
    "gptq, 8 bits": (GPTQ, gptq, {"bits": 8, "size": 64}),
    "gptq, 8 bits, symmetric": (GPTQ, gptq, {"bits": 8, "symmetric": True}),
    "gptq, groups of 16": (GPTQ, gptq, {"size": 16}),
    "gptq, groups of 128, the last one not full": (GPTQ, gptq, {"size": 128}),
    "gptq, groups of 48, in three blocks": (GPTQ, gptq, {"size": 48}),
    "gptq, one group": (GPTQ, gptq, {"size": -1}),
    "gptq, activation order": (GPTQ | {"desc_act": True}, gptq, {"act_order": True}),
    "gptq, activation order, 8 bits, one group not full": (
        GPTQ | {"desc_act": True},
        gptq,
        {"act_order": True, "bits": 8, "size": 128},
    ),
    "gptq, some projections in 8 bits": (GPTQ | {"dynamic": {}}, gptq, {"other_bits": ("down_proj",)}),
    "awq": (AWQ, awq, {}),
    "awq, symmetric": (AWQ, awq, {"symmetric": True, "size": 64}),
}


def reader(checkpoint: Path) -> WeightReader:
    opened = Checkpoint.open(resolve(str(checkpoint)))
    return opened.weights(check_architecture(opened.config))


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_the_checkpoint_are_kept(name: str, model: Path) -> None:
    settings, pack, options = CASES[name]
    projections = quantized_checkpoint(model, settings, pack, **options)
    weights = reader(model)
    for module, projection in projections.items():
        packed = weights.packed(f"{module}.weight")
        assert packed is not None
        assert packed.weight.bits == projection.bits
        assert (packed.weight.zero_points is None) == options.get("symmetric", False)  # in the middle they need no room
        assert weights.shape(f"{module}.weight") == projection.levels.shape
        np.testing.assert_array_equal(weights.read(f"{module}.weight").numpy(), projection.values())


@pytest.mark.parametrize(
    "name",
    [
        "gptq, groups of 48, in three blocks",
        "gptq, activation order, 8 bits, one group not full",
        "gptq, some projections in 8 bits",
        "awq",
    ],
)
def test_the_graph_is_torch_on_the_numbers_of_the_checkpoint(name: str, model: Path) -> None:
    settings, pack, options = CASES[name]
    projections = quantized_checkpoint(model, settings, pack, **options)
    bundle = export(model, f"int{options.get('bits', 4)}")
    stored = stored_weights(bundle.root / "target/model.onnx")
    for module, projection in projections.items():
        np.testing.assert_array_equal(stored[f"{module}.weight"].numpy(), projection.values())
        assert attributes(nodes(bundle)[f"{module}.weight"])["bits"] == projection.bits
    report = check_bundle(bundle)
    assert report.passed, [parity.reason for parity in report.models]
    target = bundle.manifest.target
    assert target.prequantized == settings["quant_method"]
    if (size := options.get("size", 32)) in (16, 32, 64):  # most projections have 64 columns
        assert target.block_size == size


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_wider_precisions_hold_the_values_that_the_numbers_stand_for(precision: str, model: Path) -> None:
    projections = quantized_checkpoint(model, GPTQ | {"desc_act": True}, gptq, act_order=True)
    bundle = export(model, precision)
    stored = stored_weights(bundle.root / "target/model.onnx")
    for module, projection in projections.items():
        expected = projection.values()
        if precision == "fp16":
            expected = expected.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(stored[f"{module}.weight"].numpy(), expected)
    assert check_bundle(bundle).passed


def test_projections_in_activation_order_share_one_gathered_input(model: Path) -> None:
    quantized_checkpoint(model, GPTQ | {"desc_act": True}, gptq, act_order=True)
    graph = onnx.load(export(model).root / "target/model.onnx", load_external_data=False).graph
    orders = [initializer.name for initializer in graph.initializer if initializer.name.endswith(".order")]
    assert len(orders) == 2 * 4  # of each layer: q, k, v; o; gate, up; down


def test_what_the_checkpoint_leaves_out_is_stored_in_8_bits(model: Path) -> None:
    original = load_file(model / "model.safetensors")
    settings = AWQ | {"modules_to_not_convert": ["o_proj"]}
    projections = quantized_checkpoint(model, settings, awq, left_out=("o_proj",))
    bundle = export(model, block_size=64)
    products = nodes(bundle)
    left_out = {"lm_head.weight", *(f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2))}
    assert set(products) == left_out | {f"{module}.weight" for module in projections}
    stored = stored_weights(bundle.root / "target/model.onnx")
    for name in left_out:
        assert (attributes(products[name])["bits"], attributes(products[name])["block_size"]) == (8, 64)
        torch.testing.assert_close(stored[name], original[name], rtol=0, atol=float(original[name].abs().max()) / 200)


@pytest.mark.parametrize(("bits", "precision", "mend"), [(4, "int8", "int4"), (8, "int4", "int8")])
def test_a_precision_that_would_quantise_anew_is_refused(model: Path, bits: int, precision: str, mend: str) -> None:
    quantized_checkpoint(model, GPTQ, gptq, bits=bits)
    with pytest.raises(InvalidInputError, match=f"Precision {precision} would quantise anew .*expected {mend}, which"):
        export(model, precision)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "quanto"}, "'quanto' in config.json.*Expected gptq, awq, fp8"),
        ({"quant_method": None}, "Expected gptq, awq, fp8"),
        ({"bits": 3}, "with 3 bits .*expected 4 or 8 bits"),
        ({"bits": True}, "with True bits"),
        ({"checkpoint_format": "marlin"}, "layout 'marlin'; expected .* the layout gptq or gptq_v2"),
        ({"is_marlin_format": True}, "layout 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "layout 'gemv'; expected 4 bits and the layout gemm"),
        ({"quant_method": "awq", "bits": 8}, "expected 4 bits"),
        ({"group_size": 0}, "group_size in its quantization_config is 0"),
    ],
)
def test_other_quantised_checkpoints_are_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    quantized_checkpoint(model, GPTQ | changes, gptq)
    with pytest.raises(CheckpointError, match=message):
        export(model)


MODULE = "model.layers.0.mlp.down_proj"  # [64, 160]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qzeros", None, f"not '{MODULE}.qzeros'"),
        ("qweight", None, f"is incomplete: it holds no tensor '{MODULE}.qweight', though it holds '{MODULE}.qzeros'"),
        ("qweight", lambda t: t[:-1], "parts that do not go together"),
        ("qweight", lambda t: t.to(torch.int64), "stored as I64: expected one of I32"),
        ("scales", lambda t: t[:-1], "parts that do not go together"),
        ("scales", lambda t: t.to(torch.int32), "stored as I32: expected one of F64"),
        ("scales", lambda t: t * float("inf"), "scales' holds NaN or infinite"),
        ("g_idx", lambda t: t.clamp(max=3), "5 groups of different sizes"),
        ("g_idx", lambda t: t + 1, "5 groups of different sizes"),
        ("qzeros", lambda t: torch.full_like(t, -1), "holds the zero point 15 less 1"),
    ],
)
def test_parts_that_make_no_weight_are_refused_by_name(model: Path, part: str, change: Any, message: str) -> None:
    quantized_checkpoint(model, GPTQ, gptq)
    weights = load_file(model / "model.safetensors")
    tensor = weights.pop(f"{MODULE}.{part}")
    if change is not None:
        weights[f"{MODULE}.{part}"] = change(tensor).contiguous()
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        reader(model).read(f"{MODULE}.weight")


@pytest.mark.parametrize("empty", [True, False])
def test_activation_order_without_an_index_is_refused(model: Path, empty: bool) -> None:
    def without(projection: Any) -> dict[str, torch.Tensor]:
        parts = gptq(projection)
        index = parts.pop("g_idx")
        return parts | {"g_idx": index[:0]} if empty else parts

    quantized_checkpoint(model, GPTQ | {"desc_act": True}, without, act_order=True)
    with pytest.raises(CheckpointError, match="has no g_idx, but desc_act"):
        export(model)


def test_a_projection_held_twice_is_refused(model: Path) -> None:
    quantized_checkpoint(model, GPTQ, gptq)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {f"{MODULE}.weight": torch.zeros(64, 160)}, model / "model.safetensors")
    with pytest.raises(CheckpointError, match="both plainly and quantised"):
        export(model)


def test_the_manifest_says_the_block_size_that_is_stored(model: Path) -> None:
    quantized_checkpoint(model, GPTQ | {"group_size": 128}, gptq)  # the index says groups of 32
    assert export(model).manifest.target.block_size == 32


@pytest.mark.parametrize("size", [20, 40])
def test_groups_that_no_blocks_make_up_are_refused(model: Path, size: int) -> None:
    quantized_checkpoint(model, GPTQ, gptq, size=size)
    with pytest.raises(CheckpointError, match=f"groups of {size} columns"):
        reader(model).packed(f"{MODULE}.weight")


def test_without_an_index_columns_are_grouped_in_turn(model: Path) -> None:
    projections = quantized_checkpoint(
        model, GPTQ, lambda p: {part: tensor for part, tensor in gptq(p).items() if part != "g_idx"}
    )
    weights = reader(model)
    for module, projection in projections.items():
        np.testing.assert_array_equal(weights.read(f"{module}.weight").numpy(), projection.values())
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="columns in groups of 64"):
        reader(model).packed(f"{MODULE}.weight")
