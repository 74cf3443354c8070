"""Weights that a checkpoint holds quantised already, by GPTQ or AWQ: the same numbers in ONNX Runtime's layout.

A projection `X.weight [rows, columns]` is held as

```
                  GPTQ                                  AWQ (GEMM packing)
X.qweight  int32  [columns * bits / 32, rows]           [columns, rows * bits / 32]     levels
X.qzeros   int32  [groups, rows * bits / 32]            [groups, rows * bits / 32]      zero points
X.scales   float  [groups, rows]                        [groups, rows]
X.g_idx    int32  [columns], the group of each column   none: consecutive columns
```

An int32 holds several levels, the lowest bits first: in GPTQ those of consecutive columns (or rows, of zero points), in
AWQ those of the rows 0, 2, 4, 6, 1, 3, 5, 7 of eight. GPTQ's first format holds zero points less 1. Sources:
`QuantLinear.pack` of AutoGPTQ and GPTQModel, `WQLinear_GEMM.from_linear` of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import CheckpointError, InvalidInputError

from . import WeightFormat
from .blockwise import BLOCK_SIZES, Blockwise, dequantize, from_levels

__all__ = ["LEFT_OUT_BITS", "PARTS", "PackedWeight", "Packing", "packed_shape", "repack", "unpacked"]

_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
# Projections that such a checkpoint leaves out (the LM head, modules_to_not_convert, dynamic) are those that few bits
# hurt most: they are stored nearly without loss.
LEFT_OUT_BITS = 8
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint packs its quantised projections.

    Attributes:
        method: `gptq` or `awq`.
        bits: of most projections; a few may have others (`dynamic`), which their shapes tell.
        group_size: columns that share a scale, of most projections; -1 is all of them.
        zero_offset: what to add to a stored zero point.
        reordered: whether columns may be in activation order (`desc_act`): then `g_idx` must tell their groups.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int
    reordered: bool = False

    @classmethod
    def from_config(cls, name: str, settings: Any) -> Packing:
        """The packing that `quantization_config` of a checkpoint's configuration describes.

        Raises:
            CheckpointError: another method, number of bits or layout than those above.
        """
        settings = settings if isinstance(settings, Mapping) else {}
        method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit"))
        if method not in ("gptq", "awq"):
            raise CheckpointError(
                f"{name}: its weights are quantised already (quant_method {method!r:.40} in config.json), in a way "
                "that is not supported: their scales would be lost. Expected gptq, awq, fp8, fbgemm_fp8 or "
                "compressed-tensors. Export such a checkpoint, the unquantised one, or a GGUF file."
            )
        layout = settings.get("checkpoint_format") or settings.get("version") or settings.get("format")
        layout = str(layout or ("gptq" if method == "gptq" else "gemm")).lower()
        layouts = ("gptq", "gptq_v2") if method == "gptq" else ("gemm",)
        expected = (4, 8) if method == "gptq" else (4,)
        if settings.get("is_marlin_format"):
            layout = "marlin"
        if layout not in layouts or bits not in expected or isinstance(bits, bool):
            raise CheckpointError(
                f"{name}: its weights are quantised by {method} with {bits!r:.20} bits in the layout {layout!r:.40}; "
                f"expected {' or '.join(map(str, expected))} bits and the layout {' or '.join(layouts)}. Export "
                "another checkpoint of this model."
            )
        group_size = settings.get("group_size", settings.get("q_group_size", 128))
        if not isinstance(group_size, int) or isinstance(group_size, bool) or (group_size < 1 and group_size != -1):
            raise CheckpointError(
                f"{name}: group_size in its quantization_config is {group_size!r:.20}; expected a positive number of "
                "columns, or -1 for all of them."
            )
        reordered = method == "gptq" and bool(settings.get("desc_act"))
        return cls(method, bits, group_size, 1 if layout == "gptq" else 0, reordered)

    def check_precision(self, name: str, precision: str, stored: WeightFormat) -> None:
        """Check that a precision keeps the checkpoint's numbers, or the values that they stand for.

        Args:
            name: of the checkpoint.
            precision: by its name.
            stored: the format that it stands for.

        Raises:
            InvalidInputError: it would quantise them anew.
        """
        if stored.bits not in (None, self.bits) or stored.float8:
            raise InvalidInputError(
                f"Precision {precision} would quantise anew what {name} holds in {self.bits} bits ({self.method}); "
                f"expected int{self.bits}, which keeps these numbers, or fp32 or fp16, which hold the values that they "
                "stand for."
            )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised weight, and the columns of the weight that its columns are; None means the same ones."""

    weight: Blockwise
    order: NDArray[np.int64] | None  # [columns]


def packed_shape(packing: Packing, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Rows and columns of a projection, from the shapes of its parts.

    Raises:
        CheckpointError: a part is missing, or they do not go together.
    """
    rows, _, columns, _ = _sizes(packing, module, shapes)
    return rows, columns


def repack(packing: Packing, module: str, parts: Mapping[str, torch.Tensor]) -> PackedWeight:
    """A projection in ONNX Runtime's layout, its levels, zero points and scales as they are.

    Args:
        packing: of the checkpoint.
        module: name of the projection, for errors.
        parts: `qweight`, `qzeros`, `scales` and, of GPTQ, `g_idx` if it is there; see the head of this file.

    Raises:
        CheckpointError: parts that do not go together, groups that ONNX Runtime's blocks cannot express, scales that
            are no numbers, or a zero point that libraries take differently.
    """
    _, bits, columns, groups = _sizes(packing, module, {part: tuple(tensor.shape) for part, tensor in parts.items()})
    scales = parts["scales"].to(torch.float32)
    if not torch.isfinite(scales).all():
        raise CheckpointError(f"The tensor '{module}.scales' holds NaN or infinite values; the checkpoint is damaged.")
    zeros = _levels(parts["qzeros"], bits)  # [groups, rows]
    if packing.method == "awq":
        levels, zeros = _awq_rows(_levels(parts["qweight"], bits)).T, _awq_rows(zeros)
    else:
        levels = _levels(parts["qweight"].T, bits)  # [rows, columns]
        if packing.zero_offset and bool((zeros == 2**bits - 1).any()):
            raise CheckpointError(
                f"The tensor '{module}.qzeros' holds the zero point {2**bits - 1} less 1, which some libraries take "
                f"for 0 and others for {2**bits}. Save the checkpoint with checkpoint_format gptq_v2."
            )
        zeros = zeros + packing.zero_offset
    order, size = _order(packing, module, parts.get("g_idx"), columns, groups)
    if order is not None:
        levels = levels[:, torch.from_numpy(order)]
    block = _block_size(module, size, columns, groups)
    repeats, blocks = -(-size // block), -(-columns // block)
    scales, zeros = (part.T.repeat_interleave(repeats, dim=1)[:, :blocks] for part in (scales, zeros))
    symmetric = bool((zeros == 2 ** (bits - 1)).all())
    weight = from_levels(levels, scales, None if symmetric else zeros, bits=bits, block_size=block)
    return PackedWeight(weight, order)


def unpacked(packed: PackedWeight) -> torch.Tensor:
    """The float32 `[rows, columns]` that a packed weight stands for."""
    values = torch.from_numpy(dequantize(packed.weight))
    return values if packed.order is None else values[:, torch.from_numpy(np.argsort(packed.order))]


def _sizes(packing: Packing, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int, int]:
    """Rows, bits, columns and groups; the bits follow from the shapes, since some projections may have others."""
    if missing := [part for part in PARTS[:3] if part not in shapes]:
        raise CheckpointError(f"The checkpoint holds '{module}' quantised, but not '{module}.{missing[0]}'.")
    qweight, qzeros, scales = (shapes[part] for part in PARTS[:3])
    if len(qweight) == len(qzeros) == len(scales) == 2 and 0 not in qweight + qzeros + scales:
        groups, rows = scales
        bits = 32 * qzeros[1] // rows
        columns = qweight[0] if packing.method == "awq" else 32 * qweight[0] // max(bits, 1)
        expected = (columns, qzeros[1]) if packing.method == "awq" else (columns * bits // 32, rows)
        whole = 32 * qzeros[1] == rows * bits and (packing.method == "gptq" or bits == 4)
        indexed = shapes.get("g_idx", (columns,)) in ((columns,), (0,))
        if bits in (4, 8) and whole and qzeros[0] == groups and qweight == expected and indexed:
            return rows, bits, columns, groups
    found = ", ".join(f"{part} {shapes[part]}" for part in PARTS if part in shapes)
    raise CheckpointError(
        f"The quantised projection {module!r} has parts that do not go together as {packing.method} packs 4"
        f"{' or 8' if packing.method == 'gptq' else ''} bits: {found}. Other numbers of bits are not supported."
    )


def _levels(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The uint8 levels that int32 words `[n, m]` hold along their last axis, the lowest bits first."""
    packed = words.contiguous().view(torch.uint8)  # little-endian
    if bits == 8:
        return packed
    return torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2)


def _awq_rows(levels: torch.Tensor) -> torch.Tensor:
    """Put the rows of every eight, which lie along the last axis, in their order."""
    inverse = torch.tensor(_AWQ_ROWS).argsort()
    return levels.reshape(len(levels), -1, len(_AWQ_ROWS))[..., inverse].flatten(-2)


def _order(
    packing: Packing, module: str, g_idx: torch.Tensor | None, columns: int, groups: int
) -> tuple[NDArray[np.int64] | None, int]:
    """The columns sorted by group, None where they are, and the size of a group."""
    if g_idx is None or not g_idx.numel():
        if packing.reordered and groups > 1:
            raise CheckpointError(
                f"The quantised projection {module!r} has no g_idx, but desc_act in quantization_config says that its "
                "columns are in activation order, so their groups cannot be told; the checkpoint is incomplete."
            )
        size = columns if packing.group_size == -1 else packing.group_size
        if -(-columns // size) != groups:
            raise CheckpointError(
                f"The quantised projection {module!r} has {groups} groups, but {columns} columns in groups of {size} "
                "make another number; configuration and weights do not belong together."
            )
        return None, size
    index = g_idx.to(torch.int64).numpy()
    order = np.argsort(index, kind="stable")
    size = max(1, int((index == 0).sum()))
    if -(-columns // size) != groups or (index[order] != np.arange(columns) // size).any():
        raise CheckpointError(
            f"The quantised projection {module!r} has {groups} groups of different sizes (g_idx), which ONNX Runtime's "
            "blocks cannot express; expected equal ones, the last one excepted."
        )
    return (None if (order == np.arange(columns)).all() else order.astype(np.int64)), size


def _block_size(module: str, size: int, columns: int, groups: int) -> int:
    """Columns of a block: a group's, or a part of it, whose scale is then repeated."""
    if size in BLOCK_SIZES:
        return size
    block = next((block for block in (128, 64, 32, 16) if size % block == 0), None)
    if block is None and groups == 1:
        block = 16 if columns < 128 else 128  # the last block is padded: there is no other scale
    if block is None:
        raise CheckpointError(
            f"The quantised projection {module!r} has groups of {size} columns; ONNX Runtime reads blocks of "
            f"{', '.join(map(str, BLOCK_SIZES))}, so expected one of these or a multiple of 16."
        )
    return block
