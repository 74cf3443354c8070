"""The flavour `cuda`: the graphs of `ort` as ONNX Runtime's CUDA provider runs them.

Inputs, outputs and operators are those of `ort`. Activations and caches are float16, which CUDA's GroupQueryAttention
asks for. Few-bit weights stay `MatMulNBits` and `GatherBlockQuantized`, which that provider has for float16 with 4 and
8 bits and blocks of 16 to 128 (`contrib_ops/cuda/quantization/` of microsoft/onnxruntime). It multiplies by activations
as they are, so no graph asks for rounded ones (`accuracy_level`). Its GroupQueryAttention adds nothing to the scores,
so models with a bias by position are refused.
"""

from __future__ import annotations

import dataclasses

import torch

from paceline.errors import CheckpointError
from paceline_export.attention import LayerAttention
from paceline_export.quantize import PRECISIONS

from .nbits import NBits
from .ort import ORT, _OrtState

__all__ = ["CUDA"]


@dataclasses.dataclass(slots=True, kw_only=True)
class _CudaState(_OrtState):
    """Emits what `_OrtState` does, without a bias."""

    def attend(self, layer: LayerAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if layer.bias is not None:
            raise CheckpointError(
                f"{layer.module} adds a bias by position to its scores (ALiBi), which ONNX Runtime's "
                "GroupQueryAttention does not do on a GPU; export it with --flavor ort or trt."
            )
        return _OrtState.attend(self, layer)


CUDA = dataclasses.replace(
    ORT,
    name="cuda",
    precisions={name: dataclasses.replace(PRECISIONS[name], dtype="float16") for name in ("fp16", "int8", "int4")},
    state=_CudaState,
    weights=NBits(accuracy_level=0),
)
