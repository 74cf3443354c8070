from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidInputError, ModelOutputError
from paceline.sampling import FloatArray, SamplingParams, distribution, greedy_token, sample

from .reference import naive_distribution_of

VOCAB = 151_936


def language_like(rng: np.random.Generator, vocab: int = VOCAB) -> FloatArray:
    """Logits of a Zipf law in a random order."""
    logits = rng.permutation(-1.3 * np.log(np.arange(1, vocab + 1))) + 0.3 * rng.standard_normal(vocab)
    return logits.astype(np.float32)


logits_lists = st.lists(
    # Ties are common, and logits that differ give probabilities that differ.
    st.one_of(st.integers(-4, 4), st.integers(-240, 240).map(lambda n: n / 8), st.just(-math.inf)),
    min_size=1,
    max_size=40,
).filter(lambda values: any(map(math.isfinite, values)))


@given(
    logits=logits_lists,
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
@settings(max_examples=400, deadline=None)
def test_equals_a_naive_reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    expected = naive_distribution_of(logits, params)
    probs = distribution(np.array(logits, dtype=np.float64), params)
    close = np.allclose(probs, expected, atol=1e-12)
    # The set may differ by one token only where the mass reaches top_p up to rounding.
    assert close or near_top_p(naive_distribution_of(logits, SamplingParams(temperature, top_k)), top_p)


def near_top_p(probs: FloatArray, top_p: float) -> bool:
    return bool((abs(np.cumsum(np.sort(probs)[::-1]) - top_p) < 1e-9).any())


@pytest.mark.parametrize("kind", ["language", "flat", "constant", "two levels"])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.95, 0.999999])
@pytest.mark.parametrize("top_k", [0, 1, 40, 5000])
def test_truncation_at_full_width_keeps_the_smallest_sufficient_set(kind: str, top_p: float, top_k: int) -> None:
    rng = np.random.default_rng(1)
    make: dict[str, Callable[[], FloatArray]] = {
        "language": lambda: language_like(rng),
        "flat": lambda: (0.01 * rng.standard_normal(VOCAB)).astype(np.float32),
        "constant": lambda: np.zeros(VOCAB, np.float32),
        "two levels": lambda: np.where(np.arange(VOCAB) % 7 == 0, np.float32(3), np.float32(0)),
    }
    logits = make[kind]()
    probs = distribution(logits, SamplingParams(1.0, top_k, top_p))
    assert probs.dtype == np.float32
    assert float(probs.sum(dtype=np.float64)) == pytest.approx(1, abs=1e-5)

    ids = np.sort(np.argsort(-logits, kind="stable")[: top_k or None])
    order = ids[np.argsort(-np.exp(logits[ids] - logits.max()), kind="stable")]
    kept = np.count_nonzero(probs)
    assert set(order[:kept]) == set(np.flatnonzero(probs))  # the most probable, the lowest ids among equals
    exact = np.exp(np.float64(logits[order]))
    mass = np.cumsum(exact) / exact.sum()
    assert mass[kept - 1] >= top_p - 1e-5
    assert kept == 1 or mass[kept - 2] < top_p + 1e-5


def test_top_k_keeps_exactly_k_and_breaks_ties_by_id() -> None:
    logits = np.array([1, 2, 2, 2, 0], dtype=np.float32)
    assert np.flatnonzero(distribution(logits, SamplingParams(1.0, top_k=2))).tolist() == [1, 2]


def test_the_order_is_temperature_then_top_k_then_top_p() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.1])
    # Top-p looks at what top-k left, renormalised: 0.4 of 0.9 does not reach 0.44, of 0.7 it does.
    assert np.count_nonzero(distribution(np.log(probs), SamplingParams(1.0, top_k=3, top_p=0.5))) == 2
    assert np.count_nonzero(distribution(np.log(probs), SamplingParams(1.0, top_k=2, top_p=0.5))) == 1
    # Top-p looks at probabilities after the temperature: 0.16 of 0.3 reaches 0.5.
    assert np.count_nonzero(distribution(np.log(probs), SamplingParams(0.5, top_p=0.5))) == 1


@pytest.mark.parametrize("typical_p", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "first", [{"top_p": 0.99999}, {"min_p": 1e-4}, {"top_k": 6}, {"top_p": 0.99999, "min_p": 1e-4}]
)
def test_a_cut_that_keeps_all_leaves_the_next_one_as_it_was(first: dict[str, Any], typical_p: float) -> None:
    for seed in range(20):
        logits = np.random.default_rng(seed).standard_normal(6)
        alone = distribution(logits, SamplingParams(1.0, typical_p=typical_p))
        both = distribution(logits, SamplingParams(1.0, typical_p=typical_p, **first))
        assert both.tolist() == pytest.approx(alone.tolist())


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_18_tiny_temperatures_take_the_largest_logit_without_overflow(temperature: float, dtype: Any) -> None:
    logits = np.array([-3e38, 1.0, 1.25, -math.inf, 1.249], dtype=dtype)
    assert distribution(logits, SamplingParams(temperature)).tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, 2, 0.9)])
@pytest.mark.parametrize(
    ("logits", "found"),
    [
        ([0.0, math.nan, 1.0], "nan"),
        ([math.nan] * 3, "nan"),
        ([math.inf, 0.0, math.nan], "nan"),
        ([0.0, math.inf, 1.0], "inf"),
        ([-math.inf] * 3, "nothing but minus infinity"),
    ],
)
def test_case_25_logits_that_define_no_distribution_are_refused(
    params: SamplingParams, logits: list[float], found: str
) -> None:
    row = np.array(logits, dtype=np.float32)
    with pytest.raises(ModelOutputError, match=f"Row 7 contain {found}"):
        distribution(row, params, "Row 7")
    with pytest.raises(ModelOutputError, match=f"Row 7 contain {found}"):
        greedy_token(row, "Row 7")


def test_distribution_leaves_its_input_alone() -> None:
    logits = np.arange(10, dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.5, 3, 0.5)):
        distribution(logits, params)
        assert logits.tolist() == list(range(10))


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert greedy_token(np.array([0, 5, 5, 1], dtype=np.float32)) == 1


@pytest.mark.parametrize("kind", ["flat", "language", "sparse"])
def test_the_inverse_cdf_picks_what_an_exact_one_picks(kind: str) -> None:
    rng = np.random.default_rng(4)
    make: dict[str, Callable[[], FloatArray]] = {
        "flat": lambda: np.full(VOCAB, 1 / VOCAB, np.float32),
        "language": lambda: distribution(language_like(rng), SamplingParams(1.0)),
        "sparse": lambda: np.where(rng.random(VOCAB) < 1e-4, rng.random(VOCAB), 0).astype(np.float32),
    }
    weights = make[kind]()
    exact = np.cumsum(weights, dtype=np.float64)
    exact /= exact[-1]
    for uniform in rng.random(400):
        token = sample(weights, uniform)
        below = exact[token - 1] if token else 0.0
        assert below - 2e-7 <= uniform <= exact[token] + 2e-7


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.25, 1.0, 3.0]), min_size=1, max_size=1300).filter(any),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
)
@settings(deadline=None)
def test_an_id_of_weight_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    for dtype in (np.float32, np.float64):
        assert weights[sample(np.array(weights, dtype=dtype), uniform)] > 0


def test_the_ends_of_the_uniform_reach_the_first_and_the_last_id_with_weight() -> None:
    weights = np.zeros(2000, np.float32)
    weights[[600, 1100, 1101]] = 0.1
    assert sample(weights, 0.0) == 600
    assert sample(weights, 1 - 2**-53) == 1101


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_without_a_sum_are_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidInputError, match="positive and finite"):
        sample(np.array(weights), 0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True, None)),
        *(("top_k", value) for value in (-1, 1.0, True, "40")),
        *(("top_p", value) for value in (0, -0.5, 1.0001, math.nan, True, "0.9")),
        *(("seed", value) for value in (-1, 2**64, 0.5, True)),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"^{field} must be .*got {value!r}"):
        SamplingParams(**{field: value})
