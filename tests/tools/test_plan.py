"""`paceline plan`: theory in a table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import Invoke


def plan(invoke: Invoke, *args: object) -> dict[str, Any]:
    result = invoke("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.mark.parametrize(
    ("acceptance", "draft_cost", "best", "speedup"), [(0.5, 0.05, 3, 1.63), (0.8, 0.2, 4, 1.87), (0.9, 0.1, 10, 3.43)]
)
def test_the_published_best_numbers(
    invoke: Invoke, acceptance: float, draft_cost: float, best: int, speedup: float
) -> None:
    found = plan(invoke, "--acceptance", acceptance, "--draft-cost", draft_cost)
    assert found["best"]["num_draft_tokens"] == best
    assert round(found["best"]["speedup"], 2) == speedup
    assert found["best"]["break_even_acceptance"] == pytest.approx(draft_cost, abs=1e-5)
    assert [row["num_draft_tokens"] for row in found["plans"]] == list(range(13))
    assert found["plans"][best]["speedup"] == found["best"]["speedup"]


def test_costs_may_have_any_unit(invoke: Invoke) -> None:
    ms = plan(invoke, "--acceptance", 0.8, "--draft-cost", 12, "--pass-costs", "40,48,58", "--overhead", 2)
    relative = plan(invoke, "--acceptance", 0.8, "--draft-cost", 0.3, "--pass-costs", "1,1.2,1.45", "--overhead", 0.05)
    for one, other in zip(ms["plans"], relative["plans"], strict=True):
        assert one == pytest.approx(other)
    assert ms["plans"][1]["round_cost"] == pytest.approx(0.3 + 1.2 + 0.05)


@pytest.mark.parametrize(("most", "said"), [(2, False), (3, True)])
def test_costs_beyond_those_given_are_said_to_be_guessed(invoke: Invoke, most: int, said: bool) -> None:
    args = ("--acceptance", 0.8, "--draft-cost", 0.1, "--pass-costs", "1,1.1,1.3", "--draft-tokens", most)
    assert (
        "more than the 3 rows that --pass-costs gives go on in a straight line" in invoke("plan", *args).stderr
    ) is said
    found = plan(invoke, *args)
    assert found["settings"]["pass_costs_given"] == 3
    assert found["settings"]["pass_costs"] == pytest.approx([1, 1.1, 1.3, 1.45][: most + 1])


def test_rows_that_cost_make_drafts_shorter(invoke: Invoke) -> None:
    free = plan(invoke, "--acceptance", 0.8, "--draft-cost", 0.1)
    dear = plan(invoke, "--acceptance", 0.8, "--draft-cost", 0.1, "--row-cost", 0.2)
    assert free["best"]["num_draft_tokens"] > dear["best"]["num_draft_tokens"] > 0
    assert dear["plans"][3]["round_cost"] == pytest.approx(3 * 0.1 + 1 + 3 * 0.2)


def test_acceptance_by_place_ends_with_its_places(invoke: Invoke) -> None:
    found = plan(invoke, "--acceptance", "0.9,0.5,0.1", "--draft-cost", 0.1)
    assert [row["tokens_per_round"] for row in found["plans"]] == pytest.approx([1, 1.9, 2.35, 2.395])
    assert found["best"]["num_draft_tokens"] == 2


def test_the_table_marks_the_best_and_names_the_source(invoke: Invoke) -> None:
    result = invoke("plan", "--acceptance", ".8", "--draft-cost", ".2", "--draft-tokens", 6)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[2].split() == ["0", "1.00", "1.00", "1.00×"]
    assert [line for line in lines if line.endswith("*")] == [lines[6]]
    assert lines[6].split() == ["4", "3.36", "1.80", "1.87×", "*"]
    assert "Best: draft 4 a round, 1.87 times" in result.stdout
    assert "pays where more than 20 % stand" in result.stdout
    assert "arXiv 2211.17192" in result.stdout


def test_drafting_that_never_pays_is_said(invoke: Invoke) -> None:
    result = invoke("plan", "--acceptance", ".9", "--draft-cost", "1.5")
    assert "Best: draft nothing" in result.stdout
    assert "never pays" in result.stdout
    assert plan(invoke, "--acceptance", ".9", "--draft-cost", "1.5")["best"]["break_even_acceptance"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--draft-cost", ".2"), "Missing option '--acceptance'"),
        (("--acceptance", ".8"), "Missing option '--draft-cost'"),
        (("--acceptance", "1.5", "--draft-cost", ".2"), "acceptance rate must be from 0 to 1, got 1.5"),
        (("--acceptance", ".8,x", "--draft-cost", ".2"), "numbers with commas between them are expected"),
        (("--acceptance", "nan", "--draft-cost", ".2"), "numbers with commas between them are expected"),
        (("--acceptance", ".8", "--draft-cost", "-1"), "-1.0 is not in the range"),
        (("--acceptance", ".8", "--draft-cost", "nan"), "a number is expected"),
        (("--acceptance", ".8", "--draft-cost", "inf"), "inf is not in the range"),
        (
            ("--acceptance", ".8", "--draft-cost", ".2", "--pass-costs", "0,1"),
            "--pass-costs must be from 1e-09 to 1e+09",
        ),
        (("--acceptance", ".8", "--draft-cost", ".2", "--pass-costs", "1e-320"), "--pass-costs must be from 1e-09"),
        (("--acceptance", ".8", "--draft-cost", ".2", "--pass-costs", "3,2,1"), "--pass-costs falls from 3 to 1"),
        (("--acceptance", ".8", "--draft-cost", "1e308"), "1e+308 is not in the range"),
        (("--acceptance", ".8", "--draft-cost", ".2", "--overhead", "inf"), "inf is not in the range"),
        (("--acceptance", ".8", "--draft-cost", ".2", "--row-cost", "1e300"), "1e+300 is not in the range"),
        (("--acceptance", ".8", "--draft-cost", ".2", "--pass-costs", "1", "--row-cost", "0"), "exclude each other"),
        (("--acceptance", ".8", "--draft-cost", ".2", "--draft-tokens", "0"), "0 is not in the range"),
    ],
)
def test_wrong_usage_is_said(invoke: Invoke, args: tuple[str, ...], message: str) -> None:
    result = invoke("plan", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
