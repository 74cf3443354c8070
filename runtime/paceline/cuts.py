"""Which tokens survive a truncation: top-k, top-p and locally typical sampling, without sorting a vocabulary.

Sorting 10**5 values takes milliseconds; these look for a threshold first and sort only what lies beside it. Among
equal values at a cut the lowest indices are kept.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FloatArray", "top_k_indices", "top_p_indices", "typical_indices"]

FloatArray: TypeAlias = NDArray[np.floating[Any]]

# Top-k looks for its candidates among the maxima of this many groups of logits.
_GROUPS = 2048


def top_k_indices(logits: FloatArray, top_k: int) -> NDArray[np.intp]:
    """Indices of the `top_k` largest logits of `[vocab]`."""
    rows = len(logits) // _GROUPS
    if rows < 4 or top_k > _GROUPS // 2:
        return _largest(logits, _kth_largest(logits, top_k), top_k)
    maxima = logits[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    # `top_k` groups hold a logit of at least this, so no smaller one can be among the `top_k` largest.
    candidates = np.flatnonzero(logits >= _kth_largest(maxima, top_k))
    values = logits[candidates]
    return candidates[_largest(values, _kth_largest(values, top_k), top_k)]


def top_p_indices(weights: FloatArray, total: float, top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of largest weights whose sum is at least `top_p * total`; the largest weight is 1."""
    needed = top_p * total
    candidates = np.flatnonzero(weights >= 1e-3)
    values = weights[candidates]
    if float(values.sum(dtype=np.float64)) < needed:
        # Weights below this floor together fall short of (1 - top_p) * total.
        candidates = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
        values = weights[candidates]
    bins = _bins(values)
    from_top = np.cumsum(np.bincount(bins, weights=values)[::-1])  # of the largest bin, of the two largest bins, …
    last_bin = max(len(from_top) - 1 - int(np.searchsorted(from_top, needed)), int(bins.min()))
    in_bin = np.flatnonzero(bins == last_bin)
    higher = np.flatnonzero(bins > last_bin)

    ordered = np.sort(values[in_bin])[::-1]
    mass = values[higher].sum(dtype=np.float64) + np.cumsum(ordered, dtype=np.float64)
    count = min(int(np.searchsorted(mass, needed)) + 1, len(ordered))
    chosen = in_bin[_largest(values[in_bin], ordered[count - 1], count)]
    return candidates[np.concatenate((higher, chosen))]


def typical_indices(exponents: FloatArray, weights: FloatArray, total: float, typical_p: float) -> NDArray[np.intp]:
    """Indices of the tokens whose surprise is nearest to the entropy, until their sum is at least `typical_p * total`.

    Locally typical sampling, Meister et al. 2022 (arXiv 2202.00666): with probs = weights / total and entropy
    H = -Σ probs · log(probs), tokens are taken in the order of |-log(probs) - H|.

    Args:
        exponents: natural logarithms of `weights`, at most 0.
        weights: float `[tokens]`; the largest is 1.
        total: their sum.
        typical_p: between 0 and 1.
    """
    finite = np.maximum(exponents, -1e4)  # where the weight is 0, 0 · infinity would be NaN
    entropy = math.log(total) - float((weights * finite).sum(dtype=np.float64)) / total
    distance = np.abs(np.asarray(math.log(total) - entropy, weights.dtype) - finite)
    probs = weights / total
    # Tokens below the floor together fall short of 1 - typical_p. Where the floor is farther from the entropy than a
    # certain token (surprise 0) is, all others come before them.
    floor = (1 - typical_p) / len(probs)
    candidates = np.flatnonzero(probs >= floor if 2 * entropy < -math.log(floor) else probs > 0)
    distance, probs = distance[candidates], probs[candidates]

    bins = _bins(distance)
    up_to = np.cumsum(np.bincount(bins, weights=probs))  # of the nearest bin, of the two nearest bins, …
    last_bin = min(int(np.searchsorted(up_to, typical_p)), int(bins.max()))
    nearer = np.flatnonzero(bins < last_bin)
    in_bin = np.flatnonzero(bins == last_bin)
    ordered = in_bin[np.argsort(distance[in_bin], kind="stable")]
    mass = probs[nearer].sum(dtype=np.float64) + np.cumsum(probs[ordered], dtype=np.float64)
    count = min(int(np.searchsorted(mass, typical_p)) + 1, len(ordered))
    return candidates[np.concatenate((nearer, ordered[:count]))]


def _bins(values: FloatArray) -> NDArray[np.intp]:
    """Numbers that order values of at least 0 coarsely: the leading bits of a float order positive floats."""
    bits: NDArray[np.int64] = values.view(np.dtype(f"i{values.itemsize}"))
    return (bits >> (8 * values.itemsize - 14)).astype(np.intp)


def _kth_largest(values: FloatArray, k: int) -> Any:
    return np.partition(values, len(values) - k)[len(values) - k]


def _largest(values: FloatArray, cutoff: Any, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, of which `cutoff` is the smallest; the lowest index first among equals."""
    above = np.flatnonzero(values > cutoff)
    ties = np.flatnonzero(values == cutoff)[: count - len(above)]
    return np.concatenate((above, ties))
