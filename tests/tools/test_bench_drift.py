"""Drift of a machine's speed: what another run brings lies in the intervals of absolute times, by simulation."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import linalg, optimize, special

from paceline_tools.benchmark.bootstrap import Term, Times, estimate
from paceline_tools.benchmark.drift import TimedText, drift_of
from paceline_tools.benchmark.figures import Runs, decoding, summarise, whole

from .bench_documents import drifting, made_up

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
        listed = [
            TimedText(at, 0, i % prompts, float(ms)) for i, (at, ms) in enumerate(zip(when, one.flat, strict=True))
        ]
        drift = drift_of(listed)
        found = estimate(
            [Term(Times(one.T, np.full(prompts, repeats)), 1)], drift=drift.reach(list(when), 0.95) if drift else 0.0
        )
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= math.exp(np.log(np.median(other, axis=0)).mean()) <= found.high
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


def recomputed(data: dict[str, Any], sampling: str) -> float:
    """The drift's part of intervals, as `models/benchmark.md` has it: by densities of contrasts, model by model."""
    ends = np.cumsum([sum(one["steps_s"]) for one in data["measurements"]])
    length = float(ends[-1])
    rounds: list[tuple[float, int, int, float]] = []
    turns: dict[tuple[int, int], list[float]] = {}
    for one, end in zip(data["measurements"], ends, strict=True):
        middle = (float(end) - sum(one["steps_s"]) / 2) / length
        if len(set(one["steps_proposed"][1:-1])) == 1:
            seconds = one["decode_s"] / (len(one["steps_s"]) - 1)
            rounds.append((middle, one["method"], one["prompt"], math.log(seconds)))
        if data["methods"][one["method"]]["sampling"] == sampling:
            turns.setdefault((one["prompt"], one["repeat"]), []).append(middle)
    times = np.array([one[3] for one in rounds])
    written = [(method, prompt) for _, method, prompt, _ in rounds]
    levels = [(method, prompt if written.count((method, prompt)) > 1 else None) for method, prompt in written]
    contrasts = linalg.null_space(np.array([[level == one for one in levels] for level in set(levels)], float))
    free = contrasts.T @ times

    def alike(one: float, other: float, memory: float) -> float:
        return min(one, other) if memory == math.inf else math.exp(-abs(one - other) / memory)

    here = [statistics.mean(turn) for turn in turns.values()]
    models = []
    for memory, chance in ((0.0, 1 / 12), (1 / 32, 1 / 12), (1 / 8, 1 / 12), (1 / 2, 1 / 12), (math.inf, 2 / 3)):
        for ratio in [4.0**power / len(times) for power in range(-1, 8)] if memory else [0.0]:
            walk = np.array([[alike(a[0], b[0], memory or 1.0) for a in rounds] for b in rounds])
            spread = np.eye(len(free)) + ratio * contrasts.T @ walk @ contrasts
            square = float(free @ np.linalg.solve(spread, free))
            log = -np.linalg.slogdet(spread)[1] / 2 - len(free) / 2 * math.log(square)
            parted = statistics.mean(
                alike(a, b, memory or 1.0) + alike(a + 2, b + 2, memory or 1.0) - 2 * alike(a, b + 2, memory or 1.0)
                for a in here
                for b in here
            )
            scale = math.sqrt(square / len(free) * (1 / len(here) + ratio * parted))
            models.append((chance / (9 if memory else 1), log, scale))
    largest = max(log for _, log, _ in models)
    weights = [chance * math.exp(log - largest) for chance, log, _ in models]

    def within(reach: float) -> float:
        shares = [1 - 2 * special.stdtr(len(free), -reach / scale) for _, _, scale in models]
        return float(np.average(shares, weights=weights)) - 0.95

    return float(optimize.brentq(within, 0.0, 10.0, xtol=1e-12))


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_drift_can_be_recomputed_from_the_json(repeats: int) -> None:
    document = made_up(1, prompts=4, repeats=repeats, num_draft_tokens=("auto", 2), temperatures=(0.0, 0.8))
    summary = summarise(document)
    data = json.loads(document.to_json(summary))
    for sampling, found in data["summary"]["samplings"].items():
        drift = recomputed(data, sampling)
        assert found["drift"] == pytest.approx(math.expm1(drift), rel=1e-6)
        runs = Runs(document, sampling)
        for index in runs.methods:
            one = found["methods"][document.methods[index].name]["all"]
            for key, figure in (("ms_per_token", decoding), ("ms_per_token_whole", whole)):
                alone = estimate([Term(runs.times(index, runs.prompts(None), figure), 1)])
                assert alone is not None
                assert alone.high is not None
                reach = math.hypot(math.log(alone.high / alone.value), drift)
                assert one[key]["high"] == pytest.approx(one[key]["value"] * math.exp(reach), rel=1e-6)
                assert one[key]["low"] == pytest.approx(one[key]["value"] / math.exp(reach), rel=1e-6)


def test_speedups_know_nothing_of_the_drift() -> None:
    document = made_up(1, categories=("code",), num_draft_tokens=(2,))
    before, after = (
        summarise(one)["samplings"]["greedy"]["methods"]["K = 2"]["all"]
        for one in (document, drifting(document, lambda moment: 1 + moment))
    )
    for name in ("speedup", "speedup_whole"):
        assert _width(after[name]) < 1.5 * _width(before[name])
    for name in ("ms_per_token", "ms_per_token_whole"):
        assert _width(after[name]) > 3 * _width(before[name])


def _width(found: dict[str, float]) -> float:
    return math.log(found["high"] / found["low"])


def test_no_drift_without_a_second_text() -> None:
    assert drift_of([]) is None
    assert drift_of([TimedText(0.5, 0, 0, 1.0)]) is None
    same = drift_of([TimedText(at, 0, 0, 1.0) for at in (0.25, 0.75)])
    assert same is None  # of a clock that is made up
    two = drift_of([TimedText(0.25, 0, 0, 1.0), TimedText(0.75, 0, 1, 1.1)])
    assert two is not None
    assert two.degrees == 1


def test_many_texts_are_thinned() -> None:
    rng = np.random.default_rng(1)
    texts = [TimedText((i + 0.5) / 1000, 0, i % 500, math.exp(rng.normal(0, 0.02))) for i in range(1000)]
    drift = drift_of(texts)
    assert drift is not None
    assert drift.degrees == 100  # a fifth of the prompts, each written twice
    assert float(drift.weights @ drift.noise) == pytest.approx(0.02, rel=0.2)
