"""The flavour `ort`: ONNX Runtime's fused operators.

```
input_ids               int64 [batch, rows]
seqlens_k               int32 [batch]            valid length after this step, less one
total_sequence_length   int32 []                 the largest valid length after this step
logits_indices          int64 [num_logits]       rows whose logits are wanted; the LM head runs for these only
past_key_values.{i}.key / .value                 [batch, kv_heads, max_length, head_size]
→ logits                float32 [batch, num_logits, vocab_size]
→ present.{i}.key / .value                       the same buffers, updated in place when bound to the past ones
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline_export.attention import GraphState, LayerAttention
from paceline_export.passes.experts import skip_experts
from paceline_export.passes.norms import fuse_residual_norms, fuse_simplified_norms
from paceline_export.passes.reshapes import drop_reshape_pairs
from paceline_export.passes.tied import alias_tied_table
from paceline_export.quantize import PRECISIONS

from .flavor import Flavor, GraphInput
from .nbits import NBits

__all__ = ["ORT"]


@dataclass(slots=True, kw_only=True)
class _OrtState(GraphState):
    """Emits `com.microsoft.GroupQueryAttention`: shared KV buffers, causal mask and rotation in one operator."""

    seqlens_k: torch.Tensor  # int32 [batch]: valid length after this step, less one
    total_sequence_length: torch.Tensor  # int32 scalar: largest valid length after this step
    logits_indices: torch.Tensor  # int64 [num_logits]
    bias: torch.Tensor | None = field(default=None, init=False)  # made once: every layer adds it

    @property
    def position_ids(self) -> torch.Tensor:
        # The operator counts positions by itself; these are for whatever else depends on them, else they fall away.
        rows = self.input_ids.shape[1]
        return self.seqlens_k[:, None].to(torch.int64) + (1 - rows) + torch.arange(rows)

    @property
    def logits_to_keep(self) -> int | torch.Tensor:
        return self.logits_indices

    def attend(self, layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, heads, rows, head_size = layer.query.shape
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": layer.key.shape[1],
            "scale": layer.scale,
        }
        if layer.tables is not None:
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(self.rotary_interleaved)}
        if layer.window is not None:
            attributes["local_window_size"] = layer.window
        if layer.softcap is not None:
            attributes["softcap"] = layer.softcap

        optional = [*(layer.tables or (None, None)), None, self._bias(layer), layer.sinks]
        while optional and optional[-1] is None:
            optional.pop()

        def packed(x: torch.Tensor) -> torch.Tensor:  # [batch, n, rows, head_size] -> [batch, rows, n * head_size]
            return x.transpose(1, 2).reshape(batch, rows, -1)

        output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (
                packed(layer.query),
                packed(layer.key),
                packed(layer.value),
                layer.past_key,
                layer.past_value,
                self.seqlens_k,
                self.total_sequence_length,
                *optional,
            ),
            attributes,
            dtypes=(layer.query.dtype, layer.past_key.dtype, layer.past_value.dtype),
            shapes=((batch, rows, heads * head_size), layer.past_key.shape, layer.past_value.shape),
            version=1,
        )
        return output.view(batch, rows, heads, head_size), present_key, present_value

    def _bias(self, layer: LayerAttention) -> torch.Tensor | None:
        """`[batch, heads, rows, total_sequence_length]`: what positions add to the scores; None for nothing."""
        if layer.bias is not None and self.bias is None:
            total = self.total_sequence_length.item()
            for holds in (total >= 1, total <= layer.bias.shape[0]):  # so that its value need not be known
                cast(Any, torch)._check(holds)
            keys = layer.bias[:total]  # [total_sequence_length, heads]
            rows = torch.nn.functional.embedding(self.position_ids, layer.bias)  # [batch, rows, heads]
            self.bias = (keys.T[None, :, None] - rows.transpose(1, 2)[..., None]).to(layer.query.dtype)
        return self.bias if layer.bias is not None else None


def _inputs(batch: int, rows: int) -> tuple[GraphInput, ...]:
    return (
        GraphInput("seqlens_k", torch.full((batch,), rows - 1, dtype=torch.int32), {0: "batch"}),
        GraphInput("total_sequence_length", torch.tensor(rows, dtype=torch.int32), {}),
        GraphInput("logits_indices", torch.tensor([0, rows - 1]), {0: "num_logits"}),
    )


def _finish(model: Any) -> None:
    fuse_residual_norms(model)
    drop_reshape_pairs(model)


ORT = Flavor(
    name="ort",
    opset=21,
    precisions=PRECISIONS,
    default_max_length=32768,
    static_length=False,
    state=_OrtState,
    inputs=_inputs,
    constants=lambda max_length: {},
    fuse_norms=fuse_simplified_norms,
    finish=_finish,
    finish_stored=skip_experts,
    weights=NBits(),
    after_saving=alias_tied_table,
)
