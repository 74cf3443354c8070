"""From logits to a token: the distribution that is sampled, and the draw itself.

The same functions serve target and draft, plain and speculative decoding: exactness needs that the two sides of
the acceptance ratio are the distributions that are really drawn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError, ModelOutputError

__all__ = ["FloatArray", "SamplingParams", "distribution", "greedy_token", "sample"]

FloatArray: TypeAlias = NDArray[np.floating[Any]]

# Entries that are summed in the logits' own precision; the sums of blocks are added in float64. A float32 running sum
# over a whole vocabulary would swallow increments below its rounding and draw wrong tokens from flat distributions.
_BLOCK = 512
# Top-k looks for its candidates among the maxima of this many groups of logits.
_GROUPS = 2048
# Beyond this the scaled logits underflow to probability 0 anyway; a larger factor would overflow float32.
_MAX_SCALE = 1e38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from logits; applied in the order temperature, top-k, top-p, as transformers does.

    Attributes:
        temperature: 0 takes the most probable token (greedy); otherwise logits are divided by it.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability is at least `top_p`; 1 keeps all.
        seed: key of the random streams, 0 to 2**64 - 1; None takes a fresh one per generation.

    Where tokens are equally probable at a cut, those with the lowest ids are kept.

    Raises:
        InvalidInputError: a value of the wrong type or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InvalidInputError(f"temperature must be a finite number of at least 0, got {self.temperature!r}.")
        if not _is_int(self.top_k) or self.top_k < 0:
            raise InvalidInputError(f"top_k must be an integer of at least 0 (0 keeps all), got {self.top_k!r}.")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidInputError(f"top_p must be above 0 and at most 1 (1 keeps all), got {self.top_p!r}.")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise InvalidInputError(f"seed must be None or an integer from 0 to 2**64 - 1, got {self.seed!r}.")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of drawing one."""
        return self.temperature == 0


def greedy_token(logits: FloatArray, where: str = "the logits") -> int:
    """Id of the largest logit, the lowest id among equals.

    Args:
        logits: float `[vocab]`.
        where: names the row in the error.

    Raises:
        ModelOutputError: NaN, plus infinity, or no finite logit.
    """
    token = int(logits.argmax())  # the first NaN when there is one
    if not math.isfinite(logits[token]):
        raise _no_distribution(float(logits[token]), where)
    return token


def distribution(logits: FloatArray, params: SamplingParams, where: str = "the logits") -> FloatArray:
    """Probabilities that `params` give to one row of logits.

    Args:
        logits: float `[vocab]`; minus infinity means probability 0.
        params: temperature 0 gives probability 1 to the greedy token.
        where: names the row in the error.

    Returns:
        `[vocab]` in the dtype of `logits`, a new array.

    Raises:
        ModelOutputError: NaN, plus infinity, or no finite logit.
    """
    if params.greedy:
        one_hot = np.zeros_like(logits)
        one_hot[greedy_token(logits, where)] = 1
        return one_hot

    largest = float(logits.max())  # NaN when there is one
    if not math.isfinite(largest):
        raise _no_distribution(largest, where)

    ids = _top_k_ids(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    weights = (logits if ids is None else logits[ids]) - largest  # [vocab] or [top_k]
    with np.errstate(over="ignore"):  # a hugely negative logit at a small temperature is minus infinity
        if params.temperature != 1:
            weights *= min(1 / params.temperature, _MAX_SCALE)
    np.exp(weights, out=weights)  # the largest weight is 1

    total = float(_block_sums(weights).sum())
    if params.top_p < 1:
        kept = _top_p_indices(weights, total, params.top_p)
        weights = weights[kept]
        total = float(weights.sum(dtype=np.float64))
        ids = kept if ids is None else ids[kept]
    weights /= total
    if ids is None:
        return weights
    probs = np.zeros_like(logits)
    probs[ids] = weights
    return probs


def sample(weights: FloatArray, uniform: float) -> int:
    """Draw an id with probability proportional to its weight, by the inverse of the cumulative sum.

    Two levels: the cumulated sums of blocks pick the block, the cumulated weights inside it pick the id.

    Args:
        weights: float `[vocab]`, none negative; they need not sum to 1.
        uniform: random number in [0, 1).

    Returns:
        An id whose weight is not 0.

    Raises:
        InvalidInputError: the weights do not have a positive, finite sum.
    """
    cumulated = np.cumsum(_block_sums(weights))  # [blocks]
    total = float(cumulated[-1])
    if not 0 < total < math.inf:
        raise InvalidInputError(f"Cannot draw from weights whose sum is {total}; it must be positive and finite.")
    block = min(int(np.searchsorted(cumulated, uniform * total, side="right")), int(np.argmax(cumulated == total)))
    before = float(cumulated[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)  # [at most _BLOCK]
    # The block's sum was rounded differently from the running sum inside it: carry the fraction over, not the value.
    fraction = max(uniform * total - before, 0.0) / (float(cumulated[block]) - before)
    last = float(inside[-1])
    index = min(int(np.searchsorted(inside, fraction * last, side="right")), int(np.argmax(inside == last)))
    return block * _BLOCK + index


def _block_sums(weights: FloatArray) -> NDArray[np.float64]:
    """Sums of blocks of `_BLOCK` weights, the last one maybe shorter."""
    full = len(weights) // _BLOCK
    sums = np.empty(full + 1)
    # einsum, not a product with ones: BLAS would start threads that compete with the model's.
    sums[:full] = np.einsum("ij->i", weights[: full * _BLOCK].reshape(full, _BLOCK))
    sums[full] = weights[full * _BLOCK :].sum(dtype=np.float64)
    return sums


def _top_k_ids(logits: FloatArray, top_k: int) -> NDArray[np.intp]:
    """Ids of the `top_k` largest logits."""
    rows = len(logits) // _GROUPS
    if rows < 4 or top_k > _GROUPS // 2:
        return _largest(logits, _kth_largest(logits, top_k), top_k)
    maxima = logits[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    # `top_k` groups hold a logit of at least this, so no smaller one can be among the `top_k` largest.
    candidates = np.flatnonzero(logits >= _kth_largest(maxima, top_k))
    values = logits[candidates]
    return candidates[_largest(values, _kth_largest(values, top_k), top_k)]


def _top_p_indices(weights: FloatArray, total: float, top_p: float) -> NDArray[np.intp]:
    """Indices of the smallest set of largest weights whose sum is at least `top_p * total`; the largest weight is 1."""
    needed = top_p * total
    candidates = np.flatnonzero(weights >= 1e-3)
    values = weights[candidates]
    if float(values.sum(dtype=np.float64)) < needed:
        # Weights below this floor together fall short of (1 - top_p) * total.
        candidates = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
        values = weights[candidates]
    return candidates[_indices_of_mass(values, needed)]


def _indices_of_mass(values: FloatArray, needed: float) -> NDArray[np.intp]:
    """Indices of the smallest set of largest values whose sum is at least `needed`.

    Sorting 10**5 values takes milliseconds, so bins are summed first and only the bin where the sum is reached is
    sorted. The bins are the leading bits of the floats, which order positive floats by their size.
    """
    bits: NDArray[np.int64] = values.view(np.dtype(f"i{values.itemsize}"))
    bins = (bits >> (8 * values.itemsize - 14)).astype(np.intp)
    from_top = np.cumsum(np.bincount(bins, weights=values)[::-1])  # of the largest bin, of the two largest bins, …
    last_bin = max(len(from_top) - 1 - int(np.searchsorted(from_top, needed)), int(bins.min()))
    in_bin = np.flatnonzero(bins == last_bin)
    higher = np.flatnonzero(bins > last_bin)

    ordered = np.sort(values[in_bin])[::-1]
    mass = values[higher].sum(dtype=np.float64) + np.cumsum(ordered, dtype=np.float64)
    count = min(int(np.searchsorted(mass, needed)) + 1, len(ordered))
    chosen = in_bin[_largest(values[in_bin], ordered[count - 1], count)]
    return np.concatenate((higher, chosen))


def _kth_largest(values: FloatArray, k: int) -> Any:
    return np.partition(values, len(values) - k)[len(values) - k]


def _largest(values: FloatArray, cutoff: Any, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, of which `cutoff` is the smallest; the lowest index first among equals."""
    above = np.flatnonzero(values > cutoff)
    ties = np.flatnonzero(values == cutoff)[: count - len(above)]
    return np.concatenate((above, ties))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _no_distribution(largest: float, where: str) -> ModelOutputError:
    found = "nothing but minus infinity" if largest == -math.inf else f"{largest}"
    return ModelOutputError(
        f"{where} contain {found}, which defines no distribution; logits must be finite or minus infinity, with at "
        "least one finite. Check the exported model with `paceline check`."
    )
