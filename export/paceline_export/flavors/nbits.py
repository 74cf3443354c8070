"""ONNX Runtime's few-bit operators: `MatMulNBits` and `GatherBlockQuantized`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from paceline_export.passes.initializers import constant
from paceline_export.quantize.blockwise import Blockwise, quantize

__all__ = ["EMBEDDING_BLOCK_SIZES", "NBits"]

EMBEDDING_BLOCK_SIZES = (128, 64, 32, 16)


class NBits:
    """Weights in blocks, as `com.microsoft` reads them; see `WeightNodes`.

    Attributes:
        accuracy_level: of products, as `MatMulNBits` says it: 4 rounds activations to 8 bits, which makes few-bit
            products fast on a CPU; 0 leaves them.
    """

    def __init__(self, *, accuracy_level: int = 4) -> None:
        self.accuracy_level = accuracy_level

    def check(self, name: str, columns: int, *, bits: int, block_size: int) -> None:
        """Any number of columns will do: the last block is padded."""

    def quantize(self, name: str, weight: torch.Tensor, *, bits: int, block_size: int, symmetric: bool) -> Blockwise:
        """Quantise a projection; the last block is padded."""
        return quantize(weight, bits=bits, block_size=block_size, symmetric=symmetric)

    def quantize_table(self, weight: torch.Tensor, *, bits: int) -> Blockwise | None:
        """Quantise a table in the largest blocks that its width is a multiple of."""
        block = next((size for size in EMBEDDING_BLOCK_SIZES if weight.shape[1] % size == 0), None)
        return None if block is None else quantize(weight, bits=bits, block_size=block, symmetric=True)

    def refusal(self, weight: Blockwise) -> str | None:
        """Every weight in blocks can be held."""
        return None

    def product(self, model: ir.Model, x: ir.Value, name: str, weight: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """One `MatMulNBits`."""
        rows = weight.packed.shape[0]
        inputs = [
            x,
            constant(model, f"{name}.q", weight.packed),
            constant(model, f"{name}.scales", weight.scales.reshape(-1), dtype),
        ]
        if weight.zero_points is not None:
            inputs.append(constant(model, f"{name}.zero_points", weight.zero_points.reshape(-1)))
        attributes = {
            "K": weight.columns,
            "N": rows,
            "bits": weight.bits,
            "block_size": weight.block_size,
            "accuracy_level": self.accuracy_level,
        }
        return [ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")]

    def lookup(self, model: ir.Model, ids: ir.Value, name: str, table: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """One `GatherBlockQuantized`."""
        rows = table.packed.shape[0]
        inputs = [
            constant(model, f"{name}.q", table.packed.reshape(rows, -1)),
            ids,
            constant(model, f"{name}.scales", table.scales, dtype),
        ]
        attributes = {"gather_axis": 0, "quantize_axis": 1, "block_size": table.block_size, "bits": table.bits}
        return [ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft")]

    def tied_lookup(
        self, model: ir.Model, ids: ir.Value, name: str, head: Blockwise, dtype: ir.DataType
    ) -> list[ir.Node]:
        """`GatherBlockQuantized` over the initializers of a `MatMulNBits`, whose scales are in one line."""
        rows, blocks, _ = head.packed.shape
        width = blocks * head.block_size
        packed = constant(model, f"{name}.q", head.packed)
        scales = constant(model, f"{name}.scales", head.scales.reshape(-1), dtype)
        shape = constant(model, f"{name}.scales_shape", np.array([rows, blocks, 1]))
        scales_by_block = ir.node("Reshape", [scales, shape], name=f"{name}.scales_by_block")
        attributes = {"gather_axis": 0, "quantize_axis": 2, "block_size": head.block_size, "bits": head.bits}
        inputs = [packed, ids, scales_by_block.outputs[0]]
        blockwise = ir.node("GatherBlockQuantized", inputs, attributes, domain="com.microsoft", name=f"{name}.blocks")
        shape = constant(model, f"{name}.row_shape", np.array([0, 0, width]))
        chain = [scales_by_block, blockwise, ir.node("Reshape", [blockwise.outputs[0], shape], name=f"{name}.rows")]
        if width > head.columns:  # the last block is padded
            ends = (("start", 0), ("end", head.columns), ("axis", 2))
            slices = [constant(model, f"{name}.row_{what}", np.array([value])) for what, value in ends]
            chain.append(ir.node("Slice", [chain[-1].outputs[0], *slices], name=f"{name}.columns"))
        for node in chain[:-1]:
            node.outputs[0].name = node.name
        return chain
