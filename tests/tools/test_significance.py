"""Tests of significance against known laws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from paceline_tools.significance import g_test, holm, homogeneity, rates, uniformity

RANDOM = np.random.default_rng(3)
LAW = np.array([0.4, 0.3, 0.2, 0.06, 0.03, 0.009, 0.001])


def counts(law: np.ndarray, samples: int) -> Counter[int]:
    return Counter(dict(enumerate(RANDOM.multinomial(samples, law).tolist())))


def expected(samples: int) -> dict[int, float]:
    return dict(enumerate((LAW * samples).tolist()))


def test_p_values_of_true_laws_are_near_uniform() -> None:
    found = [g_test("", counts(LAW, 400), expected(400), 400).p_value for _ in range(2000)]
    found += [homogeneity("", counts(LAW, 400), counts(LAW, 400), expected(400), 400).p_value for _ in range(1000)]
    for level in (0.01, 0.1, 0.5):
        assert np.mean(np.array(found) < level) == pytest.approx(level, rel=0.3)


def test_the_statistic_is_the_likelihood_ratio() -> None:
    observed, law = {0: 30, 1: 50, 2: 20}, {0: 40.0, 1: 40.0, 2: 20.0}
    found = g_test("it", observed, law, 100)
    plain = stats.power_divergence([30, 50, 20], [40, 40, 20], lambda_="log-likelihood")
    williams = 1 + (100 / 40 + 100 / 40 + 100 / 20 - 1) / (6 * 100 * 2)
    assert found.p_value == pytest.approx(float(stats.chi2.sf(plain.statistic / williams, 2)))
    assert found.effect == pytest.approx(0.1)
    assert found.detail == "3 cells"


def test_noise_is_the_mean_effect_of_exact_draws() -> None:
    tests = [g_test("", counts(LAW, 500), expected(500), 500) for _ in range(500)]
    assert np.mean([one.effect for one in tests]) == pytest.approx(tests[0].noise, rel=0.1)
    pairs = [homogeneity("", counts(LAW, 500), counts(LAW, 500), expected(500), 500) for _ in range(500)]
    assert np.mean([one.effect for one in pairs]) == pytest.approx(np.mean([one.noise for one in pairs]), rel=0.1)
    ranks = [uniformity("", RANDOM.random(300).tolist(), 300) for _ in range(500)]
    assert np.mean([one.effect for one in ranks]) == pytest.approx(ranks[0].noise, rel=0.1)
    chances = RANDOM.random(300)
    events = [rates("", (RANDOM.random(300) < chances).tolist(), chances.tolist()) for _ in range(500)]
    assert np.mean([one.effect for one in events]) == pytest.approx(events[0].noise, rel=0.1)


def test_rare_outcomes_are_one_cell() -> None:
    many = dict.fromkeys(range(100), 1.0) | {-1: 100.0}
    assert g_test("", {-1: 100, **dict.fromkeys(range(100), 1)}, many, 200).detail == "2 cells"
    assert g_test("", {-1: 100}, {-1: 99.0}, 100).detail == "one cell"  # the rest is too little for a cell
    assert g_test("", {0: 3}, {}, 3).p_value == 1
    assert g_test("", {}, {}, 0).p_value == 1


def test_what_is_left_out_counts_as_rare() -> None:
    assert g_test("", {0: 50, 7: 50}, {0: 90.0}, 100).p_value < 1e-9
    assert g_test("", {0: 90, 7: 10}, {0: 90.0}, 100).p_value == pytest.approx(1)


def test_different_laws_are_told_apart() -> None:
    ours, theirs = {0: 500, 1: 500}, {0: 600, 1: 400}
    assert homogeneity("", ours, theirs, {0: 500.0, 1: 500.0}, 1000).p_value < 1e-4
    assert uniformity("", (RANDOM.random(1000) ** 1.2).tolist(), 1000).p_value < 1e-3


def test_rates_have_the_law_of_their_number() -> None:
    found = rates("", [True] * 12 + [False] * 8, [0.5] * 20)
    assert found.p_value == pytest.approx(float(stats.binomtest(12, 20).pvalue))
    assert rates("", [True] * 5, [1.0] * 5).p_value == 1
    assert rates("", [True] * 4 + [False], [1.0] * 5).p_value < 1e-9
    assert rates("", [], []).p_value == 1


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
