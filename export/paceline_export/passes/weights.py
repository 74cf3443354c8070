"""Give the traced graph its weights, in the format of a precision.

Values are read one tensor at a time: quantised ones are kept packed, the others are read again when they are written,
so that the float model is never in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from paceline.errors import CheckpointError
from paceline_export.checkpoint import WeightReader
from paceline_export.quantize import WeightFormat
from paceline_export.quantize.blockwise import Blockwise, quantize

__all__ = ["EMBEDDING_BLOCK_SIZES", "check_shape", "check_values", "store_weights"]

# int8 arithmetic on the activations, which is what makes few-bit products fast on a CPU.
_ACCURACY_LEVEL = 4
EMBEDDING_BLOCK_SIZES = (128, 64, 32, 16)
_FLOAT16_END = 65520.0  # from here on, float16 rounds to infinity


def store_weights(
    model: ir.Model,
    reader: WeightReader,
    weight_format: WeightFormat,
    block_size: int,
    *,
    embedding: str,
    attention: frozenset[str],
    constants: dict[str, torch.Tensor],
    calibrated: Mapping[str, Blockwise] | None = None,
    on_weight: Callable[[str], None] | None = None,
) -> dict[str, int]:
    """Replace projections and the embedding by their stored form and bind every other initializer, in place.

    Args:
        model: as traced, with initializers named after the checkpoint's parameters.
        reader: of the checkpoint.
        weight_format: what to store.
        block_size: of quantised projections.
        embedding: the checkpoint's name of the table that input ids are looked up in.
        attention: names of the weights that project for attention.
        constants: values of initializers that are not in the checkpoint.
        calibrated: projections that are quantised already, by their names, each with its own bits; None means none.
        on_weight: called with the name of each tensor as it is stored.

    Returns:
        The bits of the projections that were quantised to others than `weight_format.bits`, a tied head apart.

    Raises:
        CheckpointError: a weight that the checkpoint lacks, holds in another shape, or with values that are no numbers
            or too large for the format. Those that are not quantised are read, and so found, when they are written.
    """
    _check_shapes(model, reader, constants)
    dtype = ir.DataType.FLOAT16 if weight_format.dtype == "float16" else ir.DataType.FLOAT
    torch_dtype = torch.float16 if weight_format.dtype == "float16" else torch.float32

    def read(name: str) -> torch.Tensor:
        if name in constants:
            return constants[name]
        tensor = reader.read(name)
        check_values(name, tensor, torch_dtype)
        return tensor

    def lazy(value: ir.Value, name: str, *, transposed: bool = False) -> ir.LazyTensor:
        def load() -> ir.TensorProtocol:
            tensor = read(name).to(torch_dtype)
            array = (tensor.T if transposed else tensor).contiguous().numpy()
            return ir.tensor(array, dtype=dtype, name=value.name)

        return ir.LazyTensor(load, dtype=dtype, shape=value.shape, name=value.name)

    head = _tied_head(model) if weight_format.bits is not None else None
    if head is not None and reader.packed(str(head.name)) is not None:
        head = None  # the checkpoint holds a head of its own
    mixed: dict[str, int] = {}
    for node in list(model.graph):
        if (weight := _projection_weight(node)) is not None:
            name = str(weight.name)
            if weight_format.bits is None:
                rows, columns = weight.shape
                stored = _initializer(model, f"{name}.T", dtype, (columns, rows))
                if stored.const_value is None:
                    stored.const_value = lazy(stored, name, transposed=True)
                node.replace_input_with(1, stored)
            else:
                x = node.inputs[0]
                if (packed := reader.packed(name)) is not None:
                    quantised = packed.weight
                    if packed.order is not None:
                        x = _gathered(model, node, name, packed.order)
                else:
                    bits = weight_format.projection_bits(attention=name in attention)
                    if weight is head:
                        bits = weight_format.tied_bits
                    assert bits is not None
                    # A table is read without zero points, and 8 bits need none.
                    symmetric = weight is head or bits == 8 or weight_format.symmetric
                    quantised = (calibrated or {}).get(name) or quantize(
                        read(name), bits=bits, block_size=block_size, symmetric=symmetric
                    )
                    if weight is not head and quantised.bits != weight_format.bits:
                        mixed[name] = quantised.bits
                if weight is head:
                    _look_up_in(model, head, quantised, dtype)
                _replace(model, node, _matmul_nbits(model, x, name, quantised, dtype))
        elif node.op_type == "Gather" and node.inputs[0].is_initializer() and node.inputs[0] is not head:
            name = embedding  # a table tied to the LM head is traced under either name
            rows, columns = node.inputs[0].shape
            block = next((size for size in EMBEDDING_BLOCK_SIZES if columns % size == 0), None)
            if weight_format.embedding_bits is None or block is None:
                stored = _initializer(model, name, dtype, (rows, columns))
                stored.const_value = lazy(stored, name)
                node.replace_input_with(0, stored)
            else:
                quantised = quantize(read(name), bits=weight_format.embedding_bits, block_size=block, symmetric=True)
                _replace(model, node, _gather_block_quantized(model, node.inputs[1], name, quantised, dtype))
        else:
            continue
        if on_weight is not None:
            on_weight(name)
    RemoveUnusedNodesPass()(model)
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = lazy(value, name)
    return mixed


def _check_shapes(model: ir.Model, reader: WeightReader, constants: dict[str, torch.Tensor]) -> None:
    """Check that the checkpoint holds every weight in the shape that the graph expects, before any is read."""
    for name, value in model.graph.initializers.items():
        if value.const_value is not None or name in constants:
            continue
        check_shape(reader, name, tuple(int(size) for size in value.shape))


def check_shape(reader: WeightReader, name: str, expected: tuple[int, ...]) -> None:
    """Check that the checkpoint holds a parameter in the shape that its configuration asks for.

    Raises:
        CheckpointError: it does not.
    """
    if (found := reader.shape(name)) != expected:
        raise CheckpointError(
            f"The tensor {name!r} has shape {found} in the checkpoint, but its configuration asks for {expected}; "
            "configuration and weights do not belong together."
        )


def check_values(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that every value is a number that `dtype` can hold.

    Raises:
        CheckpointError: one is not.
    """
    if not tensor.numel():
        return
    low, high = (float(end) for end in torch.aminmax(tensor))  # takes no memory; NaN if any value is
    if not math.isfinite(low) or not math.isfinite(high):
        raise CheckpointError(
            f"The tensor {name!r} holds values that are NaN or infinite, from which no text can come; expected "
            "numbers. The checkpoint is damaged, or its training failed: download it again, or take another."
        )
    if dtype == torch.float16 and max(-low, high) >= _FLOAT16_END:
        raise CheckpointError(
            f"The tensor {name!r} holds values from {low:g} to {high:g}, and float16 ends at 65504. Export with "
            "another precision than fp16."
        )


def _projection_weight(node: ir.Node) -> ir.Value | None:
    """The initializer `[rows, columns]` of `MatMul(x, Transpose(initializer))`, or None for other nodes."""
    if node.op_type != "MatMul":
        return None
    transpose = node.inputs[1].producer()
    if transpose is None or transpose.op_type != "Transpose" or not transpose.inputs[0].is_initializer():
        return None
    weight: ir.Value = transpose.inputs[0]
    return weight


def _gathered(model: ir.Model, node: ir.Node, name: str, order: NDArray[np.int64]) -> ir.Value:
    """The input of a projection with its columns in another order, once for projections that share both."""
    x = node.inputs[0]
    for user, _ in x.uses():
        if user.op_type == "Gather" and user.inputs[0] is x and user.attributes["axis"].as_int() == -1:
            found = user.inputs[1].const_value
            if found is not None and np.array_equal(found.numpy(), order):
                return user.outputs[0]
    gather = ir.node("Gather", [x, _constant(model, f"{name}.order", order)], {"axis": -1})
    model.graph.insert_before(node, gather)
    gather.outputs[0].name = f"{name}.input"
    gather.outputs[0].type, gather.outputs[0].shape = x.type, x.shape
    return gather.outputs[0]


def _tied_head(model: ir.Model) -> ir.Value | None:
    """The initializer that is the LM head and the table that ids are looked up in, or None."""
    tables = {node.inputs[0] for node in model.graph if node.op_type == "Gather"}
    return next((weight for node in model.graph if (weight := _projection_weight(node)) in tables), None)


def _look_up_in(model: ir.Model, table: ir.Value, head: Blockwise, dtype: ir.DataType) -> None:
    """Look rows of a tied table up in the initializers that the LM head multiplies by."""
    name = str(table.name)
    rows, blocks, _ = head.packed.shape
    width = blocks * head.block_size
    packed = _constant(model, f"{name}.q", head.packed)
    scales = _constant(model, f"{name}.scales", head.scales.reshape(-1), dtype)
    (gather,) = (node for node, _ in table.uses() if node.op_type == "Gather")
    shape = _constant(model, f"{name}.scales_shape", np.array([rows, blocks, 1]))
    scales_by_block = ir.node("Reshape", [scales, shape], name=f"{name}.scales_by_block")
    attributes = {"gather_axis": 0, "quantize_axis": 2, "block_size": head.block_size, "bits": head.bits}
    inputs = [packed, gather.inputs[1], scales_by_block.outputs[0]]
    blockwise = ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft", name=f"{name}.blocks")
    shape = _constant(model, f"{name}.row_shape", np.array([0, 0, width]))
    chain = [scales_by_block, blockwise, ir.node("Reshape", [blockwise.outputs[0], shape], name=f"{name}.rows")]
    if width > head.columns:  # the last block is padded
        ends = (("start", 0), ("end", head.columns), ("axis", 2))
        slices = [_constant(model, f"{name}.row_{what}", np.array([value])) for what, value in ends]
        chain.append(ir.node("Slice", [chain[-1].outputs[0], *slices], name=f"{name}.columns"))
    for node in chain[:-1]:
        node.outputs[0].name = node.name
        model.graph.insert_before(gather, node)
    _replace(model, gather, chain[-1])


def _matmul_nbits(model: ir.Model, x: ir.Value, name: str, weight: Blockwise, dtype: ir.DataType) -> ir.Node:
    rows = weight.packed.shape[0]
    inputs = [
        x,
        _constant(model, f"{name}.q", weight.packed),
        _constant(model, f"{name}.scales", weight.scales.reshape(-1), dtype),
    ]
    if weight.zero_points is not None:
        inputs.append(_constant(model, f"{name}.zero_points", weight.zero_points.reshape(-1)))
    attributes = {
        "K": weight.columns,
        "N": rows,
        "bits": weight.bits,
        "block_size": weight.block_size,
        "accuracy_level": _ACCURACY_LEVEL,
    }
    return ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")


def _gather_block_quantized(
    model: ir.Model, indices: ir.Value, name: str, table: Blockwise, dtype: ir.DataType
) -> ir.Node:
    rows = table.packed.shape[0]
    inputs = [
        _constant(model, f"{name}.q", table.packed.reshape(rows, -1)),
        indices,
        _constant(model, f"{name}.scales", table.scales, dtype),
    ]
    attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": table.block_size, "bits": table.bits}
    return ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft")


def _constant(model: ir.Model, name: str, array: NDArray[np.generic], dtype: ir.DataType | None = None) -> ir.Value:
    tensor = ir.tensor(array.astype(np.float16) if dtype == ir.DataType.FLOAT16 else array, name=name)
    value = _initializer(model, name, tensor.dtype, tuple(array.shape))
    value.const_value = tensor
    return value


def _initializer(model: ir.Model, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    if name not in model.graph.initializers:
        model.graph.initializers[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    return model.graph.initializers[name]


def _replace(model: ir.Model, old: ir.Node, new: ir.Node) -> None:
    """Put `new`, which has one output, in the place of `old`."""
    model.graph.insert_before(old, new)
    new.outputs[0].name = old.outputs[0].name
    new.outputs[0].type, new.outputs[0].shape = old.outputs[0].type, old.outputs[0].shape
    old.outputs[0].replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
    model.graph.remove(old, safe=True)
