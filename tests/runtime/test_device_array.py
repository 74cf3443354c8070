"""Arrays that ONNX Runtime allocates, in the CPU's memory: views and copies."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.device_array import DeviceArray, fill, on_host, placed
from paceline.errors import InvalidInputError


def numbers() -> np.ndarray:
    return np.arange(24, dtype=np.float32).reshape(4, 3, 2)


def test_what_is_written_comes_back() -> None:
    array = DeviceArray.empty("cpu", (4, 3, 2), np.float32)
    array.write(numbers())
    np.testing.assert_array_equal(array.numpy(), numbers())
    assert (len(array), array.nbytes) == (4, 96)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64, np.bool_])
def test_views_lie_in_the_same_memory(dtype: type) -> None:
    whole: np.ndarray = numbers().astype(dtype)
    array = placed(whole, "cpu")
    assert isinstance(array, DeviceArray)
    for key in (slice(1, 3), slice(2, None), slice(None, -1), slice(3, 3)):
        view = array[key]
        np.testing.assert_array_equal(view.numpy(), whole[key])
        assert view.pointer == array.pointer + (key.start or 0) * 6 * whole.itemsize
        np.testing.assert_array_equal(array[key, np.newaxis].numpy(), whole[key, np.newaxis])
    assert array[np.newaxis].shape == (1, 4, 3, 2)
    np.testing.assert_array_equal(array[1:][1:2].numpy(), whole[2:3])


def test_a_copy_does_not_follow() -> None:
    array = placed(numbers(), "cpu")
    before = on_host(array)
    fill(array, np.zeros((4, 3, 2)))
    np.testing.assert_array_equal(before, numbers())
    assert not on_host(array).any()


def test_without_a_device_nothing_is_copied() -> None:
    whole = numbers()
    assert placed(whole, None) is whole
    assert on_host(whole) is whole
    fill(whole, np.ones((4, 3, 2)))
    assert whole.all()


def test_an_array_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(InvalidInputError, match=r"^cpu has no room for 70368744177664 bytes of float32 .*fewer tokens"):
        DeviceArray.empty("cpu", (1 << 44,), np.float32)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        (slice(0, 4), np.zeros((4, 3, 2), np.float16)),
        (slice(0, 4), np.zeros((4, 3), np.float32)),
        (slice(1, 3), np.zeros((2, 3, 2), np.float32)),
    ],
)
def test_other_shapes_and_dtypes_and_parts_cannot_be_filled(part: slice, values: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match="Cannot fill"):
        DeviceArray.empty("cpu", (4, 3, 2), np.float32)[part].write(values)
