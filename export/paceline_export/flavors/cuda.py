"""The flavour `cuda`: the graphs of `ort` as ONNX Runtime's CUDA provider runs them.

Inputs, outputs and operators are those of `ort`. Activations and caches are float16, which CUDA's GroupQueryAttention
asks for. Few-bit weights stay `MatMulNBits` and `GatherBlockQuantized`, which that provider has for float16 with 4 and
8 bits and blocks of 16 to 128 (`contrib_ops/cuda/quantization/` of microsoft/onnxruntime). It multiplies by activations
as they are, so no graph asks for rounded ones (`accuracy_level`).
"""

from __future__ import annotations

import dataclasses

from paceline_export.quantize import PRECISIONS

from .nbits import NBits
from .ort import ORT

__all__ = ["CUDA"]

CUDA = dataclasses.replace(
    ORT,
    name="cuda",
    precisions={name: dataclasses.replace(PRECISIONS[name], dtype="float16") for name in ("fp16", "int8", "int4")},
    weights=NBits(accuracy_level=0),
)
