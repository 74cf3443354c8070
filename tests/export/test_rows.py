"""Eight bits with one scale for each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import InvalidInputError
from paceline_export.quantize.blockwise import dequantize
from paceline_export.quantize.rows import quantize_rows


def test_values_are_met_within_half_a_level() -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 40)[:, None]
    found = quantize_rows(weight)
    assert (found.bits, found.block_size, found.columns, found.scales.shape) == (8, 100, 100, (40, 1))
    np.testing.assert_array_equal(found.scales.astype(np.float16), found.scales)  # as they will be stored
    # float16 rounds a scale by up to 2 ** -11 of it (more below 2 ** -14), which moves the outermost level
    slack = 0.5 + 127 * 2**-11
    normal = found.scales[:, 0] >= 2**-14
    error = np.abs(dequantize(found) - weight.numpy()) / found.scales
    assert normal.sum() > 20
    assert error[normal].max() <= slack
    levels = found.packed.astype(int) - 128
    assert (np.abs(levels).max(axis=(1, 2))[normal] >= 126).all()
    assert levels.min() >= -127


def test_a_row_of_zeros_stays_zero_with_a_positive_scale() -> None:
    found = quantize_rows(torch.zeros(3, 16))
    assert (found.scales > 0).all()
    assert not dequantize(found).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    weight = torch.ones(4, 4)
    weight[2, 1] = value
    with pytest.raises(InvalidInputError, match="damaged"):
        quantize_rows(weight)
