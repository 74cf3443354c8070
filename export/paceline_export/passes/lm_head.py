"""Keep some rows of the LM head: logits for some ids only."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from paceline.errors import CheckpointError

__all__ = ["cut_lm_head"]

# What may stand between the product and the logits: bias, factor, bound, cast.
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Tanh", "Cast")


def cut_lm_head(model: ir.Model, logit_ids: NDArray[np.int32], *, embedding: str) -> None:
    """Make the logits `[batch, num_logits, len(logit_ids)]` those of `logit_ids`, in place.

    Args:
        model: with its weights stored, as `store_weights` leaves it.
        logit_ids: int32, rising, each below the width of the logits.
        embedding: the checkpoint's name of the embedding, which a table that it shares with the LM head then has.

    Raises:
        CheckpointError: something else than a product with the LM head and elementwise operators makes the logits.
    """
    logits = model.graph.outputs[0]
    width = int(logits.shape[2])
    value = logits
    while True:
        node = value.producer()
        value.shape = ir.Shape([*value.shape[:-1], len(logit_ids)])
        if node is not None and node.op_type == "MatMul":
            transpose = node.inputs[1].producer()
            if transpose is None:
                _keep(model, node, 1, logit_ids, embedding, axis=1)
                return
            levels = transpose.inputs[0].producer()  # DequantizeLinear of few-bit rows, each with scales of its own
            for place in range(len(levels.inputs)):
                _keep(model, levels, place, logit_ids, embedding, axis=0)
            return
        if node is not None and node.op_type == "MatMulNBits":
            for place in range(1, len(node.inputs)):
                if node.inputs[place] is not None:
                    _keep(model, node, place, logit_ids, embedding, axis=0, rows=width)
            node.attributes["N"] = ir.AttrInt64("N", len(logit_ids))
            return
        wide = (
            []
            if node is None or node.op_type not in _ELEMENTWISE
            else [
                (place, x) for place, x in enumerate(node.inputs) if x is not None and x.shape and x.shape[-1] == width
            ]
        )
        computed = [x for _, x in wide if not x.is_initializer()]
        if node is None or len(computed) != 1:
            raise CheckpointError(
                f"The logits come from {node.op_type if node else 'nothing'!r} instead of a product with an LM head, "
                "so the draft's vocabulary cannot be cut; export with --draft-vocab full."
            )
        for place, other in wide:
            if other.is_initializer():
                _keep(model, node, place, logit_ids, embedding, axis=len(other.shape) - 1)
        (value,) = computed


def _keep(
    model: ir.Model,
    node: ir.Node,
    place: int,
    ids: NDArray[np.int32],
    embedding: str,
    *,
    axis: int,
    rows: int | None = None,
) -> None:
    """Give a node an input that holds only these entries of an axis; with `rows`, of an array with so many rows."""
    whole = node.inputs[place]
    assert whole is not None
    source = whole.const_value
    assert source is not None
    shape = [int(size) for size in source.shape]

    name = str(whole.name)
    if len(whole.uses()) > 1:  # a table that is the embedding, too, which keeps all rows
        suffix = name.rpartition(".weight")[2]
        name = f"lm_head.weight{suffix}"
        del model.graph.initializers[str(whole.name)]
        whole.name = f"{embedding}{suffix}"
        model.graph.initializers[whole.name] = whole

    def cut() -> ir.TensorProtocol:
        array = source.numpy()
        if rows is None:
            return ir.tensor(np.ascontiguousarray(array.take(ids, axis)), dtype=source.dtype, name=name)
        # Scales and zero points of a row stand one behind the other.
        kept = array.reshape(rows, -1)[ids].reshape(-1, *shape[1:])
        return ir.tensor(kept, dtype=source.dtype, name=name)

    if rows is None:
        shape[axis] = len(ids)
    else:
        shape[0] = shape[0] // rows * len(ids)
    kept = ir.Value(name=name, type=ir.TensorType(source.dtype), shape=ir.Shape(shape))
    kept.const_value = ir.LazyTensor(cut, dtype=source.dtype, shape=ir.Shape(shape), name=name)
    node.replace_input_with(place, kept)
    if not whole.uses():
        del model.graph.initializers[str(whole.name)]
    model.graph.initializers[name] = kept
