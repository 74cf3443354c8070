"""Let a graph of the flavour `ort` take several texts in one pass, each with rows, keys and values of its own.

Everything but attention works on rows, whichever text they belong to; so the rows of all texts go through it together,
and the weights are read once. `GroupQueryAttention` takes several texts only with one row each: it is written once for
each text, between a `Split` of the rows and a `Concat`. It takes no text without rows, so an idle lane gets any row,
and its result is left out behind the `Concat`: two `Gather` do that. The graph's inputs and outputs are told in
`paceline.ort_lanes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from paceline.errors import InvalidInputError

from .folded import unfold_query_heads
from .initializers import constant

__all__ = ["split_into_lanes"]

_ATTENTION = "GroupQueryAttention"
# Inputs of the operator: query, key and value are split by rows, the others are a lane's own.
_ROWS, _PAST, _SEQLENS, _TOTAL = (0, 1, 2), (3, 4), 5, 6


def split_into_lanes(model: ir.Model, count: int) -> None:
    """Give a graph `count` lanes, in place; its weights stay where they are.

    Args:
        model: a graph of the flavour `ort`, as a bundle has it.
        count: number of lanes.

    Raises:
        InvalidInputError: something else than attention depends on which text a row belongs to, or where it stands.
    """
    unfold_query_heads(model)
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    nodes = [node for node in graph if node.op_type == _ATTENTION]
    _fix_batch(model, inputs)
    _check(inputs, nodes)
    ids, wanted, logits = inputs["input_ids"], inputs["logits_indices"], graph.outputs[0]
    _clear_shapes(model)
    ids.shape = ir.Shape([1, "rows"])
    logits.shape = ir.Shape([1, *logits.shape[1:]])

    lane_rows = _value("lane_rows", ir.DataType.INT64, [count])
    rows_in = _value("rows_in", ir.DataType.INT64, ["rows_of_lanes"])
    rows_out = _value("rows_out", ir.DataType.INT64, ["rows"])
    seqlens = [_value(f"lanes.{lane}.seqlens_k", ir.DataType.INT32, [1]) for lane in range(count)]
    totals = [_value(f"lanes.{lane}.total_sequence_length", ir.DataType.INT32, []) for lane in range(count)]
    own_inputs: list[list[ir.Value]] = [[one, total] for one, total in zip(seqlens, totals, strict=True)]
    own_outputs: list[list[ir.Value]] = [[] for _ in range(count)]
    # They lose their old outputs before these are replaced.
    graph.outputs[:] = [logits]
    for node in nodes:
        # Heads of query, key and value side by side, as the operator takes them in one input, too.
        heads = [value for place in _ROWS if (value := node.inputs[place]) is not None]
        packed = ir.node("Concat", heads, {"axis": 2})
        gathered = ir.node("Gather", [packed.outputs[0], rows_in], {"axis": 1})
        split = ir.node("Split", [gathered.outputs[0], lane_rows], {"axis": 1}, num_outputs=count)
        graph.insert_before(node, [packed, gathered, split])
        parts: list[ir.Value] = []
        for lane in range(count):
            past = [_in_lane(lane, node.inputs[place]) for place in _PAST]
            attend = ir.node(
                _ATTENTION,
                [split.outputs[lane], None, None, *past, seqlens[lane], totals[lane], *node.inputs[_TOTAL + 1 :]],
                dict(node.attributes),
                domain=node.domain,
                num_outputs=3,
            )
            for present, old in zip(attend.outputs[1:], node.outputs[1:], strict=True):
                present.name, present.type = f"lanes.{lane}.{old.name}", old.type
                present.shape = ir.Shape([1, old.shape[1], f"positions_{lane}", old.shape[3]])
            graph.insert_before(node, attend)
            own_inputs[lane] += past
            own_outputs[lane] += attend.outputs[1:]
            parts.append(attend.outputs[0])
        joined = ir.node("Concat", parts, {"axis": 1})
        result = ir.node("Gather", [joined.outputs[0], rows_out], {"axis": 1})
        graph.insert_before(node, [joined, result])
        node.outputs[0].replace_all_uses_with(result.outputs[0])
        graph.remove(node, safe=True)
    graph.inputs[:] = [ids, lane_rows, rows_in, rows_out, wanted, *(value for lane in own_inputs for value in lane)]
    graph.outputs[:] = [logits, *(value for lane in own_outputs for value in lane)]


def _fix_batch(model: ir.Model, inputs: dict[str, ir.Value]) -> None:
    """Where the number of texts is read off the shape of an input that goes, it is 1: that of the concatenated rows."""
    for user, _ in tuple(inputs["seqlens_k"].uses()) if "seqlens_k" in inputs else ():
        if user.op_type == "Shape":
            user.outputs[0].replace_all_uses_with(constant(model, "lanes.batch", np.array([1], np.int64)))
            model.graph.remove(user, safe=True)


def _check(inputs: dict[str, ir.Value], nodes: Sequence[ir.Node]) -> None:
    """See that attention alone knows of texts and positions."""
    meant = {"seqlens_k": (_SEQLENS,), "total_sequence_length": (_TOTAL,)}
    others = set()
    for name, value in inputs.items():
        places = meant.get(name, _PAST if name.startswith("past_key_values.") else None)
        if places is not None:
            others |= {user.op_type for user, place in value.uses() if user not in nodes or place not in places}
    presents = [output for node in nodes for output in node.outputs[1:]]
    if not nodes or others or not all(output.is_graph_output() for output in presents):
        found = f": {', '.join(sorted(others))}" if others else ""
        raise InvalidInputError(
            "This graph cannot take several texts in one pass, since not only the operator GroupQueryAttention depends "
            f"on positions in a text{found}."
        )


def _in_lane(lane: int, past: ir.Value | None) -> ir.Value:
    assert past is not None
    assert past.dtype is not None
    assert past.shape is not None
    return _value(f"lanes.{lane}.{past.name}", past.dtype, [1, past.shape[1], f"positions_{lane}", past.shape[3]])


def _value(name: str, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _clear_shapes(model: ir.Model) -> None:
    """Forget what was inferred for a batch of texts; ONNX Runtime infers shapes by itself."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
