"""The flavour `trt`: standard operators that TensorRT fuses, with caches of a static length.

```
input_ids        int64 [batch, rows]
write_indices    int64 [batch]                positions that a sequence's caches hold; new ones go behind
logits_indices   int64 [batch, num_logits]    rows of each sequence whose logits are wanted
past_key_values.{i}.key / .value              [batch, kv_heads, MAX_LENGTH, head_size], MAX_LENGTH a number
→ logits         float32 [batch, num_logits, vocab_size]
→ present.{i}.key / .value                    the same buffers, updated in place when bound to the past ones
```

Sequences of a batch may have different lengths. One with fewer new tokens than the step has rows is padded behind them
with any ids: what these rows write lies behind the sequence's valid positions, where the next step overwrites it before
any row sees it. For every sequence `write_indices + rows` must not exceed MAX_LENGTH, padding included. A rollback
lowers a sequence's write index.

The mask is additive and made once per pass, one for each width of window among the layers: a boolean mask that
layers share has been seen to break a build of TensorRT-RTX with several profiles, and `is_causal` and
`nonpad_kv_seqlen` do not mean there what they say. Attention reads all MAX_LENGTH positions in each step, so a graph
should not be longer than its texts.

Layers that bound their scores (softcap), or that have sinks, attend by products and a softmax instead, since TensorRT's
attention knows neither: they write all their scores to memory, `heads * rows * MAX_LENGTH` numbers of 4 bytes each. A
bias by position (ALiBi) is part of the mask, which then is as large, in 2 bytes a number, once per pass.

Heads that share keys and values are stacked as rows of one head, since TensorRT-RTX would otherwise write the caches
out once for each of them, in every layer and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline_export.attention import GraphState, LayerAttention
from paceline_export.passes.norms import fuse_standard_norms
from paceline_export.passes.static_length import IN_PIECES, POSITIONS
from paceline_export.quantize import WeightFormat

from .dequantize import Dequantize
from .flavor import Flavor, GraphInput

__all__ = ["TRT"]

_OPSET = 24


@dataclass(slots=True, kw_only=True)
class _TrtState(GraphState):
    """Emits `RotaryEmbedding`, `TensorScatter` into both caches, and `Attention` with an additive mask."""

    write_indices: torch.Tensor  # int64 [batch]
    logits_indices: torch.Tensor  # int64 [batch, num_logits]
    positions: torch.Tensor | None = field(default=None, init=False)
    masks: dict[tuple[int | None, int, bool], torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def position_ids(self) -> torch.Tensor:
        if self.positions is None:  # once: every layer asks
            self.positions = self.write_indices[:, None] + torch.arange(self.input_ids.shape[1])
        return self.positions

    def head_input(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*self.logits_indices.shape, hidden.shape[-1])
        return _operator("GatherND", (hidden, self.logits_indices[:, :, None]), {"batch_dims": 1}, hidden.dtype, shape)

    def attend(self, layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key = layer.query, layer.key
        if layer.tables is not None:
            query, key = (self._rotated(x, layer.tables) for x in (query, key))
        keys, values = self._scattered(layer.past_key, key), self._scattered(layer.past_value, layer.value)
        batch, heads, _, head_size = query.shape
        shared = heads // keys.shape[1]  # heads that follow each other attend to the same keys and values
        stacked = query.reshape(batch, keys.shape[1], -1, head_size)
        if layer.softcap is None and layer.sinks is None:
            inputs = (stacked, keys, values, self._mask(layer, shared))
            output = _operator("Attention", inputs, {"scale": layer.scale}, query.dtype, stacked.shape)
        else:
            output = self._in_pieces(layer, stacked, keys, values)
        return output.reshape(batch, heads, -1, head_size).transpose(1, 2), keys, values

    def _in_pieces(
        self, layer: LayerAttention, stacked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """What TensorRT's attention does not know, as products and a softmax in float32 over all MAX_LENGTH scores."""
        batch, heads, rows, _ = layer.query.shape
        scores = (stacked * layer.scale) @ keys.transpose(2, 3)
        scores = scores.reshape(batch, heads, rows, -1).to(torch.float32)
        if layer.softcap is not None:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores = scores + self._mask(layer, 1)
        if layer.sinks is not None:
            sinks = layer.sinks.to(torch.float32).reshape(1, -1, 1, 1).expand(batch, heads, rows, 1)
            shares = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        else:
            shares = torch.softmax(scores, -1)
        return shares.to(values.dtype).reshape(*stacked.shape[:3], -1) @ values

    def _rotated(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        attributes = {"interleaved": int(self.rotary_interleaved)}
        if (rotated := 2 * tables[0].shape[1]) < x.shape[-1]:
            attributes["rotary_embedding_dim"] = rotated
        return _operator("RotaryEmbedding", (x, *tables, self.position_ids), attributes, x.dtype, x.shape)

    def _scattered(self, past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        attributes = {"axis": 2, "mode": "linear"}
        return _operator("TensorScatter", (past, new, self.write_indices), attributes, past.dtype, past.shape)

    def _mask(self, layer: LayerAttention, shared: int) -> torch.Tensor:
        """`[batch, 1, shared * rows, MAX_LENGTH]`: 0 where a row sees a position, else the least number.

        With a bias by position, which it holds in the place of 0, it is `[batch, heads / shared, …]`.
        """
        window, bias, dtype = layer.window, layer.bias, layer.query.dtype
        if (window, shared, bias is not None) not in self.masks:
            rows = self.position_ids[:, None, :, None]
            positions = self.constants[POSITIONS]
            visible = positions <= rows
            if window is not None:
                visible = visible & (positions > rows - window)
            zero, least = (torch.full((), value, dtype=dtype) for value in (0.0, torch.finfo(dtype).min))
            if bias is None:
                mask = torch.cat([torch.where(visible, zero, least)] * shared, dim=2)
            else:
                at_keys = torch.nn.functional.embedding(positions, bias)  # [MAX_LENGTH, heads]
                at_rows = torch.nn.functional.embedding(self.position_ids, bias)  # [batch, rows, heads]
                added = (at_keys.T[None, :, None] - at_rows.transpose(1, 2)[..., None]).to(dtype)
                batch, heads, _, length = added.shape
                mask = torch.where(visible, added, least).reshape(batch, heads // shared, -1, length)
            self.masks[window, shared, bias is not None] = mask
        return self.masks[window, shared, bias is not None]


def _operator(
    name: str,
    inputs: tuple[torch.Tensor, ...],
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...] | torch.Size,
) -> torch.Tensor:
    """One operator of the flavour's opset in the graph, with one output."""
    return cast(
        torch.Tensor,
        torch.onnx.ops.symbolic(name, inputs, dict(attributes), dtype=dtype, shape=shape, version=_OPSET),
    )


def _inputs(batch: int, rows: int) -> tuple[GraphInput, ...]:
    return (
        GraphInput("write_indices", torch.zeros(batch, dtype=torch.int64), {0: "batch"}),
        GraphInput("logits_indices", torch.tensor([[0, rows - 1]] * batch), {0: "batch", 1: "num_logits"}),
    )


def _finish(model: Any) -> None:
    """Note how many layers attend in pieces, so that a build does not look for their kernels."""
    layers = sum(str(value.name).startswith("past_key_values.") for value in model.graph.inputs) // 2
    if in_pieces := layers - sum(node.op_type == "Attention" for node in model.graph):
        model.metadata_props[IN_PIECES] = str(in_pieces)


def _leave(anything: Any) -> None:
    """Nothing to do."""


TRT = Flavor(
    name="trt",
    opset=_OPSET,
    precisions={
        "fp16": WeightFormat("float16", None, None, None, None, symmetric=True),
        "bf16": WeightFormat("bfloat16", None, None, None, None, symmetric=True),
        "fp8": WeightFormat("float16", 8, 8, 8, 8, symmetric=True, float8=True),
        "int8": WeightFormat("float16", 8, 8, 8, 8, symmetric=True),
        # TensorRT refuses zero points.
        "int4": WeightFormat("float16", 4, 8, 8, 8, symmetric=True),
    },
    default_max_length=4096,
    static_length=True,
    state=_TrtState,
    inputs=_inputs,
    constants=lambda max_length: {POSITIONS: torch.arange(max_length)},
    fuse_norms=fuse_standard_norms,
    finish=_finish,
    finish_stored=_leave,
    weights=Dequantize(),
    after_saving=_leave,
)
