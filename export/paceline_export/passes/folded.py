"""Read each key and value once for all query heads that share it, where the KV cache is long.

ONNX Runtime's `GroupQueryAttention` multiplies one query head at a time, so keys and values of a long cache come from
memory once for every head of a group. Here the heads of a group become rows, which one product takes together; who sees
which key is then said by a bias, and positions are given, since rows no longer follow each other. The rows of a step
are first written into the caches by `ScatterND`, in place where past and present are one buffer.

A step takes this way where it has few rows and a long cache, else the operator as it was: `If` decides, in each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .initializers import constant

__all__ = ["LEAST_LENGTH", "MOST_ROWS", "fold_query_heads", "unfold_query_heads"]

# Rows of a step, and positions behind it, from which on folded heads are no slower.
MOST_ROWS, LEAST_LENGTH = 16, 768
_ATTENTION = "GroupQueryAttention"
_KNOWN = {"num_heads", "kv_num_heads", "scale", "do_rotary", "rotary_interleaved"}
_SEQLENS, _TOTAL, _COS = 5, 6, 7
_PREFIX = "folded_attention_"  # of the names of the nodes that decide


def fold_query_heads(model: ir.Model) -> int:
    """Rewrite the attention of a graph of the flavour `ort`, in place; its inputs and outputs stay.

    Layers with a window, a bound, sinks, or biases by position are left as they are, and so are those whose heads share
    nothing, that rotate nothing, or whose caches are not float32.

    Args:
        model: with or without its weights. It takes one text, and its caches keep their places from step to step.

    Returns:
        The number of layers that were rewritten.
    """
    nodes = [node for node in model.graph if node.op_type == _ATTENTION and _can_fold(node)]
    nodes = [node for node in nodes if _heads(node) == _heads(nodes[0])]
    if not nodes:
        return 0
    first = next(iter(model.graph))
    ids = next(value for value in model.graph.inputs if value.name == "input_ids")
    shared = _Shared(model, first, ids, nodes[0])
    for index, node in enumerate(nodes):
        shared.fold(index, node)
    return len(nodes)


def unfold_query_heads(model: ir.Model) -> None:
    """Undo `fold_query_heads`, in place."""
    chosen = [node for node in model.graph if node.op_type == "If" and str(node.name).startswith(_PREFIX)]
    for node in chosen:
        (plain,) = node.attributes["else_branch"].as_graph()
        restored = ir.node(_ATTENTION, plain.inputs, dict(plain.attributes), domain=plain.domain, num_outputs=3)
        for name in ("then_branch", "else_branch"):  # what they read would count as used
            branch = node.attributes[name].as_graph()
            branch.outputs.clear()
            branch.remove(list(branch), safe=True)
        _put(model, node, restored)
    if chosen:
        RemoveUnusedNodesPass()(model)


def _put(model: ir.Model, old: ir.Node, new: ir.Node) -> None:
    """Put a node in the place of another one, with its outputs' names and types."""
    model.graph.insert_before(old, new)
    for before, after in zip(old.outputs, new.outputs, strict=True):
        after.name, before.name = before.name, f"{before.name}.old"
        after.type, after.shape = before.type, before.shape
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)


def _heads(node: ir.Node) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    return node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()


def _can_fold(node: ir.Node) -> bool:
    heads, kv_heads = _heads(node)
    plain = set(node.attributes) <= _KNOWN and len(node.inputs) == _COS + 2 and None not in node.inputs
    past = node.inputs[3]
    return bool(plain and heads > kv_heads and past is not None and past.dtype == ir.DataType.FLOAT)


class _Shared:
    """What all layers read: computed once a step, before the first node."""

    def __init__(self, model: ir.Model, first: ir.Node, ids: ir.Value, attention: ir.Node) -> None:
        self.model = model
        self._first, self._count = first, 0
        heads, self.kv_heads = _heads(attention)
        self.group = heads // self.kv_heads
        total = attention.inputs[_TOTAL]
        zero, one = self.ints("zero", 0), self.ints("one", 1)
        self.total = self._node("Cast", [total], {"to": ir.DataType.INT64})
        self.rows_1d = self._node("Shape", [ids], {"start": 1, "end": 2})
        rows = self._node("Squeeze", [self.rows_1d])
        self.positions = self._node("Range", [self._node("Sub", [self.total, rows]), self.total, one])  # [rows]
        keys = self._node("Range", [zero, self.total, one])  # [total]
        column = self._node("Unsqueeze", [self.positions, self.ints("axis_1", [1])])
        self.row_ids = self._node("Unsqueeze", [self.positions, self.ints("axis_0", [0])])  # [1, rows]
        many = self._node("Expand", [column, self.ints("group", [1, self.group])])
        flat = self._node("Reshape", [many, self.ints("flat", [-1])])  # [rows * group]
        self.folded_ids = self._node("Unsqueeze", [flat, self.ints("axis_0", [0])])
        hidden = self._node("Less", [self._node("Unsqueeze", [flat, self.ints("axis_1", [1])]), keys])
        floor = constant(model, "folded.floor", np.array(np.finfo(np.float32).min, np.float32))
        bias = self._node("Where", [hidden, floor, constant(model, "folded.none", np.array(0, np.float32))])
        self.bias = self._node("Unsqueeze", [bias, self.ints("axes_01", [0, 1])])  # [1, 1, rows * group, total]
        # Where ScatterND writes: [1, kv_heads, rows, 3].
        by_head = np.stack([np.zeros(self.kv_heads, np.int64), np.arange(self.kv_heads)], -1)
        places = []
        for name, value, width in (
            ("heads", self.ints("heads", by_head[None, :, None]), 2),
            ("rows", self._node("Unsqueeze", [self.positions, self.ints("axes_013", [0, 1, 3])]), 1),
        ):
            ends = (self.ints("lead", [1, self.kv_heads]), self.rows_1d, self.ints(f"width_{name}", [width]))
            places.append(self._node("Expand", [value, self._node("Concat", ends, {"axis": 0})]))
        self.places = self._node("Concat", places, {"axis": 3})
        few = self._node("LessOrEqual", [rows, self.ints("most_rows", MOST_ROWS)])
        # The operator takes no more rows than there are keys.
        folded_rows = self._node("Mul", [rows, self.ints("heads_of_group", self.group)])
        least = self._node("Max", [self.ints("least_length", LEAST_LENGTH), folded_rows])
        self.folds = self._node("And", [few, self._node("GreaterOrEqual", [self.total, least])])

    def ints(self, name: str, values: object) -> ir.Value:
        return constant(self.model, f"folded.{name}", np.array(values, np.int64))

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object] | None = None
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or {})
        self._count += 1
        node.outputs[0].name = f"folded.shared_{self._count}"  # names of a graph's file may not come twice
        self.model.graph.insert_before(self._first, node)
        return node.outputs[0]

    def fold(self, index: int, node: ir.Node) -> None:
        """Put an `If` in the place of a layer's attention."""
        branches = {"then_branch": self._folded(index, node), "else_branch": self._plain(index, node)}
        _put(self.model, node, ir.node("If", [self.folds], branches, num_outputs=3, name=f"{_PREFIX}{index}"))

    def _plain(self, index: int, node: ir.Node) -> ir.Graph:
        same = ir.node(_ATTENTION, node.inputs, dict(node.attributes), domain=node.domain, num_outputs=3)
        return _graph(f"plain_{index}", [same], same.outputs, node)

    def _folded(self, index: int, node: ir.Node) -> ir.Graph:
        query, key, value, *pasts = node.inputs[:5]
        cos, sin = node.inputs[_COS : _COS + 2]
        size = int(pasts[0].shape[3])
        interleaved = node.attributes["rotary_interleaved"].as_int() if "rotary_interleaved" in node.attributes else 0
        nodes: list[ir.Node] = []

        def add(
            op_type: str,
            inputs: Sequence[ir.Value | None],
            attributes: Mapping[str, object] | None = None,
            domain: str = "",
        ) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes or {}, domain=domain))
            nodes[-1].outputs[0].name = f"folded_{index}.value_{len(nodes)}"
            return nodes[-1].outputs[0]

        rotary = {"num_heads": self.kv_heads, "interleaved": interleaved}
        if (turned := 2 * int(cos.shape[1])) != size:
            rotary["rotary_embedding_dim"] = turned
        rotated = add("RotaryEmbedding", [key, self.row_ids, cos, sin], rotary, "com.microsoft")
        by_head = self.ints("by_head", [0, 0, self.kv_heads, size])
        presents = []
        for past, new in zip(pasts, (rotated, value), strict=True):
            update = add("Transpose", [add("Reshape", [new, by_head])], {"perm": [0, 2, 1, 3]})
            presents.append(add("ScatterND", [past, self.places, update]))
        swap = {"perm": [0, 1, 3, 2, 4]}
        grouped = add("Reshape", [query, self.ints("grouped", [0, 0, self.kv_heads, self.group, size])])
        folded = add("Reshape", [add("Transpose", [grouped], swap), self.ints("folded", [0, -1, self.kv_heads * size])])
        nothing = constant(self.model, "folded.nothing", np.zeros((1, 0, self.kv_heads * size), np.float32))
        attributes = dict(node.attributes) | {
            "num_heads": ir.AttrInt64("num_heads", self.kv_heads),
            "causal": ir.AttrInt64("causal", 0),
        }
        inputs = [folded, nothing, nothing, *presents, node.inputs[_SEQLENS], node.inputs[_TOTAL], cos, sin]
        read = add(_ATTENTION, [*inputs, self.folded_ids, self.bias], attributes, "com.microsoft")
        rows = add("Reshape", [read, self.ints("unfolded", [1, -1, self.group, self.kv_heads, size])])
        output = add(
            "Reshape", [add("Transpose", [rows], swap), self.ints("output", [0, -1, self.group * self.kv_heads * size])]
        )
        return _graph(f"folded_{index}", nodes, [output, *presents], node)


def _graph(name: str, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value], like: ir.Node) -> ir.Graph:
    """A branch with the types of a node's outputs."""
    for place, (value, old) in enumerate(zip(outputs, like.outputs, strict=True)):
        value.name = f"{name}.{place}"
        value.type, value.shape = old.type, old.shape
    return ir.Graph([], list(outputs), nodes=list(nodes), name=name)
