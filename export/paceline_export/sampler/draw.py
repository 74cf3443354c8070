"""Picking one id per row: the draw by the inverse of the cumulative sum, and the most probable id.

Rows are padded to whole blocks of `BLOCK` entries. Both pick a block first and an entry inside it then, as
`paceline.sampling.sample` does: a float32 running sum over a whole vocabulary would swallow increments below its
rounding, and an `ArgMax` promises no order among equals on every backend.
"""

from __future__ import annotations

import numpy as np

from paceline.bundle import SAMPLER_BLOCK

from .ops import Ops

__all__ = ["BLOCK", "UNIFORM_BITS", "block_sums", "draw", "first_largest", "in_blocks", "padded", "row_sums"]

BLOCK = SAMPLER_BLOCK
# Uniforms come as integers below 2**53, the very numbers that `paceline.streams` divides by 2**53: float32 would
# leave a flat vocabulary of 152k ids a hundred steps each.
UNIFORM_BITS = 53


def padded(vocab_size: int) -> int:
    """Width of a row that holds `vocab_size` ids in whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def in_blocks(op: Ops, rows: str) -> str:
    """`[rows, width]` as `[rows, blocks, BLOCK]`."""
    return op("Reshape", rows, op.ints(0, -1, BLOCK))


def block_sums(op: Ops, weights: str) -> str:
    """Sums `[rows, blocks]` of the blocks of `[rows, width]`."""
    return op("ReduceSum", in_blocks(op, weights), op.ints(2), keepdims=0)


def row_sums(op: Ops, weights: str) -> str:
    """Sums `[rows, 1]` of `[rows, width]`, block by block."""
    return op("ReduceSum", block_sums(op, weights), op.ints(1), keepdims=1)


def draw(op: Ops, weights: str, uniforms: str) -> str:
    """Draw one index per row with probability proportional to its weight.

    Args:
        op: the graph.
        weights: float32 `[rows, width]`, none negative, with a positive and finite sum in every row; from another
            row any index may come.
        uniforms: int64 `[rows]` below 2**UNIFORM_BITS.

    Returns:
        int64 `[rows]`; the weight there is not 0.
    """
    one, last_block = op.constant(1, np.int64), op.ints(-1)
    sums = block_sums(op, weights)  # [rows, blocks]
    total = op("ReduceSum", sums, op.ints(1), keepdims=1)  # [rows, 1]
    # From here to the block the sums are integers, whose cumulated sums are exact.
    scale = op.constant(2.0**UNIFORM_BITS)
    shares = op.cast(op("Mul", op("Div", sums, total), scale), np.int64)  # [rows, blocks]
    cumulated = op("CumSum", shares, op.constant(1, np.int64))  # [rows, blocks]
    whole = op("Gather", cumulated, last_block, axis=1)  # [rows, 1], 2**UNIFORM_BITS but for rounding

    aimed = op("Unsqueeze", uniforms, op.ints(1))  # [rows, 1]
    surplus = op("Div", op.cast(op("Sub", whole, op.constant(2**UNIFORM_BITS, np.int64)), np.float32), scale)
    aimed = op("Add", aimed, op.cast(op("Mul", op.cast(aimed, np.float32), surplus), np.int64))
    aimed = op("Max", op("Min", aimed, op("Sub", whole, one)), op.constant(0, np.int64))
    block = _clamped(op, _count(op, op("LessOrEqual", cumulated, aimed)), op("Shape", sums, start=1, end=2))

    share = op("GatherND", shares, block, batch_dims=1)  # [rows]
    before = op("Sub", op("GatherND", cumulated, block, batch_dims=1), share)
    reached = op("Sub", op("Squeeze", aimed, op.ints(1)), before)
    # The block's sum was rounded differently from the running sum inside it: carry the fraction over, not the value.
    fraction = op("Div", op.cast(reached, np.float32), op.cast(share, np.float32))  # [rows], 0 to 1
    entries = op("GatherND", in_blocks(op, weights), block, batch_dims=1)  # [rows, BLOCK]
    inside = op("CumSum", entries, op.constant(1, np.int64))  # [rows, BLOCK]
    last = op("Gather", inside, last_block, axis=1)  # [rows, 1]
    wanted = op("Mul", op("Unsqueeze", fraction, op.ints(1)), last)
    index = op(
        "Min",
        _count(op, op("LessOrEqual", inside, wanted)),
        _count(op, op("Less", inside, last)),  # where rounding carried beyond the last weight
    )
    return _joined(op, block, _clamped(op, index, op.ints(BLOCK)))


def first_largest(op: Ops, rows: str) -> tuple[str, str]:
    """The index of the largest value of each row, the lowest index among equals.

    Args:
        op: the graph.
        rows: float32 `[rows, width]`.

    Returns:
        Indices int64 `[rows]`, and whether each row has a largest value, bool `[rows]`: false for NaN, plus infinity,
        and nothing but minus infinity; such a row's index is any.
    """
    blocks = in_blocks(op, rows)
    maxima = op("ReduceMax", blocks, op.ints(2), keepdims=0)  # [rows, blocks]
    largest = op("ReduceMax", maxima, op.ints(1), keepdims=1)  # [rows, 1]
    # Neither ReduceMax nor Equal is sure to show a NaN; a sum is, and infinity minus infinity becomes one.
    no_nan = op("LessOrEqual", row_sums(op, op("Sub", rows, largest)), op.constant(0))  # [rows, 1]
    block = _first(op, op("Equal", maxima, largest))
    entries = op("GatherND", blocks, block, batch_dims=1)  # [rows, BLOCK]
    index = _first(op, op("Equal", entries, largest))
    return _joined(op, block, index), op("Squeeze", no_nan, op.ints(1))


def _count(op: Ops, flags: str) -> str:
    """How many flags of `[rows, n]` are set, `[rows, 1]`."""
    return op("ReduceSum", op.cast(flags, np.int64), op.ints(1), keepdims=1)


def _first(op: Ops, flags: str) -> str:
    """Index of the first flag of `[rows, n]` that is set, `[rows, 1]`; n - 1 where none is."""
    seen = op("CumSum", op.cast(flags, np.int64), op.constant(1, np.int64))
    return _clamped(op, _count(op, op("Equal", seen, op.constant(0, np.int64))), op("Shape", flags, start=1, end=2))


def _clamped(op: Ops, index: str, size: str) -> str:
    """An index below `size`: rows that are no distribution must not lead out of the tensor."""
    return op("Min", index, op("Sub", size, op.constant(1, np.int64)))


def _joined(op: Ops, block: str, index: str) -> str:
    """Index in the row `[rows]`, from block and index inside it, both `[rows, 1]`."""
    whole = op("Add", op("Mul", block, op.constant(BLOCK, np.int64)), index)
    return op("Squeeze", whole, op.ints(1))
