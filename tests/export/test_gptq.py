"""GPTQ: less error on the inputs that a weight is used with than rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline_export.quantize.blockwise import Blockwise, dequantize, from_levels, quantize
from paceline_export.quantize.gptq import gptq


def correlated(count: int, columns: int, seed: int) -> torch.Tensor:
    """Inputs `[count, columns]` whose columns depend on each other, as those of a layer do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns // 4, columns, generator=torch.Generator().manual_seed(0))
    few = torch.randn(count, columns // 4, generator=generator)
    return few @ mixing + 0.3 * torch.randn(count, columns, generator=generator)


def error(weight: torch.Tensor, stored: Blockwise, x: torch.Tensor) -> float:
    return float(((torch.from_numpy(dequantize(stored)) - weight) @ x.T).square().mean())


def calibrated(weight: torch.Tensor, hessian: torch.Tensor, *, symmetric: bool = True) -> Blockwise:
    return gptq(weight, hessian, bits=4, block_size=32, symmetric=symmetric, damping=0.01)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [128, 144])  # 144 leaves the last block padded
def test_the_error_on_new_inputs_is_smaller_than_that_of_rounding(symmetric: bool, columns: int) -> None:
    weight = torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
    seen, new = correlated(2000, columns, 2), correlated(500, columns, 3)
    stored = calibrated(weight, (seen.T @ seen)[None], symmetric=symmetric)
    rounded = quantize(weight, bits=4, block_size=32, symmetric=symmetric)
    assert error(weight, stored, new) < 0.6 * error(weight, rounded, new)
    assert stored.packed.shape == rounded.packed.shape
    assert stored.scales.shape == rounded.scales.shape
    assert (stored.zero_points is None) == symmetric


def test_groups_of_columns_are_quantised_apart() -> None:
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    halves = [correlated(500, 64, seed) for seed in (2, 3)]
    moments = torch.stack([x.T @ x for x in halves])
    whole = dequantize(calibrated(weight, moments))
    for i in range(2):
        columns = slice(64 * i, 64 * i + 64)
        half = dequantize(calibrated(weight[:, columns], moments[i : i + 1]))
        np.testing.assert_array_equal(whole[:, columns], half)


def test_inputs_that_are_never_seen_change_nothing_and_zero_weights_stay() -> None:
    nothing = torch.zeros(1, 64, 64)
    stored = calibrated(torch.zeros(4, 64), nothing)
    np.testing.assert_array_equal(dequantize(stored), np.zeros((4, 64), np.float32))
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    stored = calibrated(weight, nothing)
    assert np.abs(dequantize(stored) - weight.numpy()).max() <= 1.01 * np.abs(stored.scales).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_levels_are_packed_as_quantize_packs_them(bits: int) -> None:
    original = torch.randn(6, 80, generator=torch.Generator().manual_seed(0))
    expected = quantize(original, bits=bits, block_size=32, symmetric=True)
    values = torch.from_numpy(dequantize(expected))
    scales = torch.from_numpy(expected.scales)
    levels = (values / scales.repeat_interleave(32, 1)[:, :80]).round() + 2 ** (bits - 1)
    found = from_levels(levels.to(torch.uint8), scales, None, bits=bits, block_size=32)
    np.testing.assert_array_equal(found.packed, expected.packed)
    np.testing.assert_array_equal(dequantize(found), dequantize(expected))
