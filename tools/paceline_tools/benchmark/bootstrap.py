"""Figures over prompts with their intervals, by a bootstrap over prompts and repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["Estimate", "Term", "Times", "estimate", "mean"]

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its interval; without one where there is a single text."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one method in one run of a benchmark.

    Attributes:
        values: `[prompts, repeats]`, each above 0. The repeats of a prompt stand first; what is missing is NaN.
        counts: `[prompts]`, repeats that are there, each at least 1.
        run: tells runs apart: within one, methods share a prompt's repeats, since they wrote in turn.
    """

    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    run: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """Times that multiply the figure (power 1) or divide it (power -1)."""

    times: Times
    power: int


def estimate(
    terms: Sequence[Term], level: float = 0.95, *, fixed_prompts: bool = False, drift: float = 0.0
) -> Estimate | None:
    """Geometric mean over prompts of a product of medians over repeats, with its interval.

    The bootstrap draws prompts anew, and of each prompt's repeats as many as there are, the same for all terms of a
    run: ratios within a run are paired. Its standard error, on the scale of logarithms and corrected for few prompts,
    gives Student's t interval (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", arXiv 1411.5279). The
    random numbers are the same every time.

    Args:
        terms: all about the same prompts, in the same order.
        level: of the interval.
        fixed_prompts: the figure is about these prompts and no others: repeats alone are drawn anew, if each prompt has
            two. That is also done where there is one prompt.
        drift: how far another run's figure may lie from this one's, by `Drift.reach`, for times that are not set
            against others of the same moments.

    Returns:
        None where there are no prompts.
    """
    counts = np.array([term.times.counts for term in terms]).min(axis=0)  # [prompts]
    num_prompts = len(counts)
    if not num_prompts:
        return None
    value = sum(term.power * float(np.log(_medians(term.times)).mean()) for term in terms)
    rng = np.random.default_rng(0)
    shape = (_RESAMPLES, num_prompts)
    if (fixed_prompts or num_prompts == 1) and counts.min() > 1:
        prompts = np.broadcast_to(np.arange(num_prompts), shape)
        size, degrees = int(counts.min()), int((counts - 1).sum())
    elif num_prompts > 1:
        prompts = rng.integers(0, num_prompts, shape)
        size, degrees = num_prompts, num_prompts - 1
    else:
        return Estimate(math.exp(value), None, None)
    logs = np.zeros(shape)
    for run in dict.fromkeys(term.times.run for term in terms):
        of_run = [term for term in terms if term.times.run == run]
        repeats, width = of_run[0].times.counts, of_run[0].times.values.shape[1]
        picks = (rng.random((*shape, width)) * repeats[prompts][..., None]).astype(np.int64)
        for term in of_run:
            drawn = term.times.values[prompts[..., None], picks]  # [resamples, prompts, repeats]
            drawn.sort(axis=-1)  # of few values, four times as fast as numpy's median
            logs += term.power * np.log((drawn[..., (width - 1) // 2] + drawn[..., width // 2]) / 2)
    error = math.sqrt(size / (size - 1)) * float(logs.mean(axis=1).std(ddof=1))
    reach = math.hypot(float(special.stdtrit(degrees, (1 + level) / 2)) * error, drift)
    return Estimate(math.exp(value), math.exp(value - reach), math.exp(value + reach))


def mean(values: NDArray[np.float64], level: float = 0.95) -> Estimate | None:
    """Mean over prompts of means over repeats, with its interval: `estimate`'s bootstrap, on the plain scale.

    Args:
        values: `[prompts, repeats]`, NaN where there is none; for the difference of two methods, their paired
            differences. Prompts without a value are left out.
        level: of the interval.

    Returns:
        None where there are no values. With one prompt the interval is of its repeats; one value has none.
    """
    values = values[~np.isnan(values).all(axis=1)]
    num_prompts = len(values)
    if not num_prompts:
        return None
    there = ~np.isnan(values)
    counts = there.sum(axis=1)  # [prompts]
    packed = np.zeros(values.shape)  # the values of each prompt first
    for row, (line, kept) in enumerate(zip(values, there, strict=True)):
        packed[row, : counts[row]] = line[kept]
    value = float(np.nanmean(values, axis=1).mean())
    if num_prompts == 1 and counts[0] == 1:
        return Estimate(value, None, None)
    rng = np.random.default_rng(0)
    shape = (_RESAMPLES, num_prompts)
    prompts = rng.integers(0, num_prompts, shape)
    picks = (rng.random((*shape, values.shape[1])) * counts[prompts][..., None]).astype(np.int64)
    drawn = packed[prompts[..., None], picks]  # [resamples, prompts, repeats]
    used = np.arange(values.shape[1]) < counts[prompts][..., None]  # as many as the prompt has
    means = (drawn * used).sum(axis=-1) / used.sum(axis=-1)
    size = num_prompts if num_prompts > 1 else int(counts[0])
    error = math.sqrt(size / (size - 1)) * float(means.mean(axis=1).std(ddof=1))
    reach = float(special.stdtrit(size - 1, (1 + level) / 2)) * error
    return Estimate(value, value - reach, value + reach)


def _medians(times: Times) -> NDArray[np.float64]:
    return np.nanmedian(times.values, axis=1)
