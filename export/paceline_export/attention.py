"""The attention function that transformers' attention interface calls while a model is traced.

transformers calls it once per layer with that layer's query, key and value. It checks what the layer asks for, and the
state of the flavour at hand emits the flavour's operators with the layer's KV cache as input and output, so that no
pattern has to be recognised afterwards.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.errors import CheckpointError

__all__ = [
    "ATTENTION_NAME",
    "POSITION_BIAS",
    "ChangedRotationError",
    "GraphState",
    "LayerAttention",
    "leave_unrotated",
    "tracing",
]

ATTENTION_NAME = "paceline"
POSITION_BIAS = "rotary.position_bias"  # the table of `LayerAttention.bias`, by its name in the graph

# Arguments of the attention interface that change nothing here: positions reach the operators through graph inputs.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "position_embeddings", "output_router_logits"})
# What masks of transformers are made of that the operators make themselves; `masking_utils.py` has others, too.
_KNOWN_MASKS = (
    "causal_mask_function",
    "and_masks.",
    "sliding_window_overlay.",
    "packed_sequence_mask_function.",  # of a text that begins anew within a row, which none does here
    "remap_positions_for_packed_sequence.",
)


class ChangedRotationError(CheckpointError):
    """A model changes queries or keys between their rotation and attention, so that the operators must not rotate."""


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
        sinks: a score of each head, `[heads]`, that takes its share of every row's weights and adds nothing; None means
            none.
        bias: what the position of a key adds to its scores, less what the row's own would, float32
            `[max_length, heads]`; None means nothing. All layers that have one have the same.
        tables: cosine and sine to rotate by, `[max_length, rotated / 2]`, where the first `rotated` values of a head
            rotate; None where the operators do not.
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
    sinks: torch.Tensor | None
    bias: torch.Tensor | None
    tables: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class GraphState(ABC):
    """The graph inputs that attention needs, and the caches it produced; each flavour adds its own inputs."""

    input_ids: torch.Tensor  # int64 [batch, rows]
    past_keys: list[torch.Tensor]  # each [batch, kv_heads, max_length, head_size]
    past_values: list[torch.Tensor]
    rotary_tables: list[tuple[torch.Tensor, torch.Tensor]]  # cos and sin by which the operators rotate in each layer
    rotary_interleaved: bool
    constants: dict[str, torch.Tensor]  # other tables, by their names in the graph: the flavour's own, POSITION_BIAS
    # What the layer at hand rotates before it attends; None where it skips the rotation, as some architectures do.
    rotated: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
    present: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)  # by the layer

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
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    biased: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Check what a layer asks of its attention and let the state of the trace emit it.

    Args:
        module: the attention layer; its `layer_idx` says which cache is its own.
        query: `[batch, heads, rows, head_size]`, not rotated where the operators rotate.
        key: `[batch, kv_heads, rows, head_size]`, as `query`.
        value: as `key`.
        attention_mask: what `_mask` made: None, or a note of the window.
        scaling: factor on the scores.
        dropout: 0 in evaluation.
        sliding_window: number of positions that a row sees, itself included; None means all, or what the mask says.
        softcap: bound of the scores through tanh; None means none.
        s_aux: the sinks, `[heads]`; None means none.
        is_causal: whether rows do not see what follows them; None means what the layer itself says.
        biased: whether the model's table of biases by position is added to the scores.
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
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CheckpointError(f"{name} lets tokens see what follows them, so it cannot continue a text.")
    _, kv_heads, _, head_size = key.shape
    if value.shape[-1] != head_size:
        raise CheckpointError(
            f"{name} has keys of size {head_size} and values of size {value.shape[-1]}; the exported operators need "
            "one head size."
        )
    layer = cast(int, module.layer_idx)
    if layer in state.present:
        raise CheckpointError(f"{name} attends twice in layer {layer}; this architecture is not supported.")
    past_key = state.past_keys[layer]
    if (kv_heads, head_size) != (past_key.shape[1], past_key.shape[3]):
        raise CheckpointError(
            f"{name} has {kv_heads} heads of {head_size} values in layer {layer}, but the model's settings say "
            f"{past_key.shape[1]} of {past_key.shape[3]}; layers of different sizes are not supported."
        )
    tables = None
    if state.rotated is not None:
        if query is not state.rotated[0] or key is not state.rotated[1]:
            raise ChangedRotationError(f"{name} changes query or key between rotation and attention.")
        state.rotated = None
        tables = state.rotary_tables[layer]
    window = sliding_window if attention_mask is None else attention_mask.shape[0]
    output, *present = state.attend(
        LayerAttention(
            module=name,
            query=query,
            key=key,
            value=value,
            past_key=past_key,
            past_value=state.past_values[layer],
            scale=float(head_size**-0.5 if scaling is None else scaling),
            window=None if window is None else int(window),
            softcap=None if softcap is None else float(softcap),
            sinks=s_aux,
            bias=state.constants[POSITION_BIAS] if biased else None,
            tables=tables,
        )
    )
    state.present[layer] = present[0], present[1]
    return output, None


def _mask(*args: Any, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The operators mask by themselves, so transformers gets no mask but a note of the window: as many entries.

    Raises:
        CheckpointError: the mask is neither causal nor that of a window.
    """
    for name in _parts(mask_function):
        if not name.startswith(_KNOWN_MASKS):
            raise CheckpointError(
                f"The model masks its attention by {name.partition('.')[0]!r}, which the exported operators do not; "
                "this architecture is not supported."
            )
    return None if local_size is None else torch.zeros(local_size, 1, 1, 1)


def _parts(mask_function: Any) -> Iterator[str]:
    """Names of the functions that a mask is put together from."""
    yield mask_function.__qualname__
    for cell in mask_function.__closure__ or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            if inspect.isfunction(part):
                yield from _parts(part)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _mask)
