"""`paceline bench --compare`: what is flagged, and what is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline_tools.benchmark.compare import Change, changes, differences
from paceline_tools.benchmark.report import compared

from .bench_documents import drifting, made_up


def flagged(found: list[Change], verdict: str = "slower") -> set[tuple[str, str]]:
    return {(change.method, change.figure) for change in found if change.verdict == verdict}


@pytest.mark.parametrize("seed", range(10))
def test_the_same_twice_has_no_regression(seed: int) -> None:
    found = changes(made_up(2 * seed), made_up(2 * seed + 1), 0.05)
    assert len(found) == 3 * 4 + 3  # three times of four methods, and three speedups
    assert flagged(found) == set()
    assert flagged(found, "faster") == set()


def test_the_same_twice_has_no_regression_where_the_machine_drifts() -> None:
    def wave(moment: float) -> float:
        return 1 + 0.15 * math.sin(6 * moment)

    old, new = made_up(0), made_up(1, slower=1.12)  # the mood of the machine, in which it was all the time
    assert ("plain", "ms/token") in flagged(changes(old, new, 0.05))
    assert flagged(changes(drifting(old, wave), drifting(new, wave), 0.05)) == set()
    slower = made_up(1, slower=1.12, slower_methods={"auto": 1.15})  # and what is no mood is still told
    assert ("auto", "1 / speedup") in flagged(changes(drifting(old, wave), drifting(slower, wave), 0.05))


@pytest.mark.parametrize("seed", range(5))
def test_a_slowdown_of_15_percent_is_reported(seed: int) -> None:
    found = changes(made_up(2 * seed), made_up(2 * seed + 1, slower=1.15), 0.05)
    assert {(name, "ms/token") for name in ("plain", "auto", "K = 2", "K = 4")} <= flagged(found)
    assert not any(figure == "1 / speedup" for _, figure in flagged(found))  # all methods alike
    assert flagged(found, "faster") == set()
    back = changes(made_up(2 * seed + 1, slower=1.15), made_up(2 * seed), 0.05)
    assert ("plain", "ms/token") in flagged(back, "faster")
    assert flagged(back) == set()


@pytest.mark.parametrize("seed", range(5))
def test_a_slowdown_of_one_method_is_told_from_a_slow_machine(seed: int) -> None:
    new = made_up(2 * seed + 1, slower_methods={"auto": 1.15})
    assert flagged(changes(made_up(2 * seed), new, 0.05)) == {
        ("auto", figure) for figure in ("ms/token", "ms/token, prompt included", "first token", "1 / speedup")
    }


def test_a_slowdown_within_the_tolerance_is_not_flagged() -> None:
    old, new = made_up(0, noise=0.001), made_up(1, noise=0.001, slower=1.15)
    assert flagged(changes(old, new, 0.10))
    assert not flagged(changes(old, new, 0.20))


def test_only_prompts_and_methods_of_both_runs_are_compared() -> None:
    old, new = made_up(0, num_draft_tokens=("auto", 3)), made_up(1)
    renamed = replace(new, prompts=(replace(new.prompts[0], name="another"), *new.prompts[1:]))
    found = changes(old, renamed, 0.05)
    assert {change.method for change in found} == {"plain", "auto"}
    assert {change.prompts for change in found} == {5}
    other = replace(old, prompts=tuple(replace(prompt, name=f"old {prompt.name}") for prompt in old.prompts))
    assert changes(other, new, 0.05) == []
    assert "nothing is compared" in compared([], [], 0.05)


def test_single_texts_are_not_judged() -> None:
    found = changes(made_up(0, prompts=1, repeats=1), made_up(1, prompts=1, repeats=1, slower=3.0), 0.05)
    assert found
    assert flagged(found) == set()
    assert "–" in compared(found, [], 0.05)


def test_what_differs_besides_time_is_said() -> None:
    old = made_up(0)
    settings = {**old.run["settings"], "max_new_tokens": 32}
    new = replace(old, run={**old.run, "machine": {"cpu": "else"}, "settings": settings, "complete": False})
    assert differences(old, old) == []
    assert differences(old, new) == [
        "another machine",
        "max_new_tokens was 64, is 32",
        "the new run was broken off",
    ]
    text = compared(changes(old, new, 0.05), differences(old, new), 0.05)
    assert "differ in more than time: another machine; " in text
    assert "No regressions: " in text
