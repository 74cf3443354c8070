"""Give a graph constants by name, and put nodes in the place of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

__all__ = ["constant", "initializer", "replace"]


def constant(model: ir.Model, name: str, array: NDArray[np.generic], dtype: ir.DataType | None = None) -> ir.Value:
    """The initializer of this name, with these values; `dtype` rounds floats to it."""
    tensor = ir.tensor(array if dtype is None else array.astype(dtype.numpy()), dtype=dtype, name=name)
    value = initializer(model, name, tensor.dtype, tuple(array.shape))
    value.const_value = tensor
    return value


def initializer(model: ir.Model, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    """The initializer of this name, made without a value if there is none."""
    if name not in model.graph.initializers:
        model.graph.initializers[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    return model.graph.initializers[name]


def replace(model: ir.Model, old: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Put a chain of nodes, whose last one has one output, in the place of `old`."""
    for node in nodes:
        model.graph.insert_before(old, node)
    (output,) = nodes[-1].outputs
    output.name = old.outputs[0].name
    output.type, output.shape = old.outputs[0].type, old.outputs[0].shape
    old.outputs[0].replace_all_uses_with(output, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)
