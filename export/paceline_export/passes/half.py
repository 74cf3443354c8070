"""Turn a bfloat16 graph into a float16 one: the same operators in the nearest dtype that CPUs run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

__all__ = ["to_float16"]

_OLD, _NEW = ir.DataType.BFLOAT16, ir.DataType.FLOAT16
_END = float(np.finfo(np.float16).max)


def to_float16(model: ir.Model) -> None:
    """Replace bfloat16 by float16 everywhere, in place; what is beyond float16 becomes its largest number."""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        _retype(value)
    for node in model.graph:
        for value in node.outputs:
            _retype(value)
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == _OLD:
                node.attributes[name] = ir.AttrTensor(name, _half(attribute.as_tensor()))
            elif name in ("to", "output_dtype") and attribute.as_int() == _OLD:
                node.attributes[name] = ir.AttrInt64(name, _NEW)


def _retype(value: ir.Value) -> None:
    if value.dtype != _OLD:
        return
    value.type = ir.TensorType(_NEW)
    if (tensor := value.const_value) is not None:
        value.const_value = ir.LazyTensor(lambda: _half(tensor), dtype=_NEW, shape=tensor.shape, name=value.name)


def _half(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    array = tensor.numpy()
    if array.dtype != ml_dtypes.bfloat16:
        array = array.view(ml_dtypes.bfloat16)
    return ir.tensor(array.astype(np.float32).clip(-_END, _END).astype(np.float16), name=tensor.name)
