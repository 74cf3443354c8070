"""The attention function of each graph flavour, handed to transformers' attention interface while a model is traced.

transformers calls the function once per layer with that layer's query, key and value. It emits the flavour's fused
operator with the layer's KV cache as input and output, so that no pattern has to be recognised afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.errors import CheckpointError

__all__ = ["ATTENTION_NAME", "GraphState", "leave_unrotated", "tracing"]

ATTENTION_NAME = "paceline"

# Arguments of the attention interface that change nothing here: positions reach the operator through `seqlens_k`.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "is_causal", "cache_position", "position_embeddings", "output_router_logits"}
)


@dataclass(slots=True)
class GraphState:
    """The graph inputs that attention needs, and the caches it produced, in layer order."""

    past_keys: list[torch.Tensor]  # each [batch, kv_heads, max_length, head_size]
    past_values: list[torch.Tensor]
    seqlens_k: torch.Tensor  # int32 [batch]: valid length after this step, less one
    total_sequence_length: torch.Tensor  # int32 scalar: largest valid length after this step
    rotary_tables: list[tuple[torch.Tensor, torch.Tensor]]  # cos and sin of each layer, [max_length, head_size / 2]
    rotary_interleaved: bool
    # What the layer at hand rotates before it attends; None where it skips the rotation, as some architectures do.
    rotated: tuple[torch.Tensor, torch.Tensor] | None = None
    present_keys: list[torch.Tensor] = field(default_factory=list)
    present_values: list[torch.Tensor] = field(default_factory=list)


_state: GraphState | None = None


def leave_unrotated(
    query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for a model's rotation while it is traced: the operator rotates, in this layer, instead."""
    if _state is not None:
        _state.rotated = (query, key)
    return query, key


@contextmanager
def tracing(state: GraphState) -> Iterator[GraphState]:
    """Let attention calls inside the block read from and append to `state`."""
    global _state
    if _state is not None:
        raise RuntimeError("A model is being traced already; traces cannot be nested.")
    _state = state
    try:
        yield state
    finally:
        _state = None


def group_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Emit `com.microsoft.GroupQueryAttention`: in-place shared KV buffers, causal mask and rotation in one operator.

    Args:
        module: the attention layer; its `layer_idx` says which cache is its own.
        query: `[batch, heads, rows, head_size]`, not rotated.
        key: `[batch, kv_heads, rows, head_size]`, not rotated.
        value: as `key`.
        attention_mask: always None; the operator is causal by itself.
        scaling: factor on the scores.
        dropout: 0 in evaluation.
        sliding_window: number of positions that a row sees, itself included; None means all.
        softcap: bound of the scores through tanh; None means none.
        kwargs: nothing that would change the result.

    Returns:
        `[batch, rows, heads, head_size]` and no attention weights.

    Raises:
        CheckpointError: the layer needs something that the operator cannot express.
    """
    state = _state
    if state is None:
        raise RuntimeError("group_query_attention was called outside of `tracing`.")
    if unknown := sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS):
        raise CheckpointError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which GroupQueryAttention cannot "
            "express; this architecture is not supported."
        )
    batch, heads, rows, head_size = query.shape
    if value.shape[-1] != head_size:
        raise CheckpointError(
            f"{type(module).__name__} has keys of size {head_size} and values of size {value.shape[-1]}; "
            "GroupQueryAttention needs one head size."
        )
    layer = cast(int, module.layer_idx)
    past_key, past_value = state.past_keys[layer], state.past_values[layer]
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": key.shape[1],
        "scale": float(head_size**-0.5 if scaling is None else scaling),
    }
    tables: tuple[torch.Tensor, ...] = ()
    if state.rotated is not None:
        if query is not state.rotated[0] or key is not state.rotated[1]:
            raise CheckpointError(
                f"{type(module).__name__} changes query or key between rotation and attention, which is one operator "
                "here; this architecture is not supported."
            )
        state.rotated = None
        tables = state.rotary_tables[layer]
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(state.rotary_interleaved)}
    if sliding_window is not None:
        attributes["local_window_size"] = int(sliding_window)
    if softcap is not None:
        attributes["softcap"] = float(softcap)

    def packed(x: torch.Tensor) -> torch.Tensor:  # [batch, heads, rows, head_size] -> [batch, rows, heads * head_size]
        return x.transpose(1, 2).reshape(batch, rows, -1)

    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        (
            packed(query),
            packed(key),
            packed(value),
            past_key,
            past_value,
            state.seqlens_k,
            state.total_sequence_length,
            *tables,
        ),
        attributes,
        dtypes=(query.dtype, past_key.dtype, past_value.dtype),
        shapes=((batch, rows, heads * head_size), past_key.shape, past_value.shape),
        version=1,
    )
    state.present_keys.append(present_key)
    state.present_values.append(present_value)
    return output.view(batch, rows, heads, head_size), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The operator masks by itself, so transformers must not build a mask."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, group_query_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
