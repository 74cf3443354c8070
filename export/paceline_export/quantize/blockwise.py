"""Round-to-nearest quantisation in blocks, in the layout that ONNX Runtime's operators read.

A weight `[rows, columns]` is cut along its columns into blocks that share a scale and a zero point:
`weight ≈ (quantised - zero_point) * scale`, quantised being unsigned with 4 or 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InvalidInputError

_CHUNK = 1 << 24  # elements

__all__ = ["BLOCK_SIZES", "Blockwise", "block_range", "dequantize", "from_levels", "quantize"]

BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Blockwise:
    """A quantised weight of `rows × columns`.

    Attributes:
        packed: uint8 `[rows, blocks, block_size * bits / 8]`, the lower nibble first.
        scales: float32 `[rows, blocks]`.
        zero_points: uint8 `[rows, ceil(blocks * bits / 8)]`, packed alike; None means 2 ** (bits - 1).
        input_scale: of a weight whose `packed` holds float8 numbers (e4m3) instead of levels, what its inputs are
            divided by to become such numbers, too; None for levels.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None
    columns: int
    bits: int
    block_size: int
    input_scale: float | None = None


def quantize(weight: torch.Tensor, *, bits: int, block_size: int, symmetric: bool) -> Blockwise:
    """Round each block to the nearest of its 2 ** bits levels.

    Args:
        weight: float `[rows, columns]`; the last block is padded with zeros.
        bits: 4 or 8.
        block_size: one of `BLOCK_SIZES`.
        symmetric: one level in the middle stands for 0 and the largest magnitude is met exactly; otherwise the levels
            span each block's minimum to maximum, 0 included.

    Raises:
        InvalidInputError: another `bits` or `block_size`, or a weight that is not finite.
    """
    if bits not in (4, 8) or block_size not in BLOCK_SIZES:
        raise InvalidInputError(
            f"Cannot quantise to {bits} bits in blocks of {block_size}: expected 4 or 8 bits and a block size of "
            f"{', '.join(map(str, BLOCK_SIZES))}."
        )
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns)  # a piece at a time, since the steps below hold several copies of their input
    pieces = [
        _quantize_rows(weight[start : start + step], bits, block_size, symmetric) for start in range(0, rows, step)
    ]
    packed, scales, zero_points = (torch.cat(parts).numpy() for parts in zip(*pieces, strict=True))
    return Blockwise(packed, scales, None if symmetric else zero_points, columns, bits, block_size)


def block_range(low: torch.Tensor, high: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points of blocks whose values lie between `low` and `high`, all of one shape; see `quantize`.

    The scale of a block of zeros is 0.
    """
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        extreme = torch.where(high.abs() > low.abs(), high, low)  # signed: it becomes level 0 exactly
        scale = extreme / -middle
        return scale, torch.full_like(scale, middle)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / top
    return scale, torch.where(scale == 0, 0, (-low / scale).round().clamp(0, top))


def from_levels(
    levels: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, *, bits: int, block_size: int
) -> Blockwise:
    """Pack levels that were chosen elsewhere.

    Args:
        levels: uint8 `[rows, columns]`; a last block that is not full is padded.
        scales: float32 `[rows, blocks]`.
        zero_points: whole numbers `[rows, blocks]`; None means 2 ** (bits - 1).
        bits: 4 or 8.
        block_size: columns that share a scale.
    """
    rows, columns = levels.shape
    blocks = scales.shape[1]
    padded = torch.nn.functional.pad(levels, (0, blocks * block_size - columns), value=2 ** (bits - 1))
    packed = _pack(padded.reshape(rows, blocks, block_size), bits)
    zeros = None if zero_points is None else _pack(zero_points.to(torch.uint8), bits).numpy()
    return Blockwise(packed.numpy(), scales.contiguous().numpy(), zeros, columns, bits, block_size)


def _quantize_rows(
    weight: torch.Tensor, bits: int, block_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed levels, scales and packed zero points of some rows."""
    rows, columns = weight.shape
    blocks = -(-columns // block_size)
    x = torch.nn.functional.pad(weight.to(torch.float32), (0, blocks * block_size - columns))
    x = x.view(rows, blocks, block_size)
    low, high = torch.aminmax(x, dim=2, keepdim=True)
    if not torch.isfinite(high - low).all():
        raise InvalidInputError("Cannot quantise a weight that holds NaN or infinity; the checkpoint is damaged.")
    scale, zero = block_range(low, high, bits, symmetric)
    inverse = torch.where(scale == 0, 0, 1 / scale)
    levels = (x * inverse).round_().add_(zero).clamp_(0, 2**bits - 1).to(torch.uint8)
    return _pack(levels, bits), scale.squeeze(2), _pack(zero.squeeze(2).to(torch.uint8), bits)


def dequantize(weight: Blockwise) -> NDArray[np.float32]:
    """The float32 `[rows, columns]` that the quantised weight stands for."""
    rows, blocks, _ = weight.packed.shape
    if weight.input_scale is not None:
        numbers = torch.from_numpy(weight.packed).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        return (numbers * weight.scales[:, :, None]).reshape(rows, -1)[:, : weight.columns]
    levels = _unpack(weight.packed, weight.bits).reshape(rows, blocks, weight.block_size)
    if weight.zero_points is None:
        zero = np.full((rows, blocks), 2 ** (weight.bits - 1), np.float32)
    else:
        zero = _unpack(weight.zero_points, weight.bits)[:, :blocks].astype(np.float32)
    values = (levels.astype(np.float32) - zero[:, :, None]) * weight.scales.reshape(rows, blocks)[:, :, None]
    return values.reshape(rows, -1)[:, : weight.columns]


def _pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack two 4-bit levels into a byte along the last axis, the first one low."""
    if bits == 8:
        return levels.contiguous()
    if levels.shape[-1] % 2:
        levels = torch.nn.functional.pad(levels, (0, 1))
    return levels[..., 0::2] | (levels[..., 1::2] << 4)


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of `_pack`; a padding level at the end is kept."""
    if bits == 8:
        return packed
    return np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
