"""What is done to the LM head of a graph that has its weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline_export.checkpoint import WeightReader
from paceline_export.quantize.blockwise import quantize

__all__ = ["cut_lm_head", "widen_lm_head"]

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


def widen_lm_head(model: ir.Model, reader: WeightReader, rows: int) -> str | None:
    """Store the first rows of an LM head of its own in 8 bits, in place.

    A table that is the embedding, too, is left alone, and so is one that is not quantised to less, or by the
    checkpoint.

    Args:
        model: with its weights stored, as `store_weights` leaves it.
        reader: of the checkpoint.
        rows: how many, at most.

    Returns:
        `NAME[:ROWS]`: what is in 8 bits now; None where nothing was done.
    """
    product, _ = _way_to_logits(model)
    if product is None or product.op_type != "MatMulNBits":
        return None
    bits = product.attributes["bits"].as_int()
    name = str(product.inputs[1].name).removesuffix(".q")
    if bits >= 8 or len(product.inputs[1].uses()) > 1 or reader.packed(name) is not None:
        return None
    count = product.attributes["N"].as_int()
    rows = min(rows, count)
    block_size = product.attributes["block_size"].as_int()
    first = quantize(reader.read(name)[:rows], bits=8, block_size=block_size, symmetric=True)
    scales = first.scales.reshape(-1).astype(product.inputs[2].dtype.numpy())
    parts = [_product_before(model, product, f"{name}[:{rows}]", 8, {".q": first.packed, ".scales": scales})]
    if rows < count:
        rest = {}
        for value in product.inputs[1:]:
            array = value.const_value.numpy()
            # Scales and zero points of a row stand one behind the other.
            kept = array.reshape(count, -1)[rows:].reshape(-1, *array.shape[1:])
            rest[str(value.name).removeprefix(name)] = kept
        parts.append(_product_before(model, product, f"{name}[{rows}:]", bits, rest))
    whole, joined = product.outputs[0], parts[0]
    if len(parts) > 1:
        joined = ir.node("Concat", [part.outputs[0] for part in parts], {"axis": -1})
        model.graph.insert_before(product, joined)
    whole.replace_all_uses_with(joined.outputs[0], replace_graph_outputs=True)
    joined.outputs[0].name, joined.outputs[0].type, joined.outputs[0].shape = whole.name, whole.type, whole.shape
    inputs = [str(value.name) for value in product.inputs[1:]]
    model.graph.remove(product, safe=True)
    for unused in inputs:
        del model.graph.initializers[unused]
    return f"{name}[:{rows}]"


def _product_before(
    model: ir.Model, whole: ir.Node, name: str, bits: int, arrays: dict[str, NDArray[np.generic]]
) -> ir.Node:
    """A product like `whole`, and before it, with weights given by the suffixes of their initializers' names."""
    inputs = [whole.inputs[0]]
    for suffix, array in arrays.items():
        tensor = ir.tensor(np.ascontiguousarray(array), name=f"{name}{suffix}")
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
        value.const_value = tensor
        model.graph.initializers[f"{name}{suffix}"] = value
        inputs.append(value)
    rows = len(arrays[".q"])
    attributes = {**whole.attributes, "N": ir.AttrInt64("N", rows), "bits": ir.AttrInt64("bits", bits)}
    product = ir.Node("com.microsoft", "MatMulNBits", inputs, attributes.values())
    model.graph.insert_before(whole, product)
    logits = whole.outputs[0]
    value = product.outputs[0]
    value.name, value.type = f"{logits.name}.{name}", logits.type
    value.shape = ir.Shape([*logits.shape[:-1], rows])
    return product


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
