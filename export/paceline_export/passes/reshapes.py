"""Remove pairs of reshapes that cancel out: heads are split for transformers and joined again for the operator."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

__all__ = ["drop_reshape_pairs"]


def drop_reshape_pairs(model: ir.Model) -> int:
    """Replace `Reshape(Reshape(x))` by `x` where the shape comes out as it went in, in place.

    Returns:
        The number of pairs removed.
    """
    count = 0
    for node in model.graph:
        if node.op_type != "Reshape":
            continue
        inner = node.inputs[0].producer()
        if inner is None or inner.op_type != "Reshape":
            continue
        original = inner.inputs[0]
        if original.shape is None or original.shape != node.outputs[0].shape:
            continue
        node.outputs[0].replace_all_uses_with(original)
        count += 1
    RemoveUnusedNodesPass()(model)
    return count
