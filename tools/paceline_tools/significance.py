"""Tests of significance: how far counts lie from what a law gives, and how often chance alone takes them so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

__all__ = ["LEAST_EXPECTED", "Finding", "g_test", "holm", "homogeneity", "rates", "uniformity"]

# Chi-squared is a fair approximation where each cell expects at least this many.
LEAST_EXPECTED = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test found.

    Attributes:
        name: what was tested, and where.
        samples: draws behind it.
        effect: how far the draws lie from the law: total variation, the largest distance of cumulated frequencies,
            or a difference of rates; each from 0 to 1.
        noise: the effect to be expected of exact draws, in the mean.
        p_value: how often exact draws lie as far away.
        detail: what else a reader wants to know.
    """

    name: str
    samples: int
    effect: float
    noise: float
    p_value: float
    detail: str = ""


def g_test(name: str, counts: Mapping[Any, int], expected: Mapping[Any, float], samples: int) -> Finding:
    """Counts of `samples` draws against the numbers that a law expects. What expects fewer than 5 is one cell.

    `expected` may leave out what is rare. Statistic: the likelihood ratio with Williams' correction.
    """
    if not samples:
        return Finding(name, 0, 0.0, 0.0, 1.0, "no draws")
    cell = _cells(expected, samples)
    expects = _gather(expected, cell, float(samples))
    observed = _gather(counts, cell, float(samples))
    noise = float(np.sqrt(2 / math.pi * expects * (1 - expects / samples)).sum()) / (2 * samples)
    effect = float(np.abs(observed - expects).sum()) / (2 * samples)
    freedom = len(expects) - 1
    if not freedom:
        return Finding(name, samples, effect, noise, 1.0, "one cell")
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(observed > 0, observed * np.log(observed / expects), 0.0)
    correction = 1 + (float((samples / expects).sum()) - 1) / (6 * samples * freedom)
    p_value = float(stats.chi2.sf(2 * float(terms.sum()) / correction, freedom))
    return Finding(name, samples, effect, noise, p_value, f"{len(expects)} cells")


def homogeneity(
    name: str, ours: Mapping[Any, int], theirs: Mapping[Any, int], expected: Mapping[Any, float], samples: int
) -> Finding:
    """Two times `samples` draws against each other, in the cells of `g_test`."""
    cell = _cells(expected, samples)
    table = np.array([_gather(counts, cell, float(samples)) for counts in (ours, theirs)])  # [2, cells]
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return Finding(name, samples, 0.0, 0.0, 1.0, "one cell")
    share = table.sum(axis=0) / (2 * samples)
    noise = float(np.sqrt(2 / math.pi * share * (1 - share) * 2 / samples).sum()) / 2
    effect = float(np.abs(table[0] - table[1]).sum()) / (2 * samples)
    statistic, _, freedom, _ = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood")
    correction = 1 + 3 * (float((1 / share).sum()) - 1) / (12 * samples * freedom)
    p_value = float(stats.chi2.sf(statistic / correction, freedom))
    return Finding(name, samples, effect, noise, p_value, f"{table.shape[1]} cells")


def rates(name: str, happened: Sequence[bool], probabilities: Sequence[float]) -> Finding:
    """Independent events against their probabilities: two-sided, by the exact law of their number."""
    samples = len(happened)
    if not samples:
        return Finding(name, 0, 0.0, 0.0, 1.0, "no draws")
    expects = np.clip(np.array(probabilities, np.float64), 0.0, 1.0)
    count = sum(happened)
    law = stats.poisson_binom(expects)
    p_value = min(1.0, 2 * min(float(law.cdf(count)), float(law.sf(count - 1))))
    noise = math.sqrt(2 / math.pi * float((expects * (1 - expects)).sum())) / samples
    effect = abs(count - float(expects.sum())) / samples
    detail = f"{count / samples:.4f} for {float(expects.mean()):.4f}"
    return Finding(name, samples, effect, noise, p_value, detail)


def uniformity(name: str, values: Sequence[float], samples: int) -> Finding:
    """Kolmogorov and Smirnov's test that values in [0, 1] are uniform; `samples` of them come from draws."""
    if not values:
        return Finding(name, 0, 0.0, 0.0, 1.0, "no draws")
    statistic, p_value = stats.kstest(values, "uniform")
    noise = 0.8687 / math.sqrt(len(values))  # mean of Kolmogorov's law: sqrt(pi / 2) * log(2)
    return Finding(name, samples, float(statistic), noise, float(p_value))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number (Holm 1979): the chance of any false alarm among all tests stays below."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def _cells(expected: Mapping[Any, float], samples: int) -> Callable[[Hashable], int]:
    """Number the cells: one for each outcome that expects enough, one for all others if together they expect enough."""
    common = sorted((key for key, value in expected.items() if value >= LEAST_EXPECTED), key=lambda k: -expected[k])
    number = {key: index for index, key in enumerate(common)}
    rest = samples - sum(expected[key] for key in common)
    others = len(common) if rest >= LEAST_EXPECTED or not common else len(common) - 1
    return lambda key: number.get(key, others)


def _gather(values: Mapping[Any, float], cell: Callable[[Hashable], int], total: float) -> NDArray[np.float64]:
    """Sums by cell; what `values` leaves out of `total` belongs to the cell of the others."""
    others = cell(None)
    sums = np.zeros(others + 1)
    for key, value in values.items():
        sums[cell(key)] += value
    sums[others] += total - float(sums.sum())
    return sums
