"""Take out of a graph what rounds the inputs of its products to few bits."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["leave_inputs"]


def leave_inputs(model: ir.Model) -> None:
    """Let products read what is in front of pairs of `QuantizeLinear` and `DequantizeLinear`, in place."""
    for node in list(model.graph):
        if node.op_type != "QuantizeLinear":
            continue
        for user in {user for user, _ in node.outputs[0].uses()}:
            user.outputs[0].replace_all_uses_with(node.inputs[0])
            model.graph.remove(user, safe=True)
        model.graph.remove(node, safe=True)
