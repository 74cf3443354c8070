from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from paceline.errors import InvalidInputError
from paceline.ort_session import open_session
from paceline_export.quantize.blockwise import Blockwise, dequantize, quantize

KINDS = [(bits, block, symmetric) for bits in (4, 8) for block in (16, 32, 128) for symmetric in (True, False)]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "block", "symmetric"), KINDS)
def test_no_value_is_further_than_half_a_step_from_its_level(bits: int, block: int, symmetric: bool) -> None:
    original = weight(24, 144)
    stored = quantize(original, bits=bits, block_size=block, symmetric=symmetric)
    error = np.abs(dequantize(stored) - original.numpy())
    steps = np.repeat(np.abs(stored.scales), block, axis=1)[:, :144]
    # The symmetric levels have one more below zero than above: the far end on the other side may miss by a step.
    assert (error <= steps * ((1.0 if symmetric else 0.5) + 1e-4)).all()
    assert error.mean() <= steps.mean() * 0.26


@pytest.mark.parametrize("symmetric", [True, False])
def test_values_on_the_grid_survive_exactly(symmetric: bool) -> None:
    levels = torch.arange(-8, 8).repeat(3, 2).to(torch.float32) * 0.25  # [3, 32], the extreme is -8 steps
    stored = quantize(levels, bits=4, block_size=16, symmetric=symmetric)
    np.testing.assert_array_equal(dequantize(stored), levels.numpy())


def test_a_block_of_zeros_stays_zero() -> None:
    for symmetric in (True, False):
        stored = quantize(torch.zeros(2, 64), bits=4, block_size=32, symmetric=symmetric)
        np.testing.assert_array_equal(dequantize(stored), np.zeros((2, 64), np.float32))


def test_pieces_of_a_large_weight_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(weight(50, 96), bits=4, block_size=32, symmetric=False)
    monkeypatch.setattr("paceline_export.quantize.blockwise._CHUNK", 7 * 96)
    pieces = quantize(weight(50, 96), bits=4, block_size=32, symmetric=False)
    np.testing.assert_array_equal(whole.packed, pieces.packed)
    np.testing.assert_array_equal(whole.scales, pieces.scales)
    np.testing.assert_array_equal(whole.zero_points, pieces.zero_points)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    damaged = weight(4, 32)
    damaged[1, 3] = bad
    with pytest.raises(InvalidInputError, match="damaged"):
        quantize(damaged, bits=4, block_size=16, symmetric=True)


@pytest.mark.parametrize(("bits", "block"), [(3, 32), (4, 48), (8, 0)])
def test_unknown_bits_and_blocks_are_refused(bits: int, block: int) -> None:
    with pytest.raises(InvalidInputError, match="expected 4 or 8 bits"):
        quantize(weight(4, 64), bits=bits, block_size=block, symmetric=True)


def run(op: str, inputs: dict[str, np.ndarray[Any, Any]], fed: str, **attributes: Any) -> np.ndarray[Any, Any]:
    """Run one operator of ONNX Runtime whose inputs, but for `fed`, are constants."""
    dtype = TensorProto.FLOAT if inputs[fed].dtype == np.float32 else TensorProto.INT64
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y"], domain="com.microsoft", **attributes)],
        "g",
        [helper.make_tensor_value_info(fed, dtype, inputs[fed].shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in inputs.items() if name != fed],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = open_session(model.SerializeToString())  # on the threads that the process shares, if it has some
    return np.asarray(session.run(None, {fed: inputs[fed]})[0])


@pytest.mark.parametrize(("bits", "block", "symmetric"), KINDS)
@pytest.mark.parametrize("columns", [128, 144])  # 144 leaves the last block padded
def test_onnxruntime_multiplies_by_the_values_that_are_stored(
    bits: int, block: int, symmetric: bool, columns: int
) -> None:
    stored = quantize(weight(40, columns), bits=bits, block_size=block, symmetric=symmetric)
    x = weight(3, columns, seed=1).numpy()
    inputs: dict[str, np.ndarray[Any, Any]] = {"x": x, "q": stored.packed, "scales": stored.scales.reshape(-1)}
    if stored.zero_points is not None:
        inputs["zero_points"] = stored.zero_points.reshape(-1)
    found = run("MatMulNBits", inputs, "x", K=columns, N=40, bits=bits, block_size=block, accuracy_level=1)
    np.testing.assert_allclose(found, x @ dequantize(stored).T, atol=2e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_onnxruntime_looks_up_the_rows_that_are_stored(bits: int) -> None:
    stored: Blockwise = quantize(weight(30, 96), bits=bits, block_size=32, symmetric=True)
    ids = np.array([[3, 0, 29]], np.int64)
    inputs: dict[str, np.ndarray[Any, Any]] = {"q": stored.packed.reshape(30, -1), "ids": ids, "scales": stored.scales}
    found = run("GatherBlockQuantized", inputs, "ids", gather_axis=0, quantize_axis=1, block_size=32, bits=bits)
    np.testing.assert_allclose(found[0], dequantize(stored)[ids[0]], rtol=1e-6)
