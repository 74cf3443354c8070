"""Drift of a machine's speed: what another run brings lies in the intervals of absolute times, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, special

from paceline_tools.benchmark.bootstrap import Term, Times, estimate
from paceline_tools.benchmark.drift import TimedText, drift_of
from paceline_tools.benchmark.figures import Runs, summarise

from .bench_documents import made_up

# Of a drift at moments, which go up: its logarithms. Times are in lengths of a run.
Wander = Callable[[NDArray[np.float64], np.random.Generator], NDArray[np.float64]]


def none(moments: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    return np.zeros(len(moments))


def walk(size: float) -> Wander:
    """A random walk of this standard deviation over a run."""
    return lambda moments, rng: np.cumsum(rng.normal(0, size, len(moments)) * np.sqrt(np.diff(moments, prepend=0.0)))


def forgetting(size: float, memory: float) -> Wander:
    """Goes back to its mean."""

    def wander(moments: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        stays = np.exp(-np.diff(moments, prepend=-np.inf) / memory)
        found, at = np.empty(len(moments)), 0.0
        for index, (stay, fresh) in enumerate(zip(stays, rng.normal(0, size, len(moments)), strict=True)):
            found[index] = at = stay * at + math.sqrt(1 - stay * stay) * fresh
        return found

    return wander


def steps(size: float, length: float) -> Wander:
    """Stays for a time, then jumps to another speed."""

    def wander(moments: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
        jumps = np.cumsum(rng.exponential(length, int(10 + 10 * moments[-1] / length)))
        return rng.normal(0, size, len(jumps) + 1)[np.searchsorted(jumps, moments)]

    return wander


def wave(size: float, length: float) -> Wander:
    return lambda moments, rng: size * np.sin(2 * math.pi * (moments / length + rng.random()))


DRIFTS: dict[str, Wander] = {
    "none": none,
    "small walk": walk(0.03),
    "walk": walk(0.1),
    "large walk": walk(0.3),
    "minutes": forgetting(0.05, 0.5),
    "seconds": forgetting(0.1, 0.03),
    "steps": steps(0.07, 0.3),
    "short wave": wave(0.07, 0.3),
    "wave": wave(0.07, 1.0),
    "long wave": wave(0.07, 2.0),
}


def covered(wander: Wander, prompts: int, repeats: int, count: int, seed: int) -> float:
    """How often the interval of one run holds the figure of another, which begins a fifth of its length later."""
    rng = np.random.default_rng(seed)
    texts = prompts * repeats
    when = (np.arange(texts) + 0.5) / texts
    hits = 0
    for _ in range(count):
        slow = wander(np.concatenate([when, when + 1.2]), rng)
        noise = rng.normal(0, 0.02, 2 * texts) + np.tile(rng.normal(0, 0.01, prompts), 2 * repeats)
        one, other = np.exp(3 + slow + noise).reshape(2, repeats, prompts)
        listed = [TimedText(at, 0, i % prompts, float(ms)) for i, (at, ms) in enumerate(zip(when, one.flat, strict=True))]
        drift = drift_of(listed, 1.0)
        counts = np.full(prompts, repeats)
        found = estimate([Term(Times(one.T, counts), 1)], drift=drift.reach(list(when), 0.95) if drift else 0.0)
        again = estimate([Term(Times(other.T, counts), 1)])
        assert found is not None
        assert again is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= again.value <= found.high
    return hits / count


@pytest.mark.parametrize("name", ["none", "walk", "steps", "wave"])
def test_another_run_lies_in_the_interval(name: str) -> None:
    assert covered(DRIFTS[name], 5, 4, 40, seed=1) >= 0.85  # nine of ten, but for the luck of forty


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRIFTS))
@pytest.mark.parametrize(("prompts", "repeats"), [(3, 4), (5, 2), (12, 2), (41, 1)])
def test_another_run_lies_in_the_interval_nine_times_of_ten(name: str, prompts: int, repeats: int) -> None:
    found = covered(DRIFTS[name], prompts, repeats, 400, seed=2)
    print(f"{name}, {prompts} prompts, {repeats} repeats: {found:.3f}")
    assert found >= 0.9
