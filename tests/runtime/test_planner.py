from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paceline.costs import CostMeter, Costs
from paceline.errors import InvalidInputError
from paceline.planner import Planner
from paceline.theory import speedup

# The int4 Qwen pair on two cores: rows cost.
CPU = Costs(0.0105, (0.030, 0.038, 0.047, 0.055, 0.064))
# Where rows are nearly free.
GPU = Costs(0.004, (0.020, 0.0202, 0.0204, 0.0206))


def simulate(
    rng: np.random.Generator, planner: Planner, costs: Costs, confidence: Callable[[], float], num_tokens: int
) -> float:
    """Tokens per second of a pair whose drafted tokens stand with the probability of their confidence."""
    tokens, seconds = 0, 0.0
    while tokens < num_tokens:
        most, steps = planner.begin(), 0
        drafted: list[float] = []
        while len(drafted) < most and planner.worth_a_step():
            steps += 1
            sure = confidence()
            if not planner.worth_drawing(sure):
                break
            drafted.append(sure)
        accepted = 0
        while accepted < len(drafted) and rng.random() < drafted[accepted]:
            accepted += 1
        target_s, draft_s = costs.target(len(drafted) + 1), steps * costs.draft_step
        planner.end(len(drafted), accepted, rows=len(drafted) + 1, target_s=target_s, draft_s=draft_s)
        tokens += accepted + 1
        seconds += target_s + draft_s
    return tokens / seconds


def best_fixed(costs: Costs, acceptance: float) -> float:
    first = costs.target(1)
    return max(
        speedup(acceptance, k, costs.draft_step / first, verification_cost=lambda k: costs.target(k + 1) / first)
        for k in range(9)
    )


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.6, 0.75, 0.9, 0.98])
@pytest.mark.parametrize("given", [True, False])
def test_constant_confidence_is_drafted_for_nearly_as_well_as_the_best_fixed_number(
    costs: Costs, acceptance: float, given: bool
) -> None:
    planner = Planner(costs=costs if given else None)
    rate = simulate(np.random.default_rng(1), planner, costs, lambda: acceptance, 6000)
    assert rate * costs.target(1) > 0.95 * best_fixed(costs, acceptance)


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_confidence_that_varies_is_worth_more_than_any_fixed_number(costs: Costs) -> None:
    rng = np.random.default_rng(2)

    def confidence() -> float:
        return float(rng.beta(1.2, 0.4))  # mean 0.75, mostly sure or unsure

    rate = simulate(rng, Planner(costs=costs), costs, confidence, 20_000)
    assert rate * costs.target(1) > 1.01 * best_fixed(costs, 0.75)


def test_case_22_a_draft_that_loses_costs_little() -> None:
    costs = Costs(0.4, (1.0,) * 6)
    rate = simulate(np.random.default_rng(3), Planner(costs=costs), costs, lambda: 0.3, 3000)
    assert rate > 0.97


def test_short_texts_lose_little_while_it_learns() -> None:
    rates = [simulate(np.random.default_rng(seed), Planner(), CPU, lambda: 0.4, 128) for seed in range(30)]
    assert float(np.mean(rates)) * CPU.target(1) > 0.93


def test_drafting_comes_back_when_it_pays_again() -> None:
    rng, planner = np.random.default_rng(4), Planner(costs=CPU)
    simulate(rng, planner, CPU, lambda: 0.2, 400)
    rate = simulate(rng, planner, CPU, lambda: 0.95, 4000)
    assert rate * CPU.target(1) > 0.93 * best_fixed(CPU, 0.95)


def test_the_meter_finds_the_costs() -> None:
    rng, meter = np.random.default_rng(5), CostMeter()
    assert meter.costs is None
    for _ in range(300):
        drafted = int(rng.integers(0, 5))
        meter.observe(
            rows=drafted + 1,
            target_s=(0.03 + 0.008 * drafted) * rng.uniform(0.9, 1.1),
            draft_steps=drafted,
            draft_s=0.01 * drafted * rng.uniform(0.9, 1.1),
        )
    assert meter.costs is not None
    assert meter.costs.draft_step == pytest.approx(0.01, rel=0.05)
    assert [meter.costs.target(rows) for rows in (1, 5)] == pytest.approx([0.03, 0.062], rel=0.07)
    assert meter.costs.target(12) == pytest.approx(0.03 + 0.008 * 11, rel=0.15)


def test_a_model_that_tells_no_times_is_planned_for_all_the_same() -> None:
    meter = CostMeter()
    meter.observe(rows=2, target_s=0.0, draft_steps=1, draft_s=0.0)
    assert meter.costs is not None
    assert meter.costs.target(1) > 0


@pytest.mark.parametrize(("draft_step", "passes"), [(-1.0, (1.0,)), (1.0, ()), (1.0, (0.0,))])
def test_costs_are_times(draft_step: float, passes: tuple[float, ...]) -> None:
    with pytest.raises(InvalidInputError, match="must be seconds"):
        Costs(draft_step, passes)
