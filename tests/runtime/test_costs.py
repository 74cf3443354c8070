from __future__ import annotations

from typing import Any

import pytest

from paceline.costs import CostMeter, Costs, CostsByLength
from paceline.errors import InvalidInputError
from paceline.planner import Planner

SHORT, LONG = Costs(1.0, (10.0, 12.0)), Costs(3.0, (20.0, 28.0))
BY_LENGTH = CostsByLength((100, 300), (SHORT, LONG))


@pytest.mark.parametrize(
    ("length", "step", "passes"),
    [
        (0, 1.0, (10.0, 12.0)),
        (100, 1.0, (10.0, 12.0)),
        (150, 1.5, (12.5, 16.0)),
        (300, 3.0, (20.0, 28.0)),
        (400, 4.0, (25.0, 36.0)),
    ],
)
def test_costs_lie_on_the_line_between_the_measured_lengths(
    length: int, step: float, passes: tuple[float, ...]
) -> None:
    found = BY_LENGTH.at(length)
    assert found.draft_step == pytest.approx(step)
    assert found.target_pass == pytest.approx(passes)


def test_the_right_pair_of_many_lengths_is_taken() -> None:
    costs = CostsByLength((0, 10, 20), tuple(Costs(step, (1.0,)) for step in (0.0, 1.0, 5.0)))
    assert [costs.at(length).draft_step for length in (5, 10, 15, 30)] == pytest.approx([0.5, 1, 3, 9])
    assert SHORT.at(10**6) is SHORT


def test_a_line_that_falls_never_reaches_zero() -> None:
    found = CostsByLength((0, 10), (LONG, SHORT)).at(10**6)
    assert found.draft_step == 0.5
    assert found.target_pass == (5.0, 6.0)


@pytest.mark.parametrize(
    ("lengths", "costs", "message"),
    [
        ((), (), "lengths must be ascending"),
        ((5, 5), (SHORT, LONG), "lengths must be ascending"),
        ((-1, 5), (SHORT, LONG), "lengths must be ascending"),
        ((5, 6), (SHORT,), "one entry for each of 2 lengths"),
        ((5, 6), (SHORT, Costs(1.0, (1.0,))), "the same numbers of rows"),
    ],
)
def test_costs_that_do_not_fit_their_lengths_are_refused(lengths: Any, costs: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        CostsByLength(lengths, costs)


def test_plans_follow_the_length_of_the_text() -> None:
    """A draft that pays on a short text and loses on a long one."""
    costs = CostsByLength((0, 1000), (Costs(0.1, (1.0, 1.0)), Costs(3.0, (3.0, 3.0))))
    planner = Planner(costs=costs)
    planner.begin(10)
    assert planner.worth_a_step()
    planner.begin(1000)
    assert not planner.worth_a_step()
    assert planner.costs == costs.at(1000)
    planner.begin(40)
    assert planner.worth_a_step()


def test_the_meter_follows_the_growth_of_a_text() -> None:
    meter = CostMeter()
    for length in range(400):
        drafted = length % 3
        slower = 1 + length / 400
        meter.observe(
            rows=drafted + 1, target_s=(1 + 0.2 * drafted) * slower, draft_steps=drafted, draft_s=0.3 * drafted * slower
        )
    assert meter.costs is not None
    assert meter.costs.draft_step == pytest.approx(0.6, rel=0.06)
    assert meter.costs.target(1) == pytest.approx(2, rel=0.06)
