"""The flavour `trt`: its graphs, and that they are torch on the same weights, in ONNX Runtime's CPU provider."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from prequantized import gptq, quantized_checkpoint
from safetensors.torch import load_file
from tiny import sizes, tiny_checkpoint

import paceline
from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline_export.causal_lm import trace
from paceline_export.export import export_bundle
from paceline_export.flavors import FLAVORS, find_flavor
from paceline_export.parity import ParityReport, check_bundle, stored_weights
from paceline_export.passes.static_length import IN_PIECES, set_static_length
from paceline_export.quantize.blockwise import dequantize, quantize
from paceline_export.quantize.rows import quantize_rows
from paceline_export.source import resolve

TRT = FLAVORS["trt"]


def export(checkpoint: Path, name: str, draft: Path | None = None, **options: Any) -> Bundle:
    out = checkpoint.parent / name
    defaults: dict[str, Any] = {"flavor": "trt", "precision": "fp16", "calibration": "none", "quality": False}
    source = None if draft is None else resolve(str(draft))
    export_bundle(resolve(str(checkpoint)), source, out, **(defaults | options))
    return Bundle.open(out, verify_hashes=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama") / "model", transformers.LlamaConfig(**sizes()))


@pytest.fixture(scope="module")
def plain(llama: Path) -> Bundle:
    """A single model in fp16."""
    return export(llama, "fp16", max_length=128)


@pytest.fixture
def pair(tiny_few_bits: Path) -> Bundle:
    return Bundle.open(tiny_few_bits, verify_hashes=True)


def graph_of(bundle: Bundle, which: str = "target") -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.load(bundle.root / which / "model.onnx", load_external_data=False)
    return model


def test_inputs_and_outputs_are_those_of_the_contract(plain: Bundle) -> None:
    entry, graph = plain.manifest.target, graph_of(plain).graph
    assert (entry.flavor, entry.precision, entry.kv_dtype, entry.max_length) == ("trt", "fp16", "float16", 128)
    past = ("float16", ("batch", 2, 128, 16))
    found = {spec.name: (spec.dtype, spec.shape) for spec in entry.inputs}
    assert found == {
        "input_ids": ("int64", ("batch", "rows")),
        "write_indices": ("int64", ("batch",)),
        "logits_indices": ("int64", ("batch", "num_logits")),
        **{f"past_key_values.{i}.{part}": past for i in (0, 1) for part in ("key", "value")},
    }
    assert {spec.name: (spec.dtype, spec.shape) for spec in entry.outputs} == {
        "logits": ("float32", ("batch", "num_logits", 272)),
        **{f"present.{i}.{part}": past for i in (0, 1) for part in ("key", "value")},
    }
    for specs, values in ((entry.inputs, graph.input), (entry.outputs, graph.output)):
        shapes = [tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim) for value in values]
        assert [(spec.name, spec.shape) for spec in specs] == list(
            zip((value.name for value in values), shapes, strict=True)
        )


def test_operators_are_standard_ones_and_the_mask_is_made_once(plain: Bundle) -> None:
    model = graph_of(plain)
    onnx.checker.check_model(str(plain.root / "target/model.onnx"), full_check=True)
    assert [(opset.domain, opset.version) for opset in model.opset_import if opset.domain == ""] == [("", 24)]
    assert {node.domain for node in model.graph.node} == {""}
    ops = collections.Counter(node.op_type for node in model.graph.node)
    assert (ops["Attention"], ops["TensorScatter"], ops["RotaryEmbedding"], ops["RMSNormalization"]) == (2, 4, 4, 5)
    assert ops["Where"] == 1
    attention = [node for node in model.graph.node if node.op_type == "Attention"]
    (mask,) = {node.input[3] for node in attention}
    (concat,) = (node for node in model.graph.node if mask in node.output)
    (where,) = (node for node in model.graph.node if concat.input[0] in node.output)
    assert (concat.op_type, where.op_type) == ("Concat", "Where")
    assert list(concat.input) == [where.output[0]] * 2  # once for each head that shares keys and values
    assert all(attribute.name == "scale" for node in attention for attribute in node.attribute)


PHASES = ["prefill", "single steps", "verification", "after rollback"]
BATCH = ["batch: prefill", "batch: single step", "batch: verification", "batch: after rollback"]


def passes(bundle: Bundle) -> ParityReport:
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]
    for model in report.models:
        assert [phase.name for phase in model.phases] == PHASES + BATCH
        assert [phase.rows for phase in model.phases] == [64, 4, 5, 5, 12, 3, 15, 15]
        assert model.arithmetic == "fp8" or all(phase.max_logit_diff < 0.1 for phase in model.phases)
    return report


def test_layers_with_windows_share_masks_by_their_width(tmp_path: Path) -> None:
    """Gemma 3 rotates layers with windows otherwise, too, and computes its norms in float32."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **sizes(head_dim=16, num_hidden_layers=3, sliding_window=16, layer_types=kinds, tie_word_embeddings=False)
    )
    bundle = export(tiny_checkpoint(tmp_path / "model", config), "bundle", max_length=128)
    masks = [node.input[3] for node in graph_of(bundle).graph.node if node.op_type == "Attention"]
    assert masks[0] == masks[2] != masks[1]
    passes(bundle)


def test_a_pair_of_few_bits_is_torch_on_its_own_weights(pair: Bundle) -> None:
    passes(pair)


def test_eight_bits_are_torch_on_their_own_weights(tiny_int8: Path) -> None:
    passes(Bundle.open(tiny_int8))


def test_bfloat16_is_compared_in_float16_and_says_so(plain: Bundle, tiny_bf16: Path) -> None:
    for bundle, note in ((plain, False), (Bundle.open(tiny_bf16), True)):
        (model,) = passes(bundle).models
        assert model.arithmetic == "fp16"
        assert ("compared in float16" in str(model.note)) is note


def _strictly_before(model: ir.Model) -> None:
    for node in model.graph:
        if node.op_type == "LessOrEqual":
            node.op_type = "Less"


def _seen_by_all(model: ir.Model) -> None:
    (where,) = (node for node in model.graph if node.op_type == "Where")
    where.replace_input_with(2, where.inputs[1])


def _scores(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.5)


def _first_index_for_all(model: ir.Model) -> None:
    first = ir.tensor(np.array([0]), name="first")
    model.graph.initializers["first"] = ir.Value(name="first", const_value=first, type=ir.TensorType(first.dtype))
    model.graph.initializers["first"].shape = ir.Shape([1])
    (indices,) = (value for value in model.graph.inputs if value.name == "write_indices")
    gather = ir.node("Gather", [indices, model.graph.initializers["first"]], {"axis": 0})
    shape = ir.node("Shape", [indices])
    expand = ir.node("Expand", [gather.outputs[0], shape.outputs[0]])
    model.graph.insert_before(next(iter(model.graph)), [gather, shape, expand])
    for node in model.graph:
        if node.op_type == "TensorScatter":
            node.replace_input_with(2, expand.outputs[0])


def _first_rows(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "RotaryEmbedding")
    zero = ir.node("Sub", [node.inputs[3], node.inputs[3]])
    model.graph.insert_before(node, zero)
    node.replace_input_with(3, zero.outputs[0])


@pytest.mark.parametrize("plant", [_strictly_before, _seen_by_all, _scores, _first_index_for_all, _first_rows])
def test_the_check_finds_a_planted_fault(plant: Callable[[ir.Model], None], plain: Bundle, tmp_path: Path) -> None:
    model = ir.load(plain.root / "target/model.onnx")
    plant(model)
    (tmp_path / "target").mkdir()
    ir.save(model, tmp_path / "target/model.onnx", external_data="model.onnx.data")
    for name in ("tokenizer.json", "target/config.json"):
        (tmp_path / name).write_bytes((plain.root / name).read_bytes())
    report = check_bundle(Bundle(tmp_path, plain.manifest))
    assert not report.passed
    if plant is _first_index_for_all:  # which one text cannot show
        assert "batch: " in str(report.models[0].reason)


def test_int4_is_stored_in_symmetric_blocks_and_attention_in_rows_of_eight_bits(tmp_path: Path) -> None:
    """The blocks of 64 hold the scales of blocks of 128, the last of which is padded."""
    config = transformers.LlamaConfig(**sizes(hidden_size=192, head_dim=16, intermediate_size=320))
    checkpoint = tiny_checkpoint(tmp_path / "model", config)
    bundle = export(checkpoint, "bundle", precision="int4")
    stored, original = stored_weights(bundle.root / "target/model.onnx"), load_file(checkpoint / "model.safetensors")
    projections = [name for name in stored if name.endswith("_proj.weight")]
    attention = {name for name in projections if ".self_attn." in name}
    assert (len(projections), len(attention)) == (14, 8)
    assert bundle.manifest.target.mixed_bits == dict.fromkeys(attention, 8)
    for name in projections:
        if name in attention:
            expected = quantize_rows(original[name])
        else:
            expected = quantize(original[name], bits=4, block_size=128, symmetric=True)
        torch.testing.assert_close(stored[name], torch.from_numpy(dequantize(expected)), rtol=2**-11, atol=0)
    assert bundle.manifest.target.block_size == 128  # of most that have 4 bits
    graph = graph_of(bundle).graph
    initializers = {value.name: value for value in graph.initializer}
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and "_proj" in node.input[0]:
            levels, scales = (initializers[name] for name in node.input)
            found = {attribute.name: attribute.i for attribute in node.attribute}
            if "self_attn" in node.input[0]:
                assert (levels.data_type, found) == (onnx.TensorProto.INT8, {"axis": 0})
                assert list(scales.dims) == [levels.dims[0]]
            else:
                assert (levels.data_type, found) == (onnx.TensorProto.INT4, {"axis": 1, "block_size": 64})
                assert scales.dims[1] * 64 == levels.dims[1]


def test_the_calibration_stores_what_the_flavour_can_hold(llama: Path) -> None:
    """Whatever it chooses, TensorRT reads it: no zero points, and 8 bits by rows."""
    bundle = export(llama, "gptq", precision="int4", calibration="gptq", max_length=128)
    assert bundle.manifest.target.calibration == "gptq"
    assert set((bundle.manifest.target.mixed_bits or {}).values()) == {8}
    rounded = export(llama, "rounded", precision="int4", max_length=128)
    values, others = (stored_weights(each.root / "target/model.onnx") for each in (bundle, rounded))
    for name in values:
        same = torch.equal(values[name], others[name])
        assert same is not (name.endswith("_proj.weight") and ".mlp." in name), name
    passes(bundle)


def test_eight_bits_have_one_positive_scale_a_row(pair: Bundle) -> None:
    graph = graph_of(pair).graph
    (table,) = (node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    (dequantized,) = (node for node in graph.node if table.input[0] in node.output)
    model = onnx.load(pair.root / "target/model.onnx")
    values = {value.name: value for value in model.graph.initializer if value.name in dequantized.input}
    levels, scales = (onnx.numpy_helper.to_array(values[name]) for name in dequantized.input)
    assert levels.dtype == np.int8
    assert (levels.shape, scales.shape) == ((272, 128), (272,))
    assert levels.min() >= -127
    assert scales.min() > 0


def test_the_runtime_runs_it_and_drafting_changes_nothing(pair: Bundle) -> None:
    decoder = paceline.load(pair.root)
    texts = []
    for drafted in (0, 1, 3):
        generation = decoder.generate([5, 6, 7], max_new_tokens=24, num_draft_tokens=drafted)
        list(generation)
        texts.append(generation.token_ids)
    assert texts[0] == texts[1] == texts[2]
    assert generation.stats.proposed > generation.stats.accepted > 0


def test_the_runtime_refuses_what_its_provider_cannot_bind(tiny_bf16: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"computes in bfloat16, which .*\. Export it with fp16"):
        paceline.load(tiny_bf16)


def test_a_cache_as_long_as_the_graph_says_serves_any_shorter_text(plain: Bundle) -> None:
    decoder = paceline.load(plain.root)
    assert decoder.target.max_length == 128
    generation = decoder.generate([5] * 100, max_new_tokens=100)
    list(generation)
    assert len(generation.token_ids) <= 28


@pytest.mark.parametrize("length", [0, 129])
def test_a_graph_cannot_be_lengthened(length: int, plain: Bundle) -> None:
    with pytest.raises(InvalidInputError, match=rf"length of {length} positions .* exported for 1 to 128"):
        set_static_length(ir.load(plain.root / "target/model.onnx"), length)


def test_a_flavour_says_which_precisions_it_has() -> None:
    assert {name: list(flavor.precisions) for name, flavor in FLAVORS.items()} == {
        "ort": ["fp32", "fp16", "int8", "int4"],
        "cuda": ["fp16", "int8", "int4"],
        "trt": ["fp16", "bf16", "fp8", "int8", "int4"],
    }
    with pytest.raises(
        InvalidInputError,
        match=r"precision='fp32' is none .* of the flavour trt have: expected one of fp16, bf16, fp8, int8, int4",
    ):
        find_flavor("trt").weight_format("fp32")
    with pytest.raises(InvalidInputError, match="Unknown flavour 'x': expected one of ort, cuda, trt"):
        find_flavor("x")


def test_a_precision_of_another_flavour_is_refused_before_any_work(llama: Path, tmp_path: Path) -> None:
    for options in ({"precision": "fp32"}, {"flavor": "ort", "precision": "bf16"}, {"flavor": "x"}):
        with pytest.raises(InvalidInputError, match="expected one of"):
            export_bundle(resolve(str(llama)), None, tmp_path / "bundle", **({"flavor": "trt"} | options))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_its_attention_cannot_express_is_done_in_pieces() -> None:
    capped = transformers.Gemma2Config(**sizes(head_dim=16, sliding_window=16, attn_logit_softcapping=5.0))
    model = trace(capped, max_length=64, dtype="float16", flavor=TRT).model
    TRT.finish(model)
    assert model.metadata_props[IN_PIECES] == "2"
    graph = model.graph
    found = collections.Counter(node.op_type for node in graph)
    assert (found["Attention"], found["Softmax"], found["Tanh"]) == (0, 2, 3)  # the last bounds the logits
    softmax = [node for node in graph if node.op_type == "Softmax"]
    assert {node.outputs[0].dtype for node in softmax} == {ir.DataType.FLOAT}


def test_what_tensorrt_cannot_express_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 72 columns in blocks of 128, but TensorRT reads 4 bits in blocks"):
        TRT.weights.quantize("x", torch.ones(4, 72), bits=4, block_size=128, symmetric=True)
    checkpoint = tiny_checkpoint(tmp_path / "zeros", transformers.LlamaConfig(**sizes()))
    quantized_checkpoint(checkpoint, {"quant_method": "gptq"}, gptq)
    with pytest.raises(CheckpointError, match=r"proj.weight' .* cannot be kept as it is: it has zero points"):
        export(checkpoint, "bundle", precision="int4")
    assert not (tmp_path / "bundle").exists()


def test_symmetric_numbers_of_a_checkpoint_are_kept(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes(intermediate_size=128)))
    settings = {"quant_method": "gptq", "desc_act": True}
    projections = quantized_checkpoint(checkpoint, settings, gptq, symmetric=True, act_order=True)
    bundle = export(checkpoint, "bundle", precision="int4")
    stored = stored_weights(bundle.root / "target/model.onnx")
    for module, projection in projections.items():
        np.testing.assert_array_equal(stored[f"{module}.weight"].numpy(), projection.values())
    assert bundle.manifest.target.prequantized == "gptq"
    passes(bundle)


def test_a_manifest_of_another_flavour_is_not_read(plain: Bundle) -> None:
    text = dataclasses.replace(plain.manifest).to_json().replace('"flavor": "trt"', '"flavor": "mlx"')
    with pytest.raises(
        paceline.PacelineError, match=r"target\.flavor is 'mlx'; this paceline knows 'ort', 'cuda', 'trt'"
    ):
        paceline.bundle.Manifest.from_json(text)
