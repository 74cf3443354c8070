"""Eight bits with one positive scale for each row of a weight: integers, or float8 numbers.

TensorRT multiplies by such weights as they are; 8 bits in smaller blocks it first writes out as floats, in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InvalidInputError

from .blockwise import Blockwise

__all__ = ["FLOAT8_END", "quantize_rows", "quantize_rows_to_float8"]

FLOAT8_END = float(torch.finfo(torch.float8_e4m3fn).max)  # 448
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

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.round_().clamp_(-_TOP, _TOP).add_(_MIDDLE).to(torch.uint8)

    packed, scales = _scaled(weight, dtype, _TOP, rounded)
    return Blockwise(packed, scales, None, weight.shape[1], 8, weight.shape[1])


def quantize_rows_to_float8(
    weight: torch.Tensor, largest_input: float, dtype: torch.dtype = torch.float16
) -> Blockwise:
    """Round each row to the nearest float8 numbers (e4m3) times its scale; the largest one becomes 448.

    Args:
        weight: float `[rows, columns]`.
        largest_input: magnitude that the weight's inputs have at most; what is beyond is cut off.
        dtype: that the scales will be stored in.

    Raises:
        InvalidInputError: a weight that is not finite.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.clamp_(-FLOAT8_END, FLOAT8_END).to(torch.float8_e4m3fn).view(torch.uint8)

    packed, scales = _scaled(weight, dtype, FLOAT8_END, rounded)
    input_scale = max(largest_input / FLOAT8_END, _LEAST)
    return Blockwise(packed, scales, None, weight.shape[1], 8, weight.shape[1], input_scale)


def _scaled(
    weight: torch.Tensor, dtype: torch.dtype, top: float, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Rows divided by scales that make their largest magnitude `top`, and then rounded: `[rows, 1, columns]`."""
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns)
    packed, scales = [], []
    for start in range(0, rows, step):
        x = weight[start : start + step].to(torch.float32)
        scale = (x.abs().amax(1, keepdim=True) / top).to(dtype).to(torch.float32).clamp(min=_LEAST)
        if not torch.isfinite(scale).all():
            raise InvalidInputError("Cannot quantise a weight that holds NaN or infinity; the checkpoint is damaged.")
        packed.append(rounded(x / scale)[:, None])
        scales.append(scale)
    return torch.cat(packed).numpy(), torch.cat(scales).numpy()
