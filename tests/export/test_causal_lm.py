"""Tracing: what each architecture's graph looks like, and which architectures are refused."""

from __future__ import annotations

import collections
import time
from typing import Any

import pytest
import torch
import transformers
from tiny import sizes

from paceline.errors import CheckpointError
from paceline_export.causal_lm import _fixed_factors, trace
from paceline_export.passes.norms import fuse_residual_norms
from paceline_export.passes.reshapes import drop_reshape_pairs


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


def test_a_sliding_window_reaches_the_operator() -> None:
    config = transformers.MistralConfig(**sizes(sliding_window=8))
    nodes = [n for n in trace(config, max_length=64).model.graph if n.op_type == "GroupQueryAttention"]
    assert [node.attributes["local_window_size"].as_int() for node in nodes] == [8, 8]


REFUSED = [
    (
        transformers.GPT2Config(vocab_size=272, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        "rotary embedding",
    ),
    (transformers.StableLmConfig(**sizes(partial_rotary_factor=0.25)), "partial rotation is not supported"),
    (
        transformers.LlamaConfig(
            **sizes(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
        ),
        "rotation 'dynamic'",
    ),
    (transformers.MambaConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2), "not supported|cannot build"),
    (transformers.BertConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4), "."),
    (
        transformers.FalconConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "exchanged",
    ),
    (transformers.LlamaConfig(**sizes(head_dim=24)), "heads of 24 values"),
    (
        transformers.LlamaConfig(**sizes(rope_parameters={"rope_type": "default", "rope_theta": 0.0})),
        "is no number at some positions",
    ),
    (transformers.HunYuanDenseV1Config(**sizes(head_dim=16)), "between rotation and attention"),
    (transformers.MixtralConfig(**sizes(num_local_experts=4)), "torch cannot trace MixtralForCausalLM"),
    (transformers.T5Config(vocab_size=272, d_model=64, num_layers=2), "cannot build a causal language model"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: getattr(value, "model_type", None))
def test_what_cannot_be_expressed_is_refused_with_the_reason(config: Any, reason: str) -> None:
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=reason):
        trace(config, max_length=64)
    assert time.perf_counter() - started < 30  # before any heavy work


def test_only_factors_may_be_computed() -> None:
    model = torch.nn.Module()
    model.register_buffer("scale", torch.tensor(3.0), persistent=False)
    with pytest.raises(CheckpointError, match="computes 'scale' when it is built"):
        _fixed_factors(model)
    setattr(model, "scalar_scale", 3.0)  # noqa: B010 -- mypy takes an attribute of a module for a tensor
    assert _fixed_factors(model) == {"scale": torch.tensor(3.0)}
    model.register_buffer("scale", torch.ones(2), persistent=False)
    with pytest.raises(CheckpointError, match="computes 'scale' when it is built"):
        _fixed_factors(model)


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
