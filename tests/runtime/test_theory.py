from __future__ import annotations

import pytest

from paceline.errors import InvalidInputError
from paceline.theory import best_num_draft_tokens, speedup, tokens_per_round


@pytest.mark.parametrize(
    ("draft_cost", "best"),
    [
        (0.05, [(3, 1.63), (4, 1.92), (6, 2.35), (8, 3.09), (13, 4.67)]),
        (0.1, [(2, 1.46), (3, 1.67), (4, 1.98), (6, 2.47), (10, 3.43)]),
        (0.2, [(1, 1.25), (2, 1.40), (3, 1.58), (4, 1.87), (7, 2.37)]),
    ],
)
def test_the_published_best_numbers_and_speedups(draft_cost: float, best: list[tuple[int, float]]) -> None:
    for acceptance, (k, expected) in zip((0.5, 0.6, 0.7, 0.8, 0.9), best, strict=True):
        found = best_num_draft_tokens(acceptance, draft_cost)
        assert (found[0], round(found[1], 2)) == (k, expected)


def test_tokens_per_round() -> None:
    assert [round(tokens_per_round(a, 4), 3) for a in (0.5, 0.6, 0.7, 0.8, 0.9)] == [1.938, 2.306, 2.773, 3.362, 4.095]
    assert tokens_per_round(1, 4) == 5
    assert tokens_per_round(0, 4) == 1
    assert tokens_per_round(0.5, 0) == 1
    assert tokens_per_round([0.9, 0.5, 0.1], 2) == pytest.approx(1 + 0.9 + 0.45)


def test_drafting_pays_exactly_where_the_acceptance_exceeds_the_cost() -> None:
    assert speedup(0.3, 1, 0.3) == 1
    assert best_num_draft_tokens(0.31, 0.3)[0] > 0
    assert best_num_draft_tokens(0.29, 0.3) == (0, 1.0)


def test_case_22_costs_and_overhead_turn_drafting_off() -> None:
    assert best_num_draft_tokens(0.3, 0.4) == (0, 1.0)
    k, gain = best_num_draft_tokens(0.5, 0.4)
    assert (k, round(gain, 2)) == (1, 1.07)
    assert best_num_draft_tokens(0.5, 0.4, overhead=0.11) == (0, 1.0)


def test_rows_that_cost_make_drafts_shorter() -> None:
    free = best_num_draft_tokens(0.8, 0.3)
    dear = best_num_draft_tokens(0.8, 0.3, verification_cost=lambda k: 1 + 0.3 * k)
    assert (free[0], dear[0]) == (3, 1)
    assert speedup(0.8, 1, 0.3, verification_cost=lambda k: 1.25, overhead=0.05) == pytest.approx(1.8 / 1.6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.1, 2, 0.1), "acceptance rate must be from 0 to 1, got 1.1"),
        ((0.5, -1, 0.1), "num_draft_tokens must be at least 0, got -1"),
        ((0.5, 2, -0.1), "draft_cost must be .* got -0.1"),
        (([0.5], 2, 0.1), "as many acceptance rates, got 1"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: tuple[float, int, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        speedup(*arguments)
