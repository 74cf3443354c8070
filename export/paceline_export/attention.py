"""The attention function that transformers' attention interface calls while a model is traced.

transformers calls it once per layer with that layer's query, key and value. It checks what the layer asks for, and the
state of the flavour at hand emits the flavour's operators with the layer's KV cache as input and output, so that no
pattern has to be recognised afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.errors import CheckpointError

__all__ = ["ATTENTION_NAME", "GraphState", "LayerAttention", "leave_unrotated", "tracing"]

ATTENTION_NAME = "paceline"

# Arguments of the attention interface that change nothing here: positions reach the operators through graph inputs.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "is_causal", "cache_position", "position_embeddings", "output_router_logits"}
)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention works on.

    Attributes:
        module: the layer's class, for errors.
        query: `[batch, heads, rows, head_size]`, not rotated.
        key: `[batch, kv_heads, rows, head_size]`, not rotated.
        value: as `key`.
        past_key: the layer's cache, `[batch, kv_heads, max_length, head_size]`.
        past_value: as `past_key`.
        scale: factor on the scores.
        window: number of positions that a row sees, itself included; None means all.
        softcap: bound of the scores through tanh; None means none.
        tables: cosine and sine to rotate by, `[max_length, head_size / 2]`; None where the layer does not rotate.
    """

    module: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    past_key: torch.Tensor
    past_value: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    tables: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class GraphState(ABC):
    """The graph inputs that attention needs, and the caches it produced, in layer order; each flavour adds its own."""

    input_ids: torch.Tensor  # int64 [batch, rows]
    past_keys: list[torch.Tensor]  # each [batch, kv_heads, max_length, head_size]
    past_values: list[torch.Tensor]
    rotary_tables: list[tuple[torch.Tensor, torch.Tensor]]  # cos and sin of each layer, [max_length, head_size / 2]
    rotary_interleaved: bool
    constants: dict[str, torch.Tensor]  # the flavour's own tables, by their names in the graph
    # What the layer at hand rotates before it attends; None where it skips the rotation, as some architectures do.
    rotated: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    present_keys: list[torch.Tensor] = field(default_factory=list, init=False)
    present_values: list[torch.Tensor] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def position_ids(self) -> torch.Tensor:
        """The place of each row in its sequence, int64 `[batch, rows]`."""

    @property
    def logits_to_keep(self) -> int | torch.Tensor:
        """What transformers' forward is to keep of the rows; 0 keeps all."""
        return 0

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rows `[batch, num_logits, width]` that the LM head gets of those that it would get."""
        return hidden

    @abstractmethod
    def attend(self, layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Emit the operators of a layer.

        Returns:
            The output `[batch, rows, heads, head_size]` and both caches as they are after this step.

        Raises:
            CheckpointError: the layer needs something that these operators cannot express.
        """


_state: GraphState | None = None


def leave_unrotated(
    query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for a model's rotation while it is traced: the operators rotate, in this layer, instead."""
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


def attention(
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
    """Check what a layer asks of its attention and let the state of the trace emit it.

    Args:
        module: the attention layer; its `layer_idx` says which cache is its own.
        query: `[batch, heads, rows, head_size]`, not rotated.
        key: `[batch, kv_heads, rows, head_size]`, not rotated.
        value: as `key`.
        attention_mask: always None; the operators mask by themselves.
        scaling: factor on the scores.
        dropout: 0 in evaluation.
        sliding_window: number of positions that a row sees, itself included; None means all.
        softcap: bound of the scores through tanh; None means none.
        kwargs: nothing that would change the result.

    Returns:
        `[batch, rows, heads, head_size]` and no attention weights.

    Raises:
        CheckpointError: the layer needs something that the operators cannot express.
    """
    state = _state
    if state is None:
        raise RuntimeError("attention was called outside of `tracing`.")
    name = type(module).__name__
    if unknown := sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS):
        raise CheckpointError(
            f"{name} passes {', '.join(unknown)} to its attention, which the exported operators cannot express; this "
            "architecture is not supported."
        )
    head_size = query.shape[-1]
    if value.shape[-1] != head_size:
        raise CheckpointError(
            f"{name} has keys of size {head_size} and values of size {value.shape[-1]}; the exported operators need "
            "one head size."
        )
    tables = None
    layer = cast(int, module.layer_idx)
    if state.rotated is not None:
        if query is not state.rotated[0] or key is not state.rotated[1]:
            raise CheckpointError(
                f"{name} changes query or key between rotation and attention, which is one operator here; this "
                "architecture is not supported."
            )
        state.rotated = None
        tables = state.rotary_tables[layer]
    output, present_key, present_value = state.attend(
        LayerAttention(
            module=name,
            query=query,
            key=key,
            value=value,
            past_key=state.past_keys[layer],
            past_value=state.past_values[layer],
            scale=float(head_size**-0.5 if scaling is None else scaling),
            window=None if sliding_window is None else int(sliding_window),
            softcap=None if softcap is None else float(softcap),
            tables=tables,
        )
    )
    state.present_keys.append(present_key)
    state.present_values.append(present_value)
    return output, None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The operators mask by themselves, so transformers must not build a mask."""


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
