"""Eight bits with one positive scale for each row of a weight.

TensorRT multiplies by such weights as they are; 8 bits in smaller blocks it first writes out as floats, in every step.
"""

from __future__ import annotations

import torch

from paceline.errors import InvalidInputError

from .blockwise import Blockwise

__all__ = ["quantize_rows"]

_MIDDLE, _TOP = 128, 127
_LEAST = 2.0**-24  # the smallest scale that float16 holds
_CHUNK = 1 << 24  # elements


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype = torch.float16) -> Blockwise:
    """Round each row to the nearest of 255 levels, `-127 … 127` times its scale.

    Args:
        weight: float `[rows, columns]`.
        dtype: that the scales will be stored in; levels are those for the scale so rounded.

    Returns:
        One block of 8 bits per row, without zero points.

    Raises:
        InvalidInputError: a weight that is not finite.
    """
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns)
    levels, scales = [], []
    for start in range(0, rows, step):
        x = weight[start : start + step].to(torch.float32)
        scale = (x.abs().amax(1, keepdim=True) / _TOP).to(dtype).to(torch.float32).clamp(min=_LEAST)
        if not torch.isfinite(scale).all():
            raise InvalidInputError("Cannot quantise a weight that holds NaN or infinity; the checkpoint is damaged.")
        level = (x / scale).round_().clamp_(-_TOP, _TOP).add_(_MIDDLE).to(torch.uint8)
        levels.append(level[:, None])
        scales.append(scale)
    return Blockwise(torch.cat(levels).numpy(), torch.cat(scales).numpy(), None, columns, 8, columns)
