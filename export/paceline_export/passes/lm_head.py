"""Find the LM head in a graph, and keep some of its rows: logits for some ids only."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from paceline.errors import CheckpointError

__all__ = ["cut_lm_head", "lm_head"]

# What may stand between the product and the logits: bias, factor, bound, cast.
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Tanh", "Cast")
_PRODUCTS = ("MatMul", "MatMulNBits")


def cut_lm_head(model: ir.Model, logit_ids: NDArray[np.int32], *, embedding: str) -> None:
    """Make the logits `[batch, num_logits, len(logit_ids)]` those of `logit_ids`, in place.

    Args:
        model: with its weights stored, as `store_weights` leaves it.
        logit_ids: int32, rising, each below the width of the logits.
        embedding: the checkpoint's name of the embedding, which a table that it shares with the LM head then has.

    Raises:
        CheckpointError: something else than a product with the LM head and elementwise operators makes the logits.
    """
    width = int(model.graph.outputs[0].shape[2])
    product, elementwise = _way_to_logits(model)
    if product is None or product.op_type not in _PRODUCTS:
        raise CheckpointError(
            f"The logits come from {product.op_type if product else 'nothing'!r} instead of a product with an LM head, "
            "so the draft's vocabulary cannot be cut; export with --draft-vocab full."
        )
    for node in (product, *(node for node, _ in elementwise)):
        value = node.outputs[0]
        value.shape = ir.Shape([*value.shape[:-1], len(logit_ids)])
    for node, places in elementwise:
        for place in places:
            other = node.inputs[place]
            assert other is not None
            _keep(model, node, place, logit_ids, embedding, axis=len(other.shape) - 1)
    if product.op_type == "MatMul":
        transpose = product.inputs[1].producer()
        if transpose is None:
            _keep(model, product, 1, logit_ids, embedding, axis=1)
            return
        levels = transpose.inputs[0].producer()  # DequantizeLinear of few-bit rows, each with scales of its own
        for place in range(len(levels.inputs)):
            _keep(model, levels, place, logit_ids, embedding, axis=0)
        return
    for place in range(1, len(product.inputs)):
        if product.inputs[place] is not None:
            _keep(model, product, place, logit_ids, embedding, axis=0, rows=width)
    product.attributes["N"] = ir.AttrInt64("N", len(logit_ids))


def lm_head(model: ir.Model) -> ir.Node | None:
    """The node that makes the logits, elementwise operators apart; None where nothing does."""
    return _way_to_logits(model)[0]


def _way_to_logits(model: ir.Model) -> tuple[ir.Node | None, list[tuple[ir.Node, list[int]]]]:
    """Where the logits come from behind elementwise operators, and these with their constant inputs of their width."""
    value = model.graph.outputs[0]
    width = value.shape[2]
    found: list[tuple[ir.Node, list[int]]] = []
    while (node := value.producer()) is not None and node.op_type in _ELEMENTWISE:
        wide = [(place, x) for place, x in enumerate(node.inputs) if x is not None and x.shape and x.shape[-1] == width]
        computed = [x for _, x in wide if not x.is_initializer()]
        if len(computed) != 1:
            break
        found.append((node, [place for place, x in wide if x.is_initializer()]))
        (value,) = computed
    return node, found


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
