"""Few-bit weights in standard operators: `DequantizeLinear` in front of `MatMul` and `Gather`, as TensorRT fuses them.

TensorRT takes signed levels without zero points: 4 bits in blocks of 32, 64 or 128 columns, and 8 bits with positive
scales. Float8 weights it multiplies by float8 inputs, which a pair of operators in front rounds; where inputs are not
rounded, it writes such weights out as floats, in every step. A block of the checkpoint's or of the calibration's that
does not divide the columns is written as smaller ones that repeat its scale: the same numbers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from paceline.errors import CheckpointError
from paceline_export.passes.initializers import constant, initializer
from paceline_export.quantize.blockwise import Blockwise, quantize
from paceline_export.quantize.rows import quantize_rows

__all__ = ["BLOCKS", "Dequantize"]

BLOCKS = (128, 64, 32)


class Dequantize:
    """Signed levels and scales; see `WeightNodes`."""

    def check(self, name: str, columns: int, *, bits: int, block_size: int) -> None:
        """Blocks of 4 bits must divide the columns; rows of 8 bits may have any number."""
        if bits == 4:
            _block(name, columns, block_size)

    def quantize(self, name: str, weight: torch.Tensor, *, bits: int, block_size: int, symmetric: bool) -> Blockwise:
        """Quantise a projection: 4 bits in blocks, 8 bits by rows."""
        self.check(name, weight.shape[1], bits=bits, block_size=block_size)
        if bits == 8:
            return quantize_rows(weight)
        return quantize(weight, bits=bits, block_size=block_size, symmetric=symmetric)

    def quantize_table(self, weight: torch.Tensor, *, bits: int) -> Blockwise | None:
        """Quantise a table by rows."""
        return quantize_rows(weight)

    def refusal(self, weight: Blockwise) -> str | None:
        """Zero points, or blocks of 8 bits with negative scales, cannot be held."""
        if weight.zero_points is not None:
            return "it has zero points"
        if weight.bits == 8 and (weight.scales < 0).any():
            return "it has negative scales for 8 bits"
        return None

    def product(self, model: ir.Model, x: ir.Value, name: str, weight: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """`DequantizeLinear`, `Transpose`, `MatMul`, and the operators that round the input where that is wanted."""
        nodes: list[ir.Node] = []
        if weight.input_scale is not None:
            rounded = _rounded_already(x)
            if rounded is None:
                nodes += _rounded_input(model, x, name, weight.input_scale, dtype)
                rounded = nodes[-1].outputs[0]
            x = rounded
        dequantized = _dequantized(model, name, weight, dtype)
        transposed = ir.node("Transpose", [dequantized.outputs[0]], {"perm": [1, 0]})
        return [*nodes, dequantized, transposed, ir.node("MatMul", [x, transposed.outputs[0]])]

    def lookup(self, model: ir.Model, ids: ir.Value, name: str, table: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """`DequantizeLinear`, `Gather`: TensorRT reads the rows that are wanted, and keeps few-bit ones."""
        dequantized = _dequantized(model, name, table, dtype)
        return [dequantized, ir.node("Gather", [dequantized.outputs[0], ids], {"axis": 0})]

    def tied_lookup(
        self, model: ir.Model, ids: ir.Value, name: str, head: Blockwise, dtype: ir.DataType
    ) -> list[ir.Node]:
        """The same over the head's initializers."""
        return self.lookup(model, ids, name, head, dtype)


def _block(name: str, columns: int, block_size: int) -> int:
    """The largest block that TensorRT takes, that divides the columns, and that divides `block_size`."""
    block = next((size for size in BLOCKS if columns % size == 0 and block_size % size == 0), None)
    if block is None:
        raise CheckpointError(
            f"The projection {name!r} has {columns} columns in blocks of {block_size}, but TensorRT reads 4 bits in "
            f"blocks of {', '.join(map(str, BLOCKS))} that divide the columns; export it with int8 or fp16, or with "
            "--block-size 128, 64 or 32."
        )
    return block


def _rounded_already(x: ir.Value) -> ir.Value | None:
    """What another product that reads `x` rounded it to, by the same range, or None."""
    users = [user for user, _ in x.uses() if user.op_type == "QuantizeLinear"]
    return next(iter(users[0].outputs[0].uses())).node.outputs[0] if users else None


def _rounded_input(model: ir.Model, x: ir.Value, name: str, scale: float, dtype: ir.DataType) -> list[ir.Node]:
    """Nodes whose last output is `x` rounded to float8 numbers times a scale; beyond them it is cut off."""
    scales = [constant(model, f"{name}.input_scale", np.array(scale), dtype)]
    rounded = ir.node("QuantizeLinear", [x, *scales], {"output_dtype": int(ir.DataType.FLOAT8E4M3FN)})
    return [rounded, ir.node("DequantizeLinear", [rounded.outputs[0], *scales])]


def _dequantized(model: ir.Model, name: str, weight: Blockwise, dtype: ir.DataType) -> ir.Node:
    """A node whose output is the weight `[rows, columns]`."""
    rows, columns = weight.packed.shape[0], weight.columns
    scales = np.where(weight.scales == 0, np.float32(1), weight.scales)  # whose levels all stand for 0
    if weight.bits == 8 and weight.block_size == columns:
        attributes = {"axis": 0}
        scales = scales.reshape(rows)
    else:
        block = _block(name, columns, weight.block_size) if weight.bits == 4 else weight.block_size
        attributes = {"axis": 1, "block_size": block}
        scales = scales.repeat(weight.block_size // block, axis=1)[:, : -(-columns // block)]
    flat = weight.packed.reshape(rows, -1)
    if weight.bits == 4:
        signed = flat[:, : columns // 2] ^ 0x88  # level 8 stands for 0; two's complement turns the top bit
        tensor: ir.TensorProtocol = ir.PackedTensor(
            np.ascontiguousarray(signed).reshape(-1), ir.DataType.INT4, shape=(rows, columns), name=f"{name}.q"
        )
    elif weight.input_scale is not None:
        tensor = ir.tensor(flat[:, :columns].view(ml_dtypes.float8_e4m3fn), name=f"{name}.q")
    else:
        tensor = ir.tensor((flat[:, :columns] ^ 0x80).view(np.int8), name=f"{name}.q")
    levels = initializer(model, f"{name}.q", tensor.dtype, (rows, columns))
    levels.const_value = tensor
    return ir.node("DequantizeLinear", [levels, constant(model, f"{name}.scales", scales, dtype)], attributes)
