"""Figures over prompts with their intervals, by a bootstrap over prompts and repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["Estimate", "Term", "Times", "estimate"]

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


def estimate(terms: Sequence[Term], level: float = 0.95) -> Estimate | None:
    """Geometric mean over prompts of a product of medians over repeats, with its interval.

    The bootstrap draws prompts anew, and of each prompt's repeats as many as there are, the same for all terms of a
    run: ratios within a run are paired. Percentiles are widened for few prompts (Hesterberg 2015, "What Teachers Should
    Know About the Bootstrap", arXiv 1411.5279, "expanded percentile interval"). The random numbers are the same every
    time.

    Args:
        terms: all about the same prompts, in the same order.
        level: of the interval.

    Returns:
        None where there are no prompts.
    """
    num_prompts = len(terms[0].times.counts)
    if not num_prompts:
        return None
    value = math.exp(sum(term.power * float(np.log(_medians(term.times)).mean()) for term in terms))
    degrees = num_prompts if num_prompts > 1 else min(int(term.times.counts[0]) for term in terms)
    if degrees < 2:
        return Estimate(value, None, None)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, num_prompts, (_RESAMPLES, num_prompts)) if num_prompts > 1 else np.zeros((_RESAMPLES, 1))
    prompts = prompts.astype(np.int64)  # [resamples, prompts]
    logs = np.zeros(prompts.shape)
    for run in dict.fromkeys(term.times.run for term in terms):
        of_run = [term for term in terms if term.times.run == run]
        counts, width = of_run[0].times.counts, of_run[0].times.values.shape[1]
        picks = (rng.random((*prompts.shape, width)) * counts[prompts][..., None]).astype(np.int64)
        for term in of_run:
            drawn = term.times.values[prompts[..., None], picks]  # [resamples, prompts, repeats]
            logs += term.power * np.log(np.median(drawn, axis=-1))
    means = np.exp(logs.mean(axis=1))
    reach = math.sqrt(degrees / (degrees - 1)) * float(special.stdtrit(degrees - 1, (1 + level) / 2))  # Student's t
    tail = float(special.ndtr(-reach))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _medians(times: Times) -> NDArray[np.float64]:
    return np.nanmedian(times.values, axis=1)  # type: ignore[no-any-return]
