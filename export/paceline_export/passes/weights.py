"""Give the traced graph its weights, in the format of a precision.

Values are read one tensor at a time. Quantised ones are written as soon as they are made, the others are read again
when they are written, so that neither the float model nor the stored one is ever in memory as a whole.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from paceline.errors import CheckpointError
from paceline_export.flavors.flavor import WeightNodes
from paceline_export.quantize import WeightFormat
from paceline_export.quantize.blockwise import Blockwise
from paceline_export.quantize.rows import quantize_rows_to_float8
from paceline_export.weight_reader import WeightReader

from .data_file import DataFile
from .initializers import constant, initializer, replace
from .lm_head import lm_head

__all__ = ["StoredWeights", "check_projections", "check_shape", "check_values", "store_weights"]

_DTYPES = {
    "float32": (torch.float32, ir.DataType.FLOAT),
    "float16": (torch.float16, ir.DataType.FLOAT16),
    "bfloat16": (torch.bfloat16, ir.DataType.BFLOAT16),
}
# What stands between the scores of a router and the choice.
_OVER_SCORES = ("Add", "Cast", "Div", "Identity", "Mul", "Reshape", "Sigmoid", "Softmax")
_FLOAT16_END = 65520.0  # from here on, float16 rounds to infinity


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """How a graph's projections were stored.

    Attributes:
        mixed_bits: bits of those that were quantised to others than the format's `bits`, a tied head apart;
            `NAME[:ROWS]` for so many first rows of one.
        block_size: of most of those with the format's `bits`, or as the checkpoint holds them; None where there are
            none, or each row has one scale.
        unquantized: names of weights that are in full precision though the format quantises: routers, tables of
            positions, and what else is neither a projection nor the table of the vocabulary.
        rounded: names of projections that are rounded to nearest though others were calibrated: experts, and whatever
            else is no linear layer of its own. In a float8 format they are integers.
    """

    mixed_bits: dict[str, int]
    block_size: int | None
    unquantized: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of weights that are stored otherwise than the format says."""
        return tuple(
            f"{len(names)} {'weight is' if len(names) == 1 else 'weights are'} {how}, such as {names[0]}"
            for names, how in (
                (self.unquantized, "left in full precision"),
                (self.rounded, "rounded to nearest, since calibration reaches linear layers only"),
            )
            if names
        )


@dataclass(frozen=True, slots=True)
class _Projection:
    """A weight that something is multiplied by.

    Attributes:
        weight: the initializer, as the checkpoint has it.
        expert: which of several stacked ones; None where it is one.
        flipped: whether the checkpoint holds it as `[columns, rows]`.
    """

    weight: ir.Value
    expert: int | None
    flipped: bool

    @property
    def name(self) -> str:
        """The checkpoint's name of it, with the expert's number behind it."""
        return f"{self.weight.name}" if self.expert is None else f"{self.weight.name}[{self.expert}]"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        first, second = (int(size) for size in self.weight.shape[-2:])
        return (second, first) if self.flipped else (first, second)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[rows, columns]` from what the checkpoint holds."""
        part = tensor if self.expert is None else tensor[self.expert]
        return part.T.contiguous() if self.flipped else part


def store_weights(
    model: ir.Model,
    reader: WeightReader,
    weight_format: WeightFormat,
    block_size: int,
    *,
    nodes: WeightNodes,
    embedding: str,
    attention: frozenset[str],
    constants: dict[str, torch.Tensor],
    calibrated: Mapping[str, Blockwise] | None = None,
    ranges: Mapping[str, float] | None = None,
    data: DataFile | None = None,
    on_weight: Callable[[str], None] | None = None,
) -> StoredWeights:
    """Replace projections and the embedding by their stored form and bind every other initializer, in place.

    Args:
        model: as traced, with initializers named after the checkpoint's parameters.
        reader: of the checkpoint.
        weight_format: what to store.
        block_size: of quantised projections.
        nodes: how the graph's flavour quantises and reads weights.
        embedding: the checkpoint's name of the table that input ids are looked up in.
        attention: names of the weights that project for attention.
        constants: values of initializers that are not in the checkpoint.
        calibrated: projections that are quantised already, by their names, each with its own bits; None means none.
        ranges: largest magnitudes of the inputs of projections that become float8 numbers, by the same names.
        data: takes quantised weights as they are made, those of the LM head excepted, which may be cut yet; None
            keeps them in memory.
        on_weight: called with the name of each tensor as it is stored.

    Returns:
        What was stored.

    Raises:
        CheckpointError: a weight that the checkpoint lacks, holds in another shape, or with values that are no numbers
            or too large for the format. Those that are not quantised are read, and so found, when they are written.
    """
    _check_shapes(model, reader, constants)
    torch_dtype, dtype = _DTYPES[weight_format.dtype]
    sizes: Counter[int | None] = Counter()
    mixed: dict[str, int] = {}

    def read(name: str) -> torch.Tensor:
        if name in constants:
            return constants[name]
        tensor = reader.read(name)
        check_values(name, tensor, torch_dtype)
        return tensor

    @functools.lru_cache(maxsize=2)  # what stacked experts are projected by, one after another
    def stacked(name: str) -> torch.Tensor:
        return read(name)

    def lazy(value: ir.Value, name: str, projection: _Projection | None = None) -> ir.LazyTensor:
        def load() -> ir.TensorProtocol:
            if projection is None:
                tensor = read(name)
            else:
                tensor = projection.of(stacked(name) if projection.expert is not None else read(name)).T
            tensor = tensor.to(torch_dtype) if in_format else tensor
            return ir.tensor(tensor.contiguous(), name=value.name)

        in_format = name not in constants or value.dtype == dtype  # the graph may want a table of other numbers
        return ir.LazyTensor(load, dtype=dtype if in_format else value.dtype, shape=value.shape, name=value.name)

    head = _tied_head(model) if weight_format.bits is not None else None
    if head is not None and reader.packed(str(head.name)) is not None:
        head = None  # the checkpoint holds a head of its own
    last = lm_head(model)
    tables = {embedding, *(str(found.weight.name) for found in (_projection(last),) if found is not None)}
    unquantized: set[str] = set()
    rounded: set[str] = set()
    for node in list(model.graph):
        known = len(model.graph.initializers)
        if (projection := _projection(node)) is not None:
            weight, whole, name = projection.weight, str(projection.weight.name), projection.name
            if weight_format.bits is None or _chooses(node):
                if weight_format.bits is not None:
                    unquantized.add(whole)
                rows, columns = projection.shape
                stored = initializer(model, name if projection.flipped else f"{name}.T", dtype, (columns, rows))
                if stored.const_value is None:
                    stored.const_value = lazy(stored, whole, projection)
                node.replace_input_with(1, stored)
            else:
                x = node.inputs[0]
                packed = reader.packed(whole) if projection.expert is None and not projection.flipped else None
                if packed is not None:
                    parts = {name: packed.weight}
                    if (reason := nodes.refusal(packed.weight)) is not None:
                        raise CheckpointError(
                            f"The projection {name!r} of the checkpoint cannot be kept as it is: {reason}. Export with "
                            "another precision than that of the checkpoint, or with another flavour."
                        )
                    if packed.order is not None:
                        x = _gathered(model, node, name, packed.order)
                elif name in (ranges or {}):
                    parts = {name: quantize_rows_to_float8(read(name), (ranges or {})[name])}
                else:
                    bits = weight_format.projection_bits(attention=name in attention)
                    if weight is head:
                        bits = weight_format.tied_bits
                    assert bits is not None
                    if calibrated is not None and name in calibrated:
                        parts = {name: calibrated[name]}
                    else:
                        if (calibrated or ranges) and node is not last and bits == weight_format.bits:
                            rounded.add(whole)
                        wide_rows = weight_format.head_rows if node is last and weight is not head else 0
                        parts = {
                            # A table is read without zero points, and 8 bits need none.
                            rows: nodes.quantize(
                                rows,
                                values,
                                bits=its_bits,
                                block_size=block_size,
                                symmetric=weight is head or its_bits == 8 or weight_format.symmetric,
                            )
                            for rows, values, its_bits in _by_rows(
                                f"{name}.T" if projection.flipped else name,
                                projection.of(stacked(whole) if projection.expert is not None else read(whole)),
                                bits,
                                wide_rows,
                            )
                        }
                    if weight is not head:
                        other = {rows: part for rows, part in parts.items() if part.bits != weight_format.bits}
                        mixed |= {rows.removesuffix(".T"): part.bits for rows, part in other.items()}
                quantised = next(iter(parts.values()))
                if packed is not None or quantised.bits == weight_format.bits:
                    sizes[quantised.block_size if quantised.block_size != quantised.columns else None] += 1
                if weight is head:
                    (gather,) = (user for user, _ in head.uses() if user.op_type == "Gather")
                    replace(model, gather, nodes.tied_lookup(model, gather.inputs[1], name, quantised, dtype))
                replace(model, node, _product(model, nodes, x, parts, dtype))
        elif node.op_type == "Gather" and node.inputs[0].name in tables and node.inputs[0] is not head:
            name = embedding  # a table tied to the LM head is traced under either name
            few_bits = weight_format.embedding_bits
            table = None if few_bits is None else nodes.quantize_table(read(name), bits=few_bits)
            if table is None:
                if few_bits is not None:
                    unquantized.add(name)
                stored = initializer(model, name, dtype, tuple(node.inputs[0].shape))
                stored.const_value = lazy(stored, name)
                node.replace_input_with(0, stored)
            else:
                replace(model, node, nodes.lookup(model, node.inputs[1], name, table, dtype))
        else:
            continue
        if data is not None and node is not last:
            made = list(model.graph.initializers.values())[known:]
            data.take(model, [str(value.name) for value in made if not isinstance(value.const_value, ir.LazyTensor)])
        if on_weight is not None:
            on_weight(name)
    stacked.cache_clear()
    RemoveUnusedNodesPass()(model)
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = lazy(value, name)
            if weight_format.bits is not None and name not in constants and len(value.shape) > 1:
                unquantized.add(name)
    block = sizes.most_common(1)[0][0] if sizes else None
    return StoredWeights(mixed, block, tuple(sorted(unquantized)), tuple(sorted(rounded)))


def check_projections(
    model: ir.Model,
    weight_format: WeightFormat,
    block_size: int,
    *,
    nodes: WeightNodes,
    attention: frozenset[str],
) -> None:
    """Check that every projection of a traced graph can be quantised, before its weights are read.

    Raises:
        CheckpointError: the flavour cannot quantise one of this shape.
    """
    head = _tied_head(model) if weight_format.bits is not None else None
    for node in model.graph:
        if weight_format.bits is None or (projection := _projection(node)) is None or _chooses(node):
            continue
        bits = weight_format.projection_bits(attention=projection.name in attention)
        bits = weight_format.tied_bits if projection.weight is head else bits
        nodes.check(projection.name, projection.shape[1], bits=bits or 8, block_size=block_size)


def _by_rows(name: str, weight: torch.Tensor, bits: int, wide_rows: int) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Names, values and bits of a weight's rows: so many first ones in 8 bits, if there are some, and the rest."""
    if not wide_rows:
        yield name, weight, bits
        return
    wide, rest = weight.tensor_split([wide_rows])
    yield f"{name}[:{len(wide)}]", wide, 8
    if len(rest):
        yield f"{name}[{len(wide)}:]", rest, bits


def _product(
    model: ir.Model, nodes: WeightNodes, x: ir.Value, parts: Mapping[str, Blockwise], dtype: ir.DataType
) -> list[ir.Node]:
    """The product with a weight whose rows are stored in parts, one behind the other."""
    chains = {name: nodes.product(model, x, name, part, dtype) for name, part in parts.items()}
    if len(chains) == 1:
        return next(iter(chains.values()))
    for name, chain in chains.items():
        chain[-1].outputs[0].name = f"{name}.product"
    joined = ir.node("Concat", [chain[-1].outputs[0] for chain in chains.values()], {"axis": -1})
    return [*(node for chain in chains.values() for node in chain), joined]


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


def _projection(node: ir.Node | None) -> _Projection | None:
    """The weight of `MatMul(x, weight)`, transposed or not, one of several stacked ones or not; None for others."""
    if node is None or node.op_type != "MatMul":
        return None
    weight, flipped, expert = node.inputs[1], True, None
    if (producer := weight.producer()) is not None and producer.op_type == "Transpose":
        weight, flipped = producer.inputs[0], False
    if (producer := weight.producer()) is not None and producer.op_type == "Gather":
        index = ir.convenience.get_const_tensor(producer.inputs[1])
        axis = producer.attributes["axis"].as_int() if "axis" in producer.attributes else 0
        if index is None or index.numpy().ndim or axis:
            return None
        weight, expert = producer.inputs[0], int(index.numpy())
    if not weight.is_initializer() or len(weight.shape) != (2 if expert is None else 3):
        return None
    return _Projection(weight, expert, flipped)


def _chooses(node: ir.Node) -> bool:
    """Whether a product makes scores of which some are chosen: few bits would choose otherwise."""
    seen, reached = set(), [node]
    while reached:
        for user, _ in reached.pop().outputs[0].uses():
            if user.op_type == "TopK":
                return True
            if user.op_type in _OVER_SCORES and user not in seen:
                seen.add(user)
                reached.append(user)
    return False


def _gathered(model: ir.Model, node: ir.Node, name: str, order: NDArray[np.int64]) -> ir.Value:
    """The input of a projection with its columns in another order, once for projections that share both."""
    x = node.inputs[0]
    for user, _ in x.uses():
        if user.op_type == "Gather" and user.inputs[0] is x and user.attributes["axis"].as_int() == -1:
            found = user.inputs[1].const_value
            if found is not None and np.array_equal(found.numpy(), order):
                return user.outputs[0]
    gather = ir.node("Gather", [x, constant(model, f"{name}.order", order)], {"axis": -1})
    model.graph.insert_before(node, gather)
    gather.outputs[0].name = f"{name}.input"
    gather.outputs[0].type, gather.outputs[0].shape = x.type, x.shape
    return gather.outputs[0]


def _tied_head(model: ir.Model) -> ir.Value | None:
    """The initializer that is the LM head and the table that ids are looked up in, or None."""
    tables = {node.inputs[0] for node in model.graph if node.op_type == "Gather"}
    found = (projection for node in model.graph if (projection := _projection(node)) is not None)
    return next((each.weight for each in found if each.expert is None and each.weight in tables), None)
