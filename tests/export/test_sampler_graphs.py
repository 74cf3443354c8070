"""The sampler's graphs against numpy: random rounds, the edges of float32, and the exact law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_rounds import (
    Case,
    Played,
    compare,
    draft_by_graph,
    graph,
    verify_by_graph,
    verify_by_numpy,
)
from random_rounds import random_case, random_params, random_rounds

import paceline
from paceline.bundle import Bundle
from paceline.sampling import FloatArray, SamplingParams, distribution, sample
from paceline.verify import Verdict

RULES = ("token", "block", "deterministic", "greedy")
NAN, INF = float("nan"), float("inf")


def make_case(target: Any, draft: Any, *, temperature: float = 1.0, seed: int = 0, **params: Any) -> Case:
    target, draft = np.array(target, np.float32), np.array(draft, np.float32)
    sampling = SamplingParams(temperature, **params)
    return Case(target.shape[1], [0], [], draft, target, sampling, sampling, seed=seed)


def played(case: Case, rule: str, tokens: list[int], probs: list[FloatArray | None]) -> Played:
    if rule == "greedy":
        case = replace(case, target_params=replace(case.target_params, temperature=0.0))
    drafted = Played(tokens, probs)
    verify_by_graph(case, drafted, rule)
    return drafted


def test_a_bundle_holds_a_graph_of_every_rule(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    entry = bundle.manifest.sampler
    assert entry
    assert entry.width == 512
    assert set(entry.graphs) == {*RULES, "draft", "greedy_draft"}
    for path in entry.graphs.values():
        assert onnx.load(bundle.path(path)).producer_version == paceline.__version__


# Random rounds


@pytest.mark.parametrize("vocab_size", [10, 50, 700, 2000])
def test_random_rounds_agree_with_numpy(vocab_size: int) -> None:
    counts = Counter(compare(case, rule) for rule, case in random_rounds(np.random.default_rng(1), 100, vocab_size))
    assert set(counts) <= {"equal", "draw tie", "accept tie", "cut tie"}
    assert counts["equal"] >= 98


def test_random_rounds_of_a_large_vocabulary_agree_with_numpy() -> None:
    counts = Counter(compare(case, rule) for rule, case in random_rounds(np.random.default_rng(2), 30, 151_936))
    assert set(counts) <= {"equal", "draw tie", "accept tie", "cut tie"}
    assert counts["equal"] >= 28


@pytest.mark.slow
def test_ten_thousand_random_rounds_of_a_large_vocabulary_agree_with_numpy() -> None:
    counts = Counter(compare(case, rule) for rule, case in random_rounds(np.random.default_rng(3), 10_000, 151_936))
    assert set(counts) <= {"equal", "draw tie", "accept tie", "cut tie"}
    assert counts["equal"] >= 9_900


@pytest.mark.parametrize("rule", RULES)
def test_logits_wider_than_the_vocabulary_are_cut_whatever_the_padding_holds(rule: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        params = random_params(rng, 600) | ({"temperature": 0.0} if rule == "greedy" else {})
        case = random_case(rng, 600, 640, 2, **params)
        case.target_logits[:, 600:] = case.draft_logits[:, 600:] = NAN
        if rule == "deterministic":
            case.forced = {0: 3, 1: 5}
        assert compare(case, rule) == "equal"


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_narrower_draft_and_one_with_ids_of_its_own_draft_in_the_common_vocabulary(rule: str) -> None:
    rng = np.random.default_rng(5)
    for number in range(20):
        case = random_case(rng, 1300, 1300, 3, **random_params(rng, 1300) | {"banned_token_ids": ()})
        case.draft_logits = case.draft_logits[:, :700].copy()
        if number % 2:
            case.logit_ids = tuple(sorted(np.random.default_rng(6).choice(1300, 700, replace=False).tolist()))
        assert compare(case, rule) in ("equal", "draw tie")


def test_without_a_draft_a_verifier_is_a_step_of_plain_decoding() -> None:
    rng = np.random.default_rng(7)
    for rule in RULES:
        params = random_params(rng, 900) | ({"temperature": 0.0} if rule == "greedy" else {})
        case = random_case(rng, 900, 900, 0, **params)
        assert compare(case, rule) == "equal"


# Edges


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_rows_stand_whatever_the_uniforms(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    case = random_case(rng, 5000, 5000, 3, temperature=0.7)
    tokens = [int(row.argmax()) for row in case.target_logits[:-1]]
    first = played(case, rule, tokens, [np.full(5000, 1 / 5000, np.float32)] * 3)
    rows = [row[:5000] for row in first.details["target_probs"][:-1]]
    monkeypatch.setattr("paceline.streams.Streams.uniform", lambda *_: 1 - 2.0**-53)
    verdict = played(case, rule, tokens, rows).verdict
    assert verdict
    assert verdict.num_accepted == 3


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("towards", [0.0, 1.0])
def test_rows_one_rounding_apart_stand(
    rule: str, uniform: float, towards: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(np.random.default_rng(9), 3000, 3000, 2, temperature=1.0)
    tokens = [int(row.argmax()) for row in case.target_logits[:-1]]
    first = played(case, rule, tokens, [np.full(3000, 1 / 3000, np.float32)] * 2)
    rows = [np.nextafter(row[:3000], np.float32(towards)) for row in first.details["target_probs"][:-1]]
    monkeypatch.setattr("paceline.streams.Streams.uniform", lambda *_: uniform)
    drafted = played(case, rule, tokens, rows)
    assert drafted.verdict == verify_by_numpy(case, tokens, rows, rule, 0, 0)


def test_where_nothing_is_left_over_the_target_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]], [[0.0, 1.0, 2.0]])
    row = played(case, "token", [2], [np.full(3, 1 / 3, np.float32)]).details["target_probs"][0, :3]
    more = row.copy()
    more[2] *= 1.5  # rejected at the largest uniform, and nowhere is the target above
    monkeypatch.setattr("paceline.streams.Streams.uniform", lambda *_: 1 - 2.0**-53)
    drafted = played(case, "token", [2], [more])
    assert drafted.verdict == Verdict(0, 2)
    assert (drafted.details["weights"][0, :3] == row).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_single_possible_token_is_taken(rule: str) -> None:
    only = [[-INF, 3.0, -INF]] * 3
    case = make_case(only, only[:2])
    one = np.array([0, 1, 0], np.float32)
    drafted = played(case, rule, [1, 1], [one, one])
    assert drafted.verdict == Verdict(2, 1)
    assert drafted.bad_row == -1
    drafted = played(case, rule, [1, 2], [one, np.array([0.5, 0, 0.5], np.float32)])
    assert drafted.verdict == Verdict(1, 1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}, {"typical_p": 0.9}])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float, cuts: dict[str, Any]) -> None:
    rng = np.random.default_rng(10)
    for seed in range(5):
        case = random_case(rng, 1000, 1000, 2, temperature=temperature, **cuts)
        case.draft_params = case.target_params
        case.seed = seed
        drafted = draft_by_graph(case)
        assert drafted.tokens == [int(row.argmax()) for row in case.draft_logits]
        assert compare(case, "token") == "equal"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_no_distribution_is_named_if_it_is_reached(rule: str, bad: float) -> None:
    good = [[0.0, 9.0, 0.0, 0.0]]
    broken = [[bad] * 4] if bad == -INF else [[0.0, 0.0, bad, 0.0]]
    always, never = np.array([0, 1, 0, 0], np.float32), np.array([0, 0, 1, 0], np.float32)
    assert played(make_case(broken + good, good), rule, [1], [always]).bad_row == 0
    reached = make_case(good + broken + good, good * 2, seed=1)
    assert played(reached, rule, [1, 1], [always, always]).bad_row == 1
    assert played(make_case(good + broken, good, seed=1), rule, [1], [always]).bad_row == 1
    unreached = make_case([[0.0, 9.0, -INF, 0.0], *broken], good)
    drafted = played(unreached, rule, [2], [never])
    assert drafted.bad_row == -1
    assert drafted.verdict
    assert drafted.verdict.num_accepted == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["sampler", "greedy_sampler"])
def test_a_draft_row_that_is_no_distribution_is_named(name: str, bad: float) -> None:
    case = make_case([[0.0] * 600] * 2, [[bad] * 600], temperature=1.0 if name == "sampler" else 0.0)
    case.draft_logits[0, 0] = bad
    inputs = case.shared_inputs(case.draft_params) | {
        "logits": case.draft_logits[None],
        "drafted": np.array([[-1]]),
    }
    if name == "sampler":
        inputs["uniform"] = np.array([2**52])
    session = graph(name, 600, 600)
    outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    assert not outputs["healthy"].any()
    assert 0 <= outputs["token"][0, 0] < 1024


def test_among_equal_logits_greedy_takes_the_lowest_id() -> None:
    logits = np.zeros((2, 2000), np.float32)
    logits[0, [700, 1200, 1999]] = 5
    logits[1, [3, 4]] = 5
    case = make_case(logits, logits[:1], temperature=0.0)
    drafted = draft_by_graph(case)
    assert drafted.tokens == [700]
    verify_by_graph(case, drafted, "greedy")
    assert drafted.verdict == Verdict(1, 3)


def test_flat_distributions_are_drawn_as_in_float64() -> None:
    width, equal = 151_936, 0
    rng = np.random.default_rng(11)
    for seed in range(60):
        logits = (0.5 * rng.standard_normal((1, width))).astype(np.float32)
        case = make_case(np.zeros((2, width)), logits, seed=seed)
        drafted = draft_by_graph(case)
        uniform = _uniform_of(case)
        probs = distribution(logits[0].astype(np.float64), case.draft_params)
        assert drafted.probs[0] is not None
        low, high = (sample(probs, max(uniform + move, 0)) for move in (-1e-6, 1e-6))
        assert low <= drafted.tokens[0] <= high
        equal += drafted.tokens[0] == sample(probs, uniform)
    assert equal >= 58


def _uniform_of(case: Case) -> float:
    from paceline.streams import Purpose, Streams

    return Streams(case.seed).uniform(1, Purpose.DRAFT, 1)
