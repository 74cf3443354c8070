"""Packs random projections as GPTQ and AWQ checkpoints hold them, number by number, from the formats' definitions.

Written apart from the code under test: integers of Python, one loop for each definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row of each nibble of a word, the lowest nibble first


@dataclass(frozen=True)
class Projection:
    """Levels `[rows, columns]`, zero points and scales `[rows, groups]`, and the group of each column."""

    levels: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    groups: NDArray[np.int64]
    bits: int

    @classmethod
    def random(
        cls, rows: int, columns: int, *, bits: int, size: int, symmetric: bool, act_order: bool, seed: int
    ) -> Projection:
        random = np.random.default_rng(seed)
        size = columns if size == -1 else size
        count, top = -(-columns // size), 2**bits
        zeros = np.full((rows, count), top // 2) if symmetric else random.integers(1, top, (rows, count))
        groups = np.arange(columns) // size
        if act_order:
            groups = groups[np.random.default_rng(columns).permutation(columns)]  # alike for alike inputs, as GPTQ's
        levels = random.integers(0, top, (rows, columns))
        scales = random.uniform(0.5, 1.5, (rows, count)) * (8 / top / columns**0.5)
        return cls(levels, zeros, scales.astype(np.float16), groups, bits)

    def values(self) -> NDArray[np.float32]:
        """What the numbers stand for, float32 `[rows, columns]`."""
        zeros, scales = self.zeros[:, self.groups], self.scales.astype(np.float32)[:, self.groups]
        return (self.levels - zeros).astype(np.float32) * scales


def words(numbers: list[int], bits: int) -> list[int]:
    """Signed 32-bit words that hold numbers in turn, the first one lowest."""
    per_word = 32 // bits
    found = []
    for start in range(0, len(numbers), per_word):
        word = sum(number << (bits * i) for i, number in enumerate(numbers[start : start + per_word]))
        found.append(word - (1 << 32) if word >= 1 << 31 else word)
    return found


def gptq(projection: Projection, *, offset: int = 1) -> dict[str, torch.Tensor]:
    """GPTQ: words of consecutive columns, zero points of consecutive rows less `offset`."""
    p = projection
    qweight = [words([int(level) for level in row], p.bits) for row in p.levels]  # by rows, as the words run
    qzeros = [words([int(zero) - offset for zero in p.zeros[:, group]], p.bits) for group in range(p.zeros.shape[1])]
    return {
        "qweight": torch.tensor(qweight, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(qzeros, dtype=torch.int32),
        "scales": torch.from_numpy(p.scales.T.copy()),
        "g_idx": torch.tensor(p.groups, dtype=torch.int32),
    }


def awq(projection: Projection) -> dict[str, torch.Tensor]:
    """AWQ's GEMM packing: words of eight rows, interleaved."""
    p = projection

    def interleaved(column: NDArray[np.int64]) -> list[int]:
        eights = [column[start : start + 8] for start in range(0, len(column), 8)]
        return words([int(eight[row]) for eight in eights for row in AWQ_ORDER], 4)

    return {
        "qweight": torch.tensor([interleaved(column) for column in p.levels.T], dtype=torch.int32),
        "qzeros": torch.tensor([interleaved(column) for column in p.zeros.T], dtype=torch.int32),
        "scales": torch.from_numpy(p.scales.T.copy()),
    }


def quantized_checkpoint(
    folder: Path,
    settings: dict[str, Any],
    pack: Callable[[Projection], dict[str, torch.Tensor]],
    *,
    bits: int = 4,
    size: int = 32,
    symmetric: bool = False,
    act_order: bool = False,
    left_out: tuple[str, ...] = (),
    other_bits: tuple[str, ...] = (),
) -> dict[str, Projection]:
    """Replace a checkpoint's projections, in place, by random ones that are packed; returns these by module name.

    LM head and modules that hold one of the names `left_out` stay; those of `other_bits` get 12 - `bits` bits.
    """
    weights = load_file(folder / "model.safetensors")
    projections = {}
    for seed, name in enumerate(sorted(weights)):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or any(part in module for part in left_out):
            continue
        rows, columns = weights.pop(name).shape
        own = 12 - bits if any(part in module for part in other_bits) else bits
        projections[module] = Projection.random(
            rows, columns, bits=own, size=size, symmetric=symmetric, act_order=act_order, seed=seed
        )
        weights |= {f"{module}.{part}": tensor for part, tensor in pack(projections[module]).items()}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"bits": bits, "group_size": size, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return projections
