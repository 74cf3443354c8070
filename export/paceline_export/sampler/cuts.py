"""Truncations: top-k, top-p, min-p and locally typical sampling, without sorting a vocabulary.

A threshold is searched by bisection, a fixed number of sums over the row, so that nothing has to be decided on the
host in between; behind a small top-k a few sorted candidates do. Branches are not nested, which TensorRT refuses where
the number of rows is not fixed.

Entries that lie within the last step of the search, 5e-8 in the logarithm of the probability or a float32's rounding,
count as equal. Equal entries at a cut are all kept (numpy's keeps those with the lowest ids); plain and speculative
decoding over the same graphs cut alike, so the law is that of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .draw import row_sums
from .ops import Ops

__all__ = ["FEW", "Cuts", "cut"]

# exp of less than this is 0 in float32.
_LOWEST = -104.0
_STEPS = 31


# Up to here top-k sorts its candidates out instead of searching; TensorRT's TopK ends at 3840.
FEW = 256


@dataclass(frozen=True, slots=True)
class Cuts:
    """Names of the inputs that say where to cut. Scalars; the flags are bool and stay on the host."""

    cut: str  # whether top-k, top-p or min-p cut
    top_k_few: str  # whether top-k cuts, with top_k up to FEW
    top_k_many: str  # whether top-k cuts, with more
    top_k: str  # int64
    top_p_few: str  # whether top-p cuts, with top_k_few
    top_p_many: str  # whether top-p cuts, without
    top_p: str  # float32
    min_p: str  # float32; 0 keeps all
    cut_typical_p: str  # whether typical-p cuts
    typical_p: str  # float32

    @classmethod
    def declare(cls, op: Ops) -> Cuts:
        """Declare the inputs."""
        return cls(
            cut=op.input("cut", np.bool_, []),
            top_k_few=op.input("top_k_few", np.bool_, []),
            top_k_many=op.input("top_k_many", np.bool_, []),
            top_k=op.input("top_k", np.int64, []),
            top_p_few=op.input("top_p_few", np.bool_, []),
            top_p_many=op.input("top_p_many", np.bool_, []),
            top_p=op.input("top_p", np.float32, []),
            min_p=op.input("min_p", np.float32, []),
            cut_typical_p=op.input("cut_typical_p", np.bool_, []),
            typical_p=op.input("typical_p", np.float32, []),
        )


def cut(op: Ops, keys: str, weights: str, cuts: Cuts, width: int) -> str:
    """Put 0 for what the cuts remove.

    Args:
        op: the graph.
        keys: float32 `[rows, width]`, logarithms of the weights, at most 0; minus infinity is allowed.
        weights: float32 `[rows, width]`, the largest of each row is 1.
        cuts: where to cut.
        width: of the rows.

    Returns:
        Weights `[rows, width]`; each cut sees what the one before left, renormalised.
    """
    finite = op("Max", keys, op.constant(_LOWEST))
    threshold = _size_threshold(op, finite, weights, cuts, min(width, FEW))

    def kept(op: Ops) -> str:
        left = op("Mul", weights, _above(op, finite, threshold))
        return op("Mul", left, op.cast(op("GreaterOrEqual", weights, cuts.min_p), np.float32))

    left = op.either(cuts.cut, kept, lambda op: op("Identity", weights))
    return op.either(
        cuts.cut_typical_p,
        lambda op: _typical(op, finite, left, cuts.typical_p),
        lambda op: op("Identity", left),
    )


def _size_threshold(op: Ops, keys: str, weights: str, cuts: Cuts, few: int) -> str:
    """What top-k and top-p keep is above this, `[rows, 1]`."""
    rows = op("Shape", row_sums(op, weights))  # [rows, 1]
    all_kept = op("Expand", op.constant(_LOWEST - 1), rows)
    one = op.constant(1, np.int64)

    def below(op: Ops, sorted_keys: str, index: str) -> str:
        """Just below the entry of `[rows, few]` at an index `[rows, 1]`."""
        entry = op("GatherElements", sorted_keys, index, axis=1)
        return op("Sub", op("Mul", entry, op.constant(1 + 2.0**-23)), op.constant(1e-37))

    largest = op.either(
        cuts.top_k_few,
        lambda op: op.several("TopK", 2, keys, op.ints(few), axis=1)[0],
        lambda op: op("Expand", op.constant(0), op("Concat", op("Shape", keys, end=1), op.ints(few), axis=0)),
    )  # [rows, few]
    last = op("Expand", op("Min", op("Sub", cuts.top_k, one), op.constant(few - 1, np.int64)), rows)

    threshold = op.either(cuts.top_k_few, lambda op: below(op, largest, last), lambda op: op("Identity", all_kept))
    threshold = op.either(
        cuts.top_k_many,
        lambda op: _threshold(op, keys, lambda op, kept: kept, op.cast(cuts.top_k, np.float32)),
        lambda op: op("Identity", threshold),
    )

    def top_p_few(op: Ops) -> str:
        inside = op.cast(op("LessOrEqual", op.constant([range(few)], np.int64), last), np.float32)
        mass = op("CumSum", op("Mul", op("Exp", largest), inside), one)  # [rows, few]
        total = op("Gather", mass, op.ints(-1), axis=1)
        missing = op("Less", mass, op("Mul", total, cuts.top_p))
        count = op("ReduceSum", op.cast(missing, np.int64), op.ints(1), keepdims=1)
        return below(op, largest, op("Min", count, last))

    def top_p_many(op: Ops) -> str:
        left = op("Mul", weights, _above(op, keys, threshold))
        needed = op("Mul", row_sums(op, left), cuts.top_p)
        return op("Max", _threshold(op, keys, lambda op, kept: op("Mul", left, kept), needed), threshold)

    few_kept = op.either(cuts.top_p_few, top_p_few, lambda op: op("Identity", threshold))
    return op.either(cuts.top_p_many, top_p_many, lambda op: op("Identity", few_kept))


def _typical(op: Ops, keys: str, weights: str, typical_p: str) -> str:
    """Keep what is nearest to the entropy in its surprise, until its probability is at least `typical_p`.

    Meister et al. 2022 (arXiv 2202.00666): the order is that of |-log(probs) - H| with H = -Σ probs · log(probs).
    With probs = exp(key) / total that is |m - key|, m being the mean of the keys under probs.
    """
    total = row_sums(op, weights)
    mean = op("Div", row_sums(op, op("Mul", weights, keys)), total)  # [rows, 1]
    nearness = op("Neg", op("Abs", op("Sub", mean, keys)))
    found = _threshold(op, nearness, lambda op, kept: op("Mul", weights, kept), op("Mul", total, typical_p))
    return op("Mul", weights, _above(op, nearness, found))


def _threshold(op: Ops, keys: str, mass_of: Callable[[Ops, str], str], needed: str) -> str:
    """The highest threshold `[rows, 1]` above which each row has the mass that is needed.

    Args:
        op: the graph.
        keys: float32 `[rows, width]`, from `_LOWEST` to 0.
        mass_of: the mass `[rows, width]` of what is kept, 1 or 0 `[rows, width]`.
        needed: float32 `[rows, 1]` or scalar.
    """
    step = 1 - _LOWEST
    threshold = op.constant([[_LOWEST - 1]])  # everything is above it
    for _ in range(_STEPS):
        step /= 2
        mass = row_sums(op, mass_of(op, _above(op, keys, op("Add", threshold, op.constant(step)))))  # [rows, 1]
        enough = op.cast(op("GreaterOrEqual", mass, needed), np.float32)
        threshold = op("Add", threshold, op("Mul", enough, op.constant(step)))
    return threshold


def _above(op: Ops, keys: str, threshold: str) -> str:
    """1 where a key is above the threshold, 0 elsewhere; a product with it is many times faster than `Where`."""
    return op.cast(op("Greater", keys, threshold), np.float32)
