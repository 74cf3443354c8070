"""Weights that a checkpoint holds as numbers of 8 bits with scales: what they stand for, to be stored anew.

A weight `X.weight [rows, columns]`, float8 (e4m3 or e5m2) or int8, stands for itself times

```
X.weight_scale_inv   float  [rows / R, columns / C], rounded up: one for each block of weight_block_size [R, C]; or one
X.weight_scale       float  the same, or [rows] or [rows, 1]
```

Both names mean the factor. Scales may be powers of two as one byte each (float8 e8m0). Sources: transformers'
`_dequantize_fp8_weight`, compressed-tensors' `dequantize`. What inputs were divided by (`input_scale`) is left out:
paceline's own formats round inputs by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import CheckpointError

__all__ = ["SCALED_KINDS", "SCALE_KINDS", "SCALE_NAMES", "Scaling", "check_scales", "unscaled"]

SCALED_KINDS = ("F8_E4M3", "F8_E5M2", "I8")  # as Safetensors names them
SCALE_KINDS = ("F64", "F32", "F16", "BF16", "F8_E8M0")
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
# Formats of compressed-tensors whose weights are one number of 8 bits each.
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a checkpoint scales its weights.

    Attributes:
        method: `fp8`, `fbgemm_fp8` or `compressed-tensors`.
        block: rows and columns that share a scale, where the configuration says so.
    """

    method: str
    block: tuple[int, int] | None

    @classmethod
    def from_config(cls, name: str, settings: Any) -> Scaling | None:
        """The scaling that `quantization_config` of a checkpoint's configuration describes; None for other methods.

        Raises:
            CheckpointError: a method of these, in a form that is not supported.
        """
        if not isinstance(settings, Mapping):
            return None
        method = settings.get("quant_method")
        if method == "compressed-tensors":
            return cls(method, _compressed_block(name, settings))
        if method not in ("fp8", "fbgemm_fp8"):
            return None
        if settings.get("expert_dtype", "fp8") != "fp8":
            raise CheckpointError(
                f"{name}: its experts are stored as {settings['expert_dtype']!r:.20}; expected fp8. Export another "
                "checkpoint of this model."
            )
        return cls(method, _block(name, settings.get("weight_block_size")))


def check_scales(module: str, weight: Sequence[int], scale: Sequence[int], block: tuple[int, int] | None) -> None:
    """Check the shape of the scales of a weight `[rows, columns]`, before any of them is read.

    Raises:
        CheckpointError: it is none that scales have.
    """
    rows, columns = weight
    whole = all(size == 1 for size in scale)
    by_blocks = block is not None and tuple(scale) == (-(-rows // block[0]), -(-columns // block[1]))
    if not whole and tuple(scale) not in ((rows,), (rows, 1)) and not by_blocks:
        raise CheckpointError(
            f"The weight of {module!r} is {rows} x {columns} with scales of shape {tuple(scale)}; expected one, one "
            f"for each row, or one for each block of {' x '.join(map(str, block)) if block else 'weight_block_size'}."
        )


def unscaled(module: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """What a scaled weight stands for, float32 `[rows, columns]`.

    Args:
        module: its name without `.weight`, for errors.
        weight: of 8 bits `[rows, columns]`.
        scale: see the head of this file.
        block: rows and columns that share a scale, as the configuration says; None where it does not.

    Raises:
        CheckpointError: scales of another shape, or that are no numbers.
    """
    check_scales(module, weight.shape, scale.shape, block)
    rows, columns = weight.shape
    factors = scale.to(torch.float32)
    if not torch.isfinite(factors).all():
        raise CheckpointError(f"The scales of {module!r} hold NaN or infinite values; the checkpoint is damaged.")
    result = weight.to(torch.float32)
    if factors.numel() == 1:
        return result.mul_(factors.reshape(()))
    if tuple(factors.shape) in ((rows,), (rows, 1)):
        return result.mul_(factors.reshape(rows, 1))
    if block is not None:
        for index, factor in enumerate(factors):  # some rows at a time: spread out, scales are as large as the weight
            part = result[index * block[0] : (index + 1) * block[0]]
            part.mul_(factor.repeat_interleave(block[1])[:columns])
    return result


def _block(name: str, size: Any, setting: str = "weight_block_size") -> tuple[int, int] | None:
    if size is None:
        return None
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in size)
    ):
        raise CheckpointError(
            f"{name}: {setting} in its quantization_config is {size!r:.40}; expected two positive numbers, "
            "rows and columns."
        )
    return size[0], size[1]


def _compressed_block(name: str, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The one size of blocks that the groups of a compressed-tensors configuration have, if they have blocks."""
    groups = _setting(name, settings, "config_groups", Mapping, "groups by name") or {}
    whole = _setting(name, settings, "format", str, "a text")
    weights, formats = [], set()
    for key in groups:
        group = _setting(name, groups, key, Mapping, "the settings of a group") or {}
        formats.add(str(_setting(name, group, "format", str, "a text") or whole))
        if of_weights := _setting(name, group, "weights", Mapping, "settings by name"):
            weights.append(of_weights)
    formats = formats or {str(whole)}
    bits = {_setting(name, weight, "num_bits", int, "a whole number") for weight in weights}
    if not formats <= set(_FORMATS) or not bits <= {8}:
        raise CheckpointError(
            f"{name}: its weights are quantised by compressed-tensors in the format {', '.join(sorted(formats))} with "
            f"{', '.join(map(str, sorted(bits, key=str))) or 'unknown'} bits; expected {', '.join(_FORMATS)} with 8. "
            "Export another checkpoint of this model: the unquantised one, GPTQ, AWQ, or a GGUF file."
        )
    if any(weight.get("symmetric") is False for weight in weights):
        raise CheckpointError(
            f"{name}: its weights are quantised by compressed-tensors with zero points; expected symmetric ones. "
            "Export another checkpoint of this model."
        )
    blocks = {_block(name, size, "block_structure") for weight in weights if (size := weight.get("block_structure"))}
    if len(blocks) > 1:
        raise CheckpointError(f"{name}: its weights are quantised in blocks of several sizes; expected one.")
    return blocks.pop() if blocks else None


def _setting(name: str, settings: Mapping[str, Any], key: str, kind: type, expected: str) -> Any:
    """A setting of a `quantization_config`, None where it is not given.

    Raises:
        CheckpointError: it is of another type.
    """
    value = settings.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise CheckpointError(f"{name}: {key} in its quantization_config is {value!r:.40}; expected {expected}.")
    return value
