"""Tracing: what graphs look like; what each architecture computes is in `test_architectures.py`."""

from __future__ import annotations

import collections
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from tiny import sizes
from transformers import masking_utils

from paceline.errors import CheckpointError
from paceline_export.attention import _mask
from paceline_export.causal_lm import check_architecture, trace
from paceline_export.passes.norms import fuse_residual_norms
from paceline_export.passes.reshapes import drop_reshape_pairs
from paceline_export.rotation import fixed_positions


def ops(model: Any) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph)


def test_inputs_and_outputs_are_those_of_the_contract() -> None:
    graph = trace(transformers.Qwen2Config(**sizes()), max_length=64).model.graph
    inputs = {value.name: [str(size) for size in value.shape] for value in graph.inputs}
    past = ["batch", "2", "max_length", "16"]
    assert inputs == {
        "input_ids": ["batch", "rows"],
        "seqlens_k": ["batch"],
        "total_sequence_length": [],
        "logits_indices": ["num_logits"],
        **{f"past_key_values.{i}.{part}": past for i in (0, 1) for part in ("key", "value")},
    }
    outputs = {value.name: [str(size) for size in value.shape] for value in graph.outputs}
    assert outputs == {
        "logits": ["batch", "num_logits", "272"],
        **{f"present.{i}.{part}": past for i in (0, 1) for part in ("key", "value")},
    }


def test_norms_are_fused_and_reshapes_cancel() -> None:
    model = trace(transformers.LlamaConfig(**sizes()), max_length=64).model
    assert ops(model)["SimplifiedLayerNormalization"] == 5  # two a layer and the last
    assert fuse_residual_norms(model) == 4
    assert drop_reshape_pairs(model) == 8  # query, key, value and output of both layers
    found = ops(model)
    assert found["SkipSimplifiedLayerNormalization"] == 4
    assert found["SimplifiedLayerNormalization"] == 1
    assert found["GroupQueryAttention"] == 2
    assert found["Reshape"] == found["Pow"] == found["ReduceMean"] == 0


@pytest.mark.parametrize("epsilon", [1e-5, 1e-8, 1e-12])
def test_no_epsilon_is_too_small_to_stay(epsilon: float) -> None:
    """Without it, an all-zero embedding becomes NaN; on other tokens nothing shows."""
    model = trace(transformers.LlamaConfig(**sizes(rms_norm_eps=epsilon)), max_length=64).model
    norms = [node for node in model.graph if node.op_type == "SimplifiedLayerNormalization"]
    assert [node.attributes["epsilon"].as_float() for node in norms] == [pytest.approx(epsilon)] * 5


def test_the_lm_head_runs_for_the_wanted_rows_only() -> None:
    graph = trace(transformers.LlamaConfig(**sizes()), max_length=64).model.graph
    head = graph.outputs[0].producer()
    assert head.op_type == "MatMul"
    assert str(head.inputs[0].shape[1]) == "num_logits"


def test_weights_have_the_names_of_the_checkpoint_and_no_values() -> None:
    traced = trace(transformers.LlamaConfig(**sizes()), max_length=64)
    names = set(traced.model.graph.initializers)
    assert {"model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight", "rotary.cos"} <= names
    assert traced.model.graph.initializers["lm_head.weight"].const_value is None
    assert traced.embedding == "model.embed_tokens.weight"


def test_a_trace_is_made_once_and_each_caller_has_a_graph_of_its_own() -> None:
    """A pair may be one checkpoint in two precisions; what a pass does to one graph must not reach the other."""
    configs = [transformers.LlamaConfig(**sizes(), name_or_path=path) for path in ("here", "there")]
    first, second = (trace(config, max_length=64) for config in configs)
    assert ir.to_proto(first.model) == ir.to_proto(second.model)
    for node in list(first.model.graph):
        node.attributes.clear()
    first.model.graph.initializers["lm_head.weight"].name = "other"
    first.constants.clear()
    assert first.model is not second.model
    third = trace(configs[0], max_length=64)
    assert ir.to_proto(third.model) == ir.to_proto(second.model)
    assert third.constants.keys() == second.constants.keys() != set()
    assert trace(configs[0], max_length=96).constants["rotary.cos"].shape[0] == 96
    assert trace(configs[0], max_length=64, dtype="float16").model.graph.inputs[-1].dtype == ir.DataType.FLOAT16


def test_a_graph_names_no_file_of_the_machine_that_traced_it() -> None:
    graph = ir.to_proto(trace(transformers.LlamaConfig(**sizes()), max_length=64).model).SerializeToString()
    assert b".py" not in graph
    assert b"aten.mul" in graph  # `namespace`, by which viewers group nodes


def test_a_sliding_window_reaches_the_operator() -> None:
    config = transformers.MistralConfig(**sizes(sliding_window=8))
    nodes = [n for n in trace(config, max_length=64).model.graph if n.op_type == "GroupQueryAttention"]
    assert [node.attributes["local_window_size"].as_int() for node in nodes] == [8, 8]


def test_operators_rotate_the_first_values_of_a_head_and_the_models_code_what_they_cannot() -> None:
    partial = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    fused = trace(transformers.NemotronConfig(**sizes(head_dim=32, rope_parameters=partial)), max_length=64)
    own = trace(transformers.StableLmConfig(**sizes(rope_parameters=partial)), max_length=64)
    changed = trace(transformers.HunYuanDenseV1Config(**sizes(head_dim=16)), max_length=64)
    for traced, rotates, width in ((fused, True, 8), (own, False, 8), (changed, False, 16)):
        nodes = [node for node in traced.model.graph if node.op_type == "GroupQueryAttention"]
        assert ["do_rotary" in node.attributes for node in nodes] == [rotates] * 2
        assert traced.constants["rotary.cos"].shape == (64, width)
        tables = {node.inputs[0].name for node in traced.model.graph if node.op_type == "Gather"}
        assert ("rotary.cos" in tables) is not rotates


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_changes_with_the_length_keeps_to_the_lengths_where_it_does_not(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes(rope_parameters=rope))
    fixed = 256 if kind == "dynamic" else 128
    assert fixed_positions(config) == fixed
    check_architecture(config, fixed)
    with pytest.raises(
        CheckpointError, match=rf"change with the length .* Up to {fixed} positions .* --max-length {fixed} or less"
    ):
        check_architecture(config, fixed + 1)


@pytest.mark.parametrize("width", [1, 3])
def test_layers_of_another_size_than_the_settings_say_are_refused(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(**sizes())
    monkeypatch.setattr("paceline_export.causal_lm.num_heads_and_size", lambda config: (2 * width, 16))
    if width == 1:
        trace(config, max_length=48)
    else:
        with pytest.raises(CheckpointError, match=r"has 2 heads of 16 values in layer 0, but the .* say 6 of 16"):
            trace(config, max_length=47)  # a length of its own, since traces are kept


def test_masks_are_noted_by_their_window_and_others_refused() -> None:
    assert _mask(mask_function=masking_utils.causal_mask_function) is None
    window = _mask(mask_function=masking_utils.sliding_window_causal_mask_function(8), local_size=8)
    assert window is not None
    assert window.shape[0] == 8
    padding = torch.zeros(2, dtype=torch.int64)
    ends = masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    for other in (masking_utils.chunked_causal_mask_function(8, padding), ends):
        with pytest.raises(CheckpointError, match=r"masks its attention by '(chunked_overlay|or_masks)'"):
            _mask(mask_function=other, local_size=8)


def test_products_are_written_one_way() -> None:
    model = trace(transformers.GPT2Config(vocab_size=272, n_embd=64, n_layer=2, n_head=4), max_length=64).model
    found = ops(model)
    assert found["Gemm"] == 0
    assert found["MatMul"] == 9  # four a layer and the LM head


def test_every_expert_is_a_product_of_its_own() -> None:
    model = trace(transformers.MixtralConfig(**sizes(num_local_experts=3)), max_length=64).model
    stacked = [node for node in model.graph if node.op_type == "Gather" and "experts" in str(node.inputs[0].name)]
    assert len(stacked) == 2 * 3 * 2  # layers, experts, projections
    assert ops(model)["TopK"] == 2


def test_layers_rotate_by_the_tables_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention"]
    traced = trace(transformers.Gemma3TextConfig(**sizes(head_dim=16, layer_types=kinds)), max_length=64)
    nodes = [node for node in traced.model.graph if node.op_type == "GroupQueryAttention"]
    assert [node.inputs[7].name for node in nodes] == [f"rotary.cos_{kind}" for kind in kinds]
    assert [node.inputs[8].name for node in nodes] == [f"rotary.sin_{kind}" for kind in kinds]
    # the second frequency of eight: theta ** (-1 / 8), a theta of 10,000 and of 1,000,000
    for kind, theta in zip(kinds, (1e4, 1e6), strict=True):
        angle = torch.tensor(5 * theta ** (-1 / 8))
        torch.testing.assert_close(traced.constants[f"rotary.cos_{kind}"][5, 1], angle.cos())
    assert traced.constants["model.embed_tokens.embed_scale"] == 8
