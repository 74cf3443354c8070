"""Run an expert only in passes where a row chose it: each becomes the branch of an `If`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .initializers import constant

__all__ = ["skip_experts"]


def skip_experts(model: ir.Model) -> int:
    """Put what an expert computes, and its addition to the sum, behind the question whether any row chose it, in place.

    An expert is what `paceline_export.experts` traced: `sum + Where(chosen, part, 0)`.

    Returns:
        The number of experts.
    """
    count = 0
    places = {node: place for place, node in enumerate(model.graph)}
    for add in list(places):
        where = add.inputs[1].producer() if add.op_type == "Add" and add.inputs[1] is not None else None
        if where is None or where.op_type != "Where" or len(where.outputs[0].uses()) != 1:
            continue
        total, chosen = add.inputs[0], where.inputs[0]
        nodes = sorted(_only_for(add, keep={total.producer(), chosen.producer()}), key=places.__getitem__)
        if not any(node.op_type in ("MatMul", "MatMulNBits") for node in nodes):
            continue
        result = add.outputs[0]
        as_number = ir.node("Cast", [chosen], {"to": ir.DataType.FLOAT})
        any_row = ir.node("ReduceMax", [as_number.outputs[0]], {"keepdims": 0})
        zero = constant(model, "experts.zero", np.zeros((), np.float32))
        asked = ir.node("Greater", [any_row.outputs[0], zero])
        skipped = ir.node("Identity", [total])
        skipped.outputs[0].type, skipped.outputs[0].shape = result.type, result.shape
        branch = ir.node("If", [asked.outputs[0]], {}, num_outputs=1)
        output = branch.outputs[0]
        output.type, output.shape = result.type, result.shape
        output.name, result.name = result.name, f"{result.name}.asked"
        skipped.outputs[0].name = f"{output.name}.skipped"
        for node in (as_number, any_row, asked, branch):
            model.graph.insert_before(add, node)
        result.replace_all_uses_with(output)
        model.graph.remove(nodes)
        for name, inside, last in (("then", nodes, result), ("else", [skipped], skipped.outputs[0])):
            graph = ir.Graph([], [last], nodes=inside, name=f"{output.name}.{name}")
            branch.attributes[f"{name}_branch"] = ir.AttrGraph(f"{name}_branch", graph)
        count += 1
    return count


def _only_for(node: ir.Node, keep: set[ir.Node | None]) -> set[ir.Node]:
    """The node, and those that nothing else needs; without `keep` and what is in front of it."""
    inside = {node}
    changed = [node]
    while changed:
        for value in changed.pop().inputs:
            producer = value.producer() if value is not None else None
            if producer is None or producer in inside or producer in keep or producer.op_type == "If":
                continue
            if all(user in inside for output in producer.outputs for user, _ in output.uses()):
                inside.add(producer)
                changed += [producer, *inside]  # an earlier one may be free now
    return inside
