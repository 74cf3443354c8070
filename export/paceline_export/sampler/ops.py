"""A small writer of ONNX graphs: every operator is one call, and values are known by their names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike
from onnx import helper, numpy_helper

import paceline

__all__ = ["OPSET", "Ops"]

# The lowest opset whose operators do; ONNX Runtime's providers and TensorRT's parser know it.
OPSET = 20
_IR_VERSION = 10


class Ops:
    """Nodes of one graph, or of one branch of an `If`, in the order in which they run.

    A branch may use every value of the graph around it. Values are the strings that name them.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._numbers = itertools.count() if numbers is None else numbers
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append an operator and return its first output."""
        return self.several(op_type, 1, *inputs, **attributes)[0]

    def several(self, op_type: str, num_outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """Append an operator with several outputs."""
        outputs = [f"{op_type}_{next(self._numbers)}" for _ in range(num_outputs)]
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=outputs[0], **attributes))
        return outputs

    def constant(self, value: ArrayLike, dtype: DTypeLike = np.float32) -> str:
        """A constant tensor; a number gives a scalar."""
        return self("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def ints(self, *values: int) -> str:
        """A constant int64 vector: axes and shapes."""
        return self.constant(values, np.int64)

    def numbers(self, count: str) -> str:
        """0, 1, … up to below `count`, an int64 vector of one entry.

        Not `Range`: TensorRT takes the size of its output for one that depends on data, even where it is constant.
        """
        one = self.constant([1], np.int64)
        return self("CumSum", self("Expand", one, count), self.constant(0, np.int64), exclusive=1)

    def cast(self, value: str, dtype: DTypeLike) -> str:
        """Convert to a dtype of numpy."""
        return self("Cast", value, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def either(
        self, condition: str, then: Callable[[Ops], str], otherwise: Callable[[Ops], str], dtype: DTypeLike = np.float32
    ) -> str:
        """The value of one of two branches, of which only that one runs; `condition` is a bool scalar."""
        return self("If", condition, then_branch=self._branch(then, dtype), else_branch=self._branch(otherwise, dtype))

    def input(self, name: str, dtype: DTypeLike, shape: Sequence[int | str]) -> str:
        """Declare an input of the graph."""
        self._inputs.append(_value_info(name, dtype, shape))
        return name

    def output(self, name: str, value: str, dtype: DTypeLike, shape: Sequence[int | str]) -> None:
        """Declare `value` an output of the graph under this name."""
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(_value_info(name, dtype, shape))

    def model(self, name: str) -> onnx.ModelProto:
        """The finished graph."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=_IR_VERSION,
            producer_name="paceline",
            producer_version=paceline.__version__,
        )
        onnx.checker.check_model(model, full_check=True)
        return model

    def _branch(self, build: Callable[[Ops], str], dtype: DTypeLike) -> onnx.GraphProto:
        branch = Ops(self._numbers)
        result = branch("Identity", build(branch))
        output = helper.make_tensor_value_info(result, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        return helper.make_graph(branch._nodes, f"branch_{next(self._numbers)}", [], [output])


def _value_info(name: str, dtype: DTypeLike, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))
