from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from paceline.costs import ASSUMED_COSTS, CostMeter, Costs, CostsByLength
from paceline.errors import InvalidInputError
from paceline.planner import _COPIES_FALL, MOST_DRAFT_TOKENS, Planner
from paceline.theory import best_num_draft_tokens, tokens_per_round

# The int4 Qwen pair on two cores: rows cost.
CPU = Costs(0.0105, (0.030, 0.038, 0.047, 0.055, 0.064))
# Where rows are nearly free.
GPU = Costs(0.004, (0.020, 0.0202, 0.0204, 0.0206))


Token = Callable[[np.random.Generator], tuple[float, float]]


def sure(acceptance: float) -> Token:
    """A draft that always says the same, and is right about it."""
    return lambda rng: (acceptance, acceptance)


def varied(acceptance: float) -> Token:
    """A draft that knows where it is good."""

    def token(rng: np.random.Generator) -> tuple[float, float]:
        confidence = float(rng.beta(1.6 * acceptance, 1.6 * (1 - acceptance)))
        return confidence, confidence

    return token


def boastful(acceptance: float) -> Token:
    """A draft that is right less often than it says, and tells little by its confidence."""

    def token(rng: np.random.Generator) -> tuple[float, float]:
        confidence = float(rng.beta(1.6 * acceptance, 1.6 * (1 - acceptance)))
        return confidence, 0.4 * confidence + 0.6 * acceptance - 0.03

    return token


def simulate(
    rng: np.random.Generator,
    planner: Planner,
    costs: Costs,
    token: Token,
    num_tokens: int,
    noise: float = 0.0,
    *,
    tells: bool = True,
) -> float:
    """Tokens per second of a pair; `token` gives a drafted token's confidence and the probability that it stands.

    The clock wobbles by `noise`, a standard deviation of the logarithm, which the planner sees and the result does not.
    With `tells` the target's confidence is, within some tenths, the probability that the draft agrees. A draft that is
    more than two tokens behind takes a quarter of a step for each of them.
    """
    tokens, seconds, fed = 0, 0.0, -1
    while tokens < num_tokens:
        most, steps = min(planner.begin(tokens), num_tokens - tokens - 1), 0
        drafted: list[float] = []
        while len(drafted) < most and planner.worth_a_step(1 if steps else tokens - fed):
            steps += 1
            confidence, acceptance = token(rng)
            if not planner.worth_drawing(confidence):
                break
            drafted.append(acceptance)
        accepted = 0
        while accepted < len(drafted) and rng.random() < drafted[accepted]:
            accepted += 1
        target_s, draft_s = costs.target(len(drafted) + 1), steps * costs.draft_step
        if steps:
            draft_s += 0.25 * max(tokens - 2 - fed, 0) * costs.draft_step
            fed = tokens + min(steps - 1, accepted)
        emitted = [*drafted[: accepted + 1], token(rng)[1]][: accepted + 1] if tells else []
        planner.end(
            len(drafted),
            accepted,
            rows=len(drafted) + 1,
            target_s=target_s * math.exp(noise * rng.standard_normal()),
            draft_s=draft_s * math.exp(noise * rng.standard_normal()),
            confidences=[min(max(stands + 0.1 * rng.standard_normal(), 0.01), 1.0) for stands in emitted],
        )
        tokens += accepted + 1
        seconds += target_s + draft_s
    return tokens / seconds


def best_fixed(costs: Costs, acceptance: float) -> float:
    first = costs.target(1)
    _, best = best_num_draft_tokens(
        acceptance,
        costs.draft_step / first,
        verification_cost=lambda k: costs.target(k + 1) / first,
        most=MOST_DRAFT_TOKENS,
    )
    return best


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.6, 0.75, 0.9, 0.98])
@pytest.mark.parametrize("given", [True, False])
def test_constant_confidence_is_drafted_for_nearly_as_well_as_the_best_fixed_number(
    costs: Costs, acceptance: float, given: bool
) -> None:
    planner = Planner(costs=costs if given else None)
    rate = simulate(np.random.default_rng(1), planner, costs, sure(acceptance), 6000)
    assert rate * costs.target(1) > 0.95 * best_fixed(costs, acceptance)


@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_confidence_that_varies_is_worth_more_than_any_fixed_number(costs: Costs) -> None:
    rate = simulate(np.random.default_rng(2), Planner(costs=costs), costs, varied(0.75), 20_000)
    assert rate * costs.target(1) > 1.01 * best_fixed(costs, 0.75)


ROWS = {
    "cpu": (1.0, 1.2, 1.45, 1.7, 1.95),
    "gpu": (1.0, 1.01, 1.02),
    "steep": (1.0, 1.4, 1.8),
    "tiles": (1.0, 1.45, 1.5, 1.55, 2.1, 2.15, 2.2, 2.25),
}


@pytest.mark.parametrize("given", [True, False], ids=["given", "measured"])
@pytest.mark.parametrize("draft_step", [0.05, 0.15, 0.35])
@pytest.mark.parametrize("rows", ROWS)
def test_texts_of_128_tokens_run_as_fast_as_the_best_fixed_number_and_as_predicted(
    rows: str, draft_step: float, given: bool
) -> None:
    """Over many acceptance rates and drafts; each text is planned from scratch, and 24 of them are no exact mean."""
    costs, gains, errors = Costs(draft_step, ROWS[rows]), [], []
    for draft in (sure, varied, boastful):
        for acceptance in (0.2, 0.4, 0.6, 0.75, 0.85, 0.93, 0.98):
            rng, rates, predictions = np.random.default_rng(7), [], []
            for _ in range(24):
                planner = Planner(costs=costs if given else None)
                rates.append(simulate(rng, planner, costs, draft(acceptance), 128, 0.0 if given else 0.05))
                predictions.append(planner.predicted_speedup or 0.0)
            realised = 1 / np.mean([1 / rate for rate in rates])
            stands = acceptance - 0.03 if draft is boastful else acceptance
            gains.append(realised / best_fixed(costs, stands))
            errors.append(abs(float(np.mean(predictions)) / realised - 1))
    assert min(gains) > (0.92 if given else 0.88)
    assert math.exp(float(np.mean(np.log(gains)))) > (0.975 if given else 0.965)
    # Measured costs know of a tile only what was seen of it; a profile knows all.
    assert max(errors) < (0.4 if rows == "tiles" and not given else 0.1)


def test_case_22_a_draft_that_loses_costs_little() -> None:
    costs = Costs(0.4, (1.0,) * 6)
    rate = simulate(np.random.default_rng(3), Planner(costs=costs), costs, sure(0.3), 3000)
    assert rate > 0.97


def test_the_target_tells_when_a_text_that_was_left_plain_becomes_easy() -> None:
    """Drafting gives up on a hard text after a few tokens, and takes up an easy one without ever looking in between."""
    planner, drafted, fed = Planner(costs=CPU), [], -1
    for position in range(140):
        hard = position < 60
        planner.begin(position)
        worth = planner.worth_a_step(position - fed)
        fed = position if worth else fed
        drafting = worth and planner.worth_drawing(0.3 if hard else 0.99)
        drafted.append(drafting)
        planner.end(
            int(drafting),
            int(drafting and not hard),
            rows=1 + drafting,
            target_s=CPU.target(1 + drafting),
            draft_s=CPU.draft_step,
            confidences=[0.4] if hard else [0.995] * (1 + drafting),
        )
    assert sum(drafted[:10]) <= 4
    assert not any(drafted[10:60])
    assert not any(drafted[60:62])
    assert all(drafted[120:])


def play(planner: Planner, length: int, rows: int, draft_s: float = CPU.draft_step, sure: bool = False) -> bool:
    """A round behind a text of `length` tokens that would feed the draft `rows`, and whose drafted token stands.

    With `sure` the target tells how sure it was of what it wrote: very.
    """
    planner.begin(length)
    worth = planner.worth_a_step(rows)
    if worth:
        planner.worth_drawing(0.99)
    planner.end(
        int(worth),
        int(worth),
        rows=1 + worth,
        target_s=CPU.target(1 + worth),
        draft_s=worth * draft_s,
        confidences=[0.99] * (1 + worth) if sure else (),
    )
    return worth


def test_tokens_that_the_draft_missed_are_part_of_the_price() -> None:
    """A draft that has fallen behind is fed what it missed with its next step, which has to pay for it."""
    profile = CostsByLength((128,), (CPU,), "profile x")
    for missed, worth in ((0, True), (8, True), (200, False)):
        planner = Planner(costs=profile)
        for length in range(100, 160, 2):
            play(planner, length, rows=2)
        told = planner.costs
        assert play(planner, 160, rows=2 + missed, draft_s=10 * CPU.draft_step if missed else CPU.draft_step) == worth
        planner.begin(162)
        assert told is not None
        assert planner.costs is not None
        assert planner.costs.draft_step == pytest.approx(told.draft_step)  # a step that caught up tells of no other


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "worth"),
    [(100, 128, True), (100, 8, False), (1000, 128, False), (1000, 100_000, False), (3, 8, True), (0, 1, True)],
)
@pytest.mark.parametrize("costs", [CPU, CostsByLength((128,), (CPU,), "profile x"), None])
def test_a_prompt_is_read_by_the_draft_model_where_the_text_can_bring_that_in(
    costs: Costs | CostsByLength | None, prompt: int, max_new_tokens: int, worth: bool
) -> None:
    assert Planner(costs=costs, max_new_tokens=max_new_tokens).worth_a_prefill(prompt) == worth


@pytest.mark.parametrize("costs", [CPU, None], ids=["given", "measured"])
def test_a_prompt_that_was_not_read_is_caught_up_with_where_that_pays_before_the_end(costs: Costs | None) -> None:
    caught_up = {}
    for prompt in (60, 240, 2000):
        planner = Planner(costs=costs, max_new_tokens=200)
        rounds = [play(planner, length, rows=length, sure=True) for length in range(prompt, prompt + 150)]
        caught_up[prompt] = rounds.index(True) if any(rounds) else None
    assert caught_up[2000] is None
    assert caught_up[60] is not None
    assert caught_up[240] is not None
    assert 0 < caught_up[60] < caught_up[240]  # what plain rounds have cost has to come near the price first
    late = Planner(costs=costs, max_new_tokens=12)
    assert not any(play(late, length, rows=length, sure=True) for length in range(240, 252))


@pytest.mark.parametrize("tells", [True, False])
def test_confidences_that_are_unknown_cost_little(tells: bool) -> None:
    """Where a text is hard: it is left plain either way."""
    rates = [
        simulate(np.random.default_rng(seed), Planner(costs=CPU), CPU, varied(0.4), 128, tells=tells)
        for seed in range(24)
    ]
    assert CPU.target(1) / np.mean([1 / rate for rate in rates]) > 0.95


def test_the_prediction_is_the_documented_formula() -> None:
    planner = Planner(costs=Costs(0.25, (1.0, 1.5, 2.0)), asks=False)
    assert planner.predicted_speedup is None
    first = planner._text.mean
    planner.begin()
    planner.end(2, 0, rows=3, target_s=9.0, draft_s=9.0)  # given costs count, not the clock
    assert planner.predicted_speedup == pytest.approx((1 + first + first**2) / (2 * 0.25 + 2.0))
    second = planner._text.mean
    assert second < first
    planner.begin()
    planner.end(1, 1, rows=2, target_s=9.0, draft_s=9.0)
    expected = (1 + first + first**2 + 1 + second) / (3 * 0.25 + 2.0 + 1.5)
    assert planner.predicted_speedup == pytest.approx(expected)


def test_a_seed_plans_by_assumed_costs_and_predicts_by_the_clock() -> None:
    planner = Planner(repeatable=True)
    costs = Costs(0.1, (1.0, 1.01))
    rate = simulate(np.random.default_rng(6), planner, costs, sure(0.9), 2000)
    assert planner.costs_from == "assumed"
    assert planner.costs is ASSUMED_COSTS
    assert planner.predicted_speedup == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("costs", [Costs(9.0, CPU.target_pass), CostsByLength((1,), (CPU,)), None])
def test_steps_of_a_draft_model_are_nothing_to_copies_alone(costs: Costs | CostsByLength | None) -> None:
    planner = Planner(costs=costs, asks=False, copies=True, repeatable=True)
    assert planner.costs is not None
    assert planner.costs.draft_step == 0
    count = planner.begin(100)
    assert count > 0
    planner.end(count, count, rows=count + 1, target_s=0.1, draft_s=0.0)
    assert planner.begin(1000) >= count
    assert planner.costs.draft_step == 0


def test_copies_are_predicted_for() -> None:
    planner = Planner(costs=CPU)
    planner.begin()
    count = planner.worth_copying(40)
    assert 0 < count <= MOST_DRAFT_TOKENS
    planner.end(count, count, rows=count + 1, target_s=0.1, draft_s=0.0)
    assert planner.predicted_speedup == pytest.approx(
        tokens_per_round(1 - _COPIES_FALL[-1], count) * CPU.target(1) / CPU.target(count + 1)
    )


def test_copies_follow_how_often_they_fall_in_this_text() -> None:
    counts = {}
    for stands in (True, False):
        planner, found = Planner(costs=CPU), []
        for _ in range(8):
            planner.begin()
            found.append(planner.worth_copying(6))
            planner.end(found[-1], found[-1] if stands else 0, rows=found[-1] + 1, target_s=0.1, draft_s=0.0)
        counts[stands] = found
    assert counts[True] == sorted(counts[True])
    assert counts[True][-1] > 2 * counts[True][0]
    assert counts[False][-1] == 0


def test_a_draft_model_that_copies_left_behind_catches_up_where_it_pays() -> None:
    """The price grows with each token that is written without it, and what it would bring grows faster."""
    planner, length = Planner(costs=CPU), 100
    for place in range(60):
        planner.begin(length)
        worth = planner.worth_a_step(2) and planner.worth_drawing(0.72)
        stood = int(worth and place % 4 > 0)
        planner.end(int(worth), stood, rows=1 + worth, target_s=0.1, draft_s=0.1)
        length += 1 + stood
    waited = 0
    while waited < 60:
        planner.begin(length + waited)
        if planner.worth_a_step(20 + waited):
            break
        planner.end(0, 0, rows=1, target_s=0.1, draft_s=0.0, confidences=[0.72])
        waited += 1
    assert waited < 10


def test_short_texts_lose_little_while_it_learns() -> None:
    rates = [simulate(np.random.default_rng(seed), Planner(), CPU, sure(0.4), 128) for seed in range(30)]
    assert float(np.mean(rates)) * CPU.target(1) > 0.93


def test_drafting_comes_back_when_it_pays_again() -> None:
    rng, planner = np.random.default_rng(4), Planner(costs=CPU)
    simulate(rng, planner, CPU, sure(0.2), 400)
    rate = simulate(rng, planner, CPU, sure(0.95), 4000)
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


@pytest.mark.parametrize("acceptance", [0.4, 0.75, 0.95])
@pytest.mark.parametrize(("plain", "drafted"), [(0.8, 1.0), (1.0, 1.3), (1.25, 1.0)])
def test_a_profile_that_is_not_right_any_more_is_corrected(acceptance: float, plain: float, drafted: float) -> None:
    """A pass of one row, or a draft step, takes another time than when the profile was measured."""
    told = CPU
    true = Costs(told.draft_step * drafted, (plain * told.target_pass[0], *told.target_pass[1:]))
    profile = CostsByLength((128,), (told,), "profile x")
    rng, rates, predictions = np.random.default_rng(11), [], []
    for _ in range(24):
        planner = Planner(costs=profile)
        rates.append(simulate(rng, planner, true, varied(acceptance), 128, 0.03))
        predictions.append(planner.predicted_speedup or 0.0)
    realised = true.target(1) / np.mean([1 / rate for rate in rates])
    stale = [simulate(rng, Planner(costs=told), true, varied(acceptance), 128) for _ in range(24)]
    assert realised > 0.9 * true.target(1) / np.mean([1 / rate for rate in stale])
    assert realised > 0.94
    assert abs(np.mean(predictions) / realised - 1) < 0.1


def test_a_profile_is_taken_as_it_is_where_plans_must_come_again() -> None:
    profile = CostsByLength((128,), (CPU,), "profile x")
    planner = Planner(costs=profile, repeatable=True)
    assert planner.begin(10) == MOST_DRAFT_TOKENS
    planner.end(0, 0, rows=1, target_s=50.0, draft_s=0.0)
    planner.begin(20)
    assert planner.costs == CPU
    assert Planner(costs=profile).begin(10) == 0
