"""From logits to a token: the settings, the distribution that is sampled, and the draw itself.

The same functions serve target and draft, plain and speculative decoding: exactness needs that the two sides of
the acceptance ratio are the distributions that are really drawn from.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from .cuts import FloatArray, top_k_indices, top_p_indices, typical_indices
from .errors import InvalidInputError, ModelOutputError, shown

__all__ = [
    "FloatArray",
    "SamplingParams",
    "distribution",
    "greedy_token",
    "plain_number",
    "sample",
    "softmax_at",
    "token_indices",
]

# Entries that are summed in the logits' own precision; the sums of blocks are added in float64. A float32 running sum
# over a whole vocabulary would swallow increments below its rounding and draw wrong tokens from flat distributions.
_BLOCK = 512
# Beyond this the scaled logits underflow to probability 0 anyway; a larger factor would overflow float32. A smaller
# one than the least would be 0 in float32, and minus infinity times 0 is NaN.
_MIN_SCALE, _MAX_SCALE = 2e-38, 1e38


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn from logits. One row is changed in the order of this list; see `RowSampler` for the history.

    Attributes:
        repetition_penalty: logits of ids that occur in prompt or new text are divided by it where positive and
            multiplied where negative (Keskar et al. 2019, arXiv 1909.05858); above 0, 1 changes nothing.
        presence_penalty: subtracted from the logits of ids that occur in the new text; -2 to 2.
        frequency_penalty: subtracted once for every time an id occurs in the new text; -2 to 2.
        logit_bias: added to the logits of these ids; a mapping, kept as pairs in the order of the ids.
        banned_token_ids: ids that are never emitted.
        forced_token_ids: the new text begins with these ids.
        no_repeat_ngram_size: no sequence of so many ids occurs twice in prompt and new text; 0 allows all.
        min_new_tokens: no end of the text before so many new tokens.
        temperature: 0 takes the most probable token (greedy); otherwise logits are divided by it.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose probability is at least `top_p`; 1 keeps all.
        min_p: keep tokens at least `min_p` times as probable as the most probable one; 0 keeps all.
        typical_p: keep the tokens whose surprise is nearest to the entropy, with a probability of at least `typical_p`
            together (Meister et al. 2022, arXiv 2202.00666); 1 keeps all.
        seed: key of the random streams, 0 to 2**64 - 1; None takes a fresh one per generation.

    The cuts (top-k to typical-p) each see what the one before left, renormalised, as in transformers. Where tokens
    are equal at a cut, those with the lowest ids are kept.

    Raises:
        InvalidInputError: a value of the wrong type or out of its range, or two that contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            object.__setattr__(self, entry.name, plain_number(getattr(self, entry.name)))
        _check_number("temperature", self.temperature, "a finite number of at least 0", lambda x: 0 <= x < math.inf)
        _check_number("top_p", self.top_p, "above 0 and at most 1 (1 keeps all)", lambda x: 0 < x <= 1)
        _check_number("min_p", self.min_p, "from 0 (keeps all) to 1", lambda x: 0 <= x <= 1)
        _check_number("typical_p", self.typical_p, "above 0 and at most 1 (1 keeps all)", lambda x: 0 < x <= 1)
        _check_number(
            "repetition_penalty", self.repetition_penalty, "a finite number above 0 (1 changes nothing)", _is_positive
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), "from -2 to 2 (0 changes nothing)", lambda x: -2 <= x <= 2)
        _check_count("top_k", self.top_k, "0 keeps all")
        _check_count("no_repeat_ngram_size", self.no_repeat_ngram_size, "0 allows all")
        _check_count("min_new_tokens", self.min_new_tokens, "0 asks for none")
        if self.seed is not None and (not _is_int(self.seed) or not 0 <= self.seed < 2**64):
            raise InvalidInputError(
                f"seed must be None or an integer from 0 to 2**64 - 1, got {shown(self.seed)}.", "seed"
            )
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        for name in ("banned_token_ids", "forced_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if both := sorted(set(self.banned_token_ids) & set(self.forced_token_ids)):
            raise InvalidInputError(
                f"Token id {both[0]} is both in banned_token_ids and in forced_token_ids; take it out of one of them.",
                "banned_token_ids",
            )

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
    """Probabilities that temperature and cuts give to one row of logits (penalties and masks already applied).

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

    ids = top_k_indices(logits, params.top_k) if 0 < params.top_k < len(logits) else None
    weights = (logits if ids is None else logits[ids]) - largest  # [vocab] or [top_k]
    with np.errstate(over="ignore"):  # a hugely negative logit at a small temperature is minus infinity
        if params.temperature != 1:
            weights *= min(max(1 / params.temperature, _MIN_SCALE), _MAX_SCALE)
    exponents = weights.copy() if params.typical_p < 1 else weights
    np.exp(weights, out=weights)  # the largest weight is 1

    total = float(_block_sums(weights).sum())
    if params.top_p < 1:
        weights, total, ids = _keep(top_p_indices(weights, total, params.top_p), weights, ids)
    if params.min_p > 0:
        weights, total, ids = _keep(np.flatnonzero(weights >= params.min_p), weights, ids)
    if params.typical_p < 1:
        # A cut came before, so few are left; one that kept all may have put them in another order.
        if params.top_p < 1 or len(exponents) > len(weights):
            with np.errstate(divide="ignore"):
                exponents = np.log(weights)
        weights, total, ids = _keep(typical_indices(exponents, weights, total, params.typical_p), weights, ids)
    weights /= total
    if ids is None:
        return weights
    probs = np.zeros_like(logits)
    probs[ids] = weights
    return probs


def softmax_at(logits: FloatArray, token: int) -> float:
    """Probability of one token at temperature 1.

    Args:
        logits: float `[vocab]`; minus infinity means probability 0.
        token: index of the largest logit, which is finite.
    """
    # Leaving small logits out is no cheaper: picking some of 10**5 values takes longer than the exponentials of all.
    weights = logits - logits[token]
    return 1 / float(np.exp(weights, out=weights).sum())


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


def _keep(
    kept: NDArray[np.intp], weights: FloatArray, ids: NDArray[np.intp] | None
) -> tuple[FloatArray, float, NDArray[np.intp]]:
    """The weights that a cut keeps, their sum, and their ids."""
    weights = weights[kept]
    return weights, float(weights.sum(dtype=np.float64)), kept if ids is None else ids[kept]


def _block_sums(weights: FloatArray) -> NDArray[np.float64]:
    """Sums of blocks of `_BLOCK` weights, the last one maybe shorter."""
    full = len(weights) // _BLOCK
    sums = np.empty(full + 1)
    # einsum, not a product with ones: BLAS would start threads that compete with the model's.
    sums[:full] = np.einsum("ij->i", weights[: full * _BLOCK].reshape(full, _BLOCK))
    sums[full] = weights[full * _BLOCK :].sum(dtype=np.float64)
    return sums


def plain_number(value: Any) -> Any:
    """What Python has for a NumPy scalar, which settings may be as well; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def token_indices(values: Any) -> tuple[int, ...]:
    """Token ids as integers of Python.

    Raises:
        TypeError: they are none; bytes, True and False are none.
    """
    if isinstance(values, bytes | bytearray):
        raise TypeError("bytes are no token ids")
    return tuple(_token_index(value) for value in values)


def _token_index(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("a truth value is no token id")
    return operator.index(value)


def _check_number(name: str, value: object, expected: str, is_valid: Callable[[float], bool]) -> None:
    if (number := _float(value)) is None or not is_valid(number):
        raise InvalidInputError(f"{name} must be {expected}, got {shown(value)}.", name)


def _check_count(name: str, value: object, zero: str) -> None:
    if not _is_int(value) or value < 0:
        raise InvalidInputError(f"{name} must be an integer of at least 0 ({zero}), got {shown(value)}.", name)


def _float(value: object) -> float | None:
    """A number as a float; None for what is none, or too large for one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _pairs(bias: object) -> tuple[tuple[int, float], ...]:
    """Check a logit bias and bring it to pairs in the order of the ids."""
    expected = "logit_bias must map token ids to finite numbers"
    try:
        pairs = list(bias.items() if isinstance(bias, Mapping) else bias)  # type: ignore[call-overload]
        given = {_token_index(token_id): plain_number(value) for token_id, value in pairs}
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{expected}, got {shown(bias)}.", "logit_bias") from error
    checked = []
    for token_id, value in given.items():
        number = _float(value)
        if token_id < 0 or number is None or not math.isfinite(number):
            raise InvalidInputError(f"{expected}, got {shown(value)} for id {shown(token_id)}.", "logit_bias")
        checked.append((token_id, number))
    return tuple(sorted(checked))


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if name == "forced_token_ids" and isinstance(values, Set):
        raise InvalidInputError(f"{name} must be in the text's order, got {shown(values)}; give a list.", name)
    try:
        ids = token_indices(values)
    except TypeError as error:
        raise InvalidInputError(f"{name} must be integer token ids, got {shown(values)}.", name) from error
    if ids and min(ids) < 0:
        raise InvalidInputError(f"{name} must be token ids of at least 0, got {shown(min(ids))}.", name)
    return ids


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _no_distribution(largest: float, where: str) -> ModelOutputError:
    found = "nothing but minus infinity" if largest == -math.inf else f"{largest}"
    return ModelOutputError(
        f"{where} contain {found}, which defines no distribution; logits must be finite or minus infinity, with at "
        "least one finite. Check the exported model with `paceline check`."
    )
