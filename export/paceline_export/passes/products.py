"""Write every product with a weight the same way: `MatMul`, and `Add` for a bias."""

from __future__ import annotations

import onnx_ir as ir

from .initializers import replace

__all__ = ["split_products"]


def split_products(model: ir.Model) -> int:
    """Replace `Gemm` of plain factors by `MatMul` and `Add`, in place: weights are found, and stored, in the former.

    Returns:
        The number replaced.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Gemm" or node.domain:
            continue
        flags = {name: node.attributes[name].value for name in ("alpha", "beta", "transA") if name in node.attributes}
        if (flags.get("alpha", 1.0), flags.get("beta", 1.0), flags.get("transA", 0)) != (1.0, 1.0, 0):
            continue
        x, weight, *bias = node.inputs
        nodes = []
        if "transB" in node.attributes and node.attributes["transB"].as_int():
            nodes.append(ir.node("Transpose", [weight], {"perm": [1, 0]}))
            weight = nodes[-1].outputs[0]
        nodes.append(ir.node("MatMul", [x, weight]))
        if bias and bias[0] is not None:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias[0]]))
            product = nodes[-2].outputs[0]
            product.type, product.shape = node.outputs[0].type, node.outputs[0].shape
        replace(model, node, nodes)
        count += 1
    return count
