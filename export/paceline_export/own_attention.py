"""Attention of models that are older than transformers' attention interface: one function for each architecture.

While such a model is traced, the function stands in for the forward of its attention layers. It projects as the layer's
own code does, and attends as all other models do. Falcon, MPT and BLOOM may place their tokens by a bias of the scores
that grows with the distance (ALiBi, Press et al. 2021, arXiv 2108.12409): they say so by `biased`, and the bias is a
table that the model's own code makes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedConfig

from paceline.errors import CheckpointError

from .attention import attention

__all__ = ["OWN_ATTENTION", "adapt", "position_bias", "reference_attention"]


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """How the attention of an architecture is exported.

    Attributes:
        layer: the class of its attention layers.
        forward: stands in for the layers' own; returns the output `[batch, rows, width]` and no attention weights.
        bias: what the position of a key adds to its scores, float32 `[heads, positions]`, from the configuration and a
            number of positions; None where the model places its tokens otherwise.
        kv_heads: number of KV heads, from the configuration.
        reference: the implementation in transformers that computes the model.
        ignored: settings that transformers does not follow, with the only value that does not matter.
    """

    layer: str
    forward: Callable[..., tuple[torch.Tensor, None]]
    bias: Callable[[Any, int], torch.Tensor | None]
    kv_heads: Callable[[Any], int] = lambda config: int(config.num_attention_heads)
    reference: str = "eager"
    ignored: tuple[tuple[str, Any], ...] = ()


def adapt(model: torch.nn.Module, config: PreTrainedConfig) -> None:
    """Let the attention layers of a model attend through the interface, where they do not by themselves.

    Raises:
        CheckpointError: the configuration asks for something that transformers leaves out.
    """
    if (own := OWN_ATTENTION.get(config.model_type)) is None:
        return
    for setting, followed in own.ignored:
        value: Any = config
        for part in setting.split("."):
            value = getattr(value, part, followed)
        if value != followed:
            raise CheckpointError(
                f"{type(model).__name__} of transformers does not follow the setting {setting}={value!r} "
                f"(only {followed!r}), so it would compute another model; this one is not supported."
            )
    for module in model.modules():
        if type(module).__name__ == own.layer:
            module.forward = MethodType(own.forward, module)


def position_bias(config: PreTrainedConfig, positions: int) -> torch.Tensor | None:
    """What a key's position adds to its scores, float32 `[positions, heads]`; None for models without.

    Only the difference to that of the row's own position counts, since a softmax takes away what all scores share.
    """
    own = OWN_ATTENTION.get(config.model_type)
    table = own.bias(config, positions) if own is not None else None
    return None if table is None else table.T.contiguous()


def reference_attention(config: PreTrainedConfig) -> str:
    """The attention of transformers that computes a model as it is meant."""
    own = OWN_ATTENTION.get(config.model_type)
    return "eager" if own is None else own.reference


def _falcon(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    batch, rows, _ = hidden.shape
    # Queries in groups, each with its key and value behind it.
    groups = layer.query_key_value(hidden).view(batch, rows, _falcon_kv_heads(layer.config), -1, layer.head_dim)
    parts = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    query, key, value = (part.transpose(1, 2) for part in parts)
    if not layer.config.alibi:
        query, key = _modeling(layer.config).apply_rotary_pos_emb(query, key, *kwargs["position_embeddings"])
    output, _ = attention(layer, query, key, value, None, biased=layer.config.alibi)
    return layer.dense(output.reshape(batch, rows, -1)), None


def _falcon_bias(config: Any, positions: int) -> torch.Tensor | None:
    if not config.alibi:
        return None
    heads = config.num_attention_heads
    table: torch.Tensor = _modeling(config).build_alibi_tensor(_ones(positions), heads, torch.float32)
    return table[:, 0] / float(config.head_dim**0.5)  # in bfloat16's steps, as the model has it


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _mpt(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    fused = layer.Wqkv(hidden)
    if layer.clip_qkv:
        fused = fused.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    query, key, value = fused.unflatten(-1, (3, layer.n_heads, layer.head_dim)).transpose(1, 3).unbind(2)
    output, _ = attention(layer, query, key, value, None, scaling=layer.softmax_scale, biased=True)
    return layer.out_proj(output.flatten(2)), None


def _mpt_bias(config: Any, positions: int) -> torch.Tensor:
    table: torch.Tensor = _modeling(config).build_mpt_alibi_tensor(config.n_heads, positions)
    return table[:, 0]


def _bloom(
    layer: Any, hidden: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = layer._reshape(layer.query_key_value(hidden))
    output, _ = attention(layer, query, key, value, None, scaling=layer.inv_norm_factor, biased=True)
    return layer.dense(output.flatten(2)) + residual, None


def _bloom_bias(config: Any, positions: int) -> torch.Tensor:
    table: torch.Tensor = _modeling(config).build_alibi_tensor(_ones(positions), config.n_head, torch.float32)
    return table[:, 0]


def _ones(positions: int) -> torch.Tensor:
    return torch.ones(1, positions, dtype=torch.int64)


def _modeling(config: Any) -> Any:
    """The module of transformers that holds a model's code."""
    return importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")


_MPT_IGNORED = (
    ("attn_config.alibi", True),
    ("attn_config.alibi_bias_max", 8),
    ("attn_config.attn_type", "multihead_attention"),
    ("attn_config.qk_ln", False),
    ("attn_config.prefix_lm", False),
    ("expansion_ratio", 4),
    ("no_bias", True),
    ("logit_scale", None),
)

# By the type of a configuration. Falcon's "eager" adds the bias twice, so it is compared with "sdpa".
OWN_ATTENTION = {
    "falcon": OwnAttention("FalconAttention", _falcon, _falcon_bias, _falcon_kv_heads, reference="sdpa"),
    "mpt": OwnAttention("MptAttention", _mpt, _mpt_bias, ignored=_MPT_IGNORED),
    "bloom": OwnAttention("BloomAttention", _bloom, _bloom_bias),
}
