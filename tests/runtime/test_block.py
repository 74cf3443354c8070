"""The block rule (arXiv 2403.10444): how much it accepts, against figures of the paper's and the token rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.sampling import FloatArray
from paceline.streams import Chance
from paceline.testing import every_way
from paceline.verify import VERIFICATION_RULES

# A model as a function of the tokens before.
Model = Callable[[tuple[int, ...]], FloatArray]


def random_model(rng: np.random.Generator, vocab: int, alpha: float = 1.0) -> Model:
    rows: dict[tuple[int, ...], FloatArray] = {}
    return lambda before: rows.setdefault(before, rng.dirichlet(np.full(vocab, alpha)))


def verdicts(rule: str, target: Model, draft: Model, vocab: int, count: int) -> Iterator[tuple[Any, float]]:
    """Every draft, every way its verification goes: tokens, number accepted, next token; with its probability."""
    for tokens in itertools.product(range(vocab), repeat=count):
        drafted = math.prod(float(draft(tokens[:i])[token]) for i, token in enumerate(tokens))
        if drafted == 0:
            continue

        def run(chance: Chance, tokens: tuple[int, ...] = tokens) -> Any:
            verdict = VERIFICATION_RULES[rule](
                tokens, [draft(tokens[:i]) for i in range(count)], lambda row: target(tokens[:row]), chance, 0
            )
            return tokens, verdict.num_accepted, verdict.next_token

        for result, probability in every_way(run):
            yield result, drafted * probability


def mean_accepted(rule: str, target: Model, draft: Model, vocab: int, count: int) -> float:
    return math.fsum(share * accepted for (_, accepted, _), share in verdicts(rule, target, draft, vocab, count))


def fixed(probs: Sequence[float] | FloatArray) -> Model:
    row = np.asarray(probs)
    return lambda before: row


def test_case_4_the_papers_example() -> None:
    target, draft = fixed([1 / 3, 2 / 3]), fixed([2 / 3, 1 / 3])
    assert mean_accepted("token", target, draft, 2, 2) == pytest.approx(10 / 9)
    assert mean_accepted("block", target, draft, 2, 2) == pytest.approx(11 / 9)


def papers_algorithm(target: Model, draft: Model, vocab: int, count: int) -> tuple[float, dict[tuple[int, ...], float]]:
    """Mean accepted, and the law of accepted tokens with the next one, summed up as the paper writes algorithm 2."""
    mean, law = 0.0, dict[tuple[int, ...], float]()
    for tokens in itertools.product(range(vocab), repeat=count):
        drafted = math.prod(float(draft(tokens[:i])[token]) for i, token in enumerate(tokens))
        reached, stands = [1.0], []
        for i in range(1, count + 1):
            ratio = float(target(tokens[: i - 1])[tokens[i - 1]] / draft(tokens[: i - 1])[tokens[i - 1]])
            reached.append(min(1.0, reached[-1] * ratio))
            over = sum(max(reached[i] * p - q, 0) for p, q in zip(target(tokens[:i]), draft(tokens[:i]), strict=True))
            rest = over + 1 - reached[i]
            stands.append(reached[i] if i == count else over / rest if rest > 0 else 1.0)
        for outcome in itertools.product((False, True), repeat=count):
            chance = math.prod(h if stood else 1 - h for h, stood in zip(stands, outcome, strict=True))
            accepted = max((i + 1 for i, stood in enumerate(outcome) if stood), default=0)
            weights = target(tokens[:accepted])
            if accepted < count:
                left = np.maximum(reached[accepted] * weights - draft(tokens[:accepted]), 0)
                weights = left if left.sum() > 0 else weights
            mean += drafted * chance * accepted
            for token, share in enumerate(weights / weights.sum()):
                text = (*tokens[:accepted], token)
                law[text] = law.get(text, 0) + drafted * chance * float(share)
    return mean, law


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("vocab", "count"), [(3, 1), (3, 2), (3, 3), (2, 4), (4, 2)])
def test_every_verdict_is_as_likely_as_in_the_papers_algorithm(vocab: int, count: int, seed: int) -> None:
    rng = np.random.default_rng((seed, vocab, count))
    target, draft = random_model(rng, vocab), random_model(rng, vocab)
    mean, expected = papers_algorithm(target, draft, vocab, count)
    law: dict[tuple[int, ...], float] = {}
    for (tokens, accepted, token), probability in verdicts("block", target, draft, vocab, count):
        text = (*tokens[:accepted], token)
        law[text] = law.get(text, 0) + probability
    assert max(abs(law.get(text, 0) - expected.get(text, 0)) for text in law | expected) < 1e-12
    assert mean_accepted("block", target, draft, vocab, count) == pytest.approx(mean, abs=1e-12)


def test_the_block_rule_accepts_at_least_as_much_as_the_token_rule_on_any_pair() -> None:
    gains: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for seed, count in itertools.product(range(40), gains):
        rng = np.random.default_rng(seed)
        target, draft = (random_model(rng, 3, rng.choice([0.3, 1.0, 5.0])) for _ in range(2))
        token, block = (mean_accepted(rule, target, draft, 3, count) for rule in ("token", "block"))
        gains[count].append(block - token)
    assert max(map(abs, gains[1])) < 1e-12  # the two are one rule for one token
    assert min(gains[2] + gains[3]) > -1e-12
    assert max(gains[2]) > 0.01
    assert max(gains[3]) > 0.05


@pytest.mark.parametrize("seed", range(10))
def test_a_row_of_the_token_rule_is_accepted_with_probability_one_minus_total_variation(seed: int) -> None:
    """At every row that is reached, whatever was drafted before it."""
    rng = np.random.default_rng(seed)
    target, draft = random_model(rng, 3), random_model(rng, 3)
    reached: dict[tuple[int, ...], float] = {}
    accepted_there: dict[tuple[int, ...], float] = {}
    for (tokens, accepted, _), probability in verdicts("token", target, draft, 3, 3):
        for row in range(min(accepted + 1, 3)):
            before = tokens[:row]
            reached[before] = reached.get(before, 0) + probability
            accepted_there[before] = accepted_there.get(before, 0) + probability * (accepted > row)
    assert len(reached) == 13
    for before, probability in reached.items():
        expected = 1 - abs(target(before) - draft(before)).sum() / 2
        assert accepted_there[before] / probability == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_equal_models_accept_everything(rule: str) -> None:
    model = random_model(np.random.default_rng(3), 3)
    assert mean_accepted(rule, model, model, 3, 3) == pytest.approx(3)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_models_without_a_common_token_accept_nothing(rule: str) -> None:
    assert mean_accepted(rule, fixed([0, 0.5, 0.5, 0]), fixed([0.5, 0, 0, 0.5]), 4, 2) == 0


def test_case_25_one_ulp_between_the_rows_costs_no_more_than_it_is() -> None:
    row = np.array([0.25, 0.5, 0.25])
    for other in (np.nextafter(row, 1), np.nextafter(row, 0), row):
        for one, two in ((row, other), (other, row)):
            for rule in ("token", "block"):
                assert mean_accepted(rule, fixed(one), fixed(two), 3, 3) == pytest.approx(3, abs=1e-12)


def test_case_25_a_broken_draft_row_makes_no_prefix_stand() -> None:
    """NaN in a row accepts nothing, and where nothing sound is left the target's row is drawn from."""
    target, draft = fixed([0.5, 0.25, 0.25]), [np.array([0.5, 0.25, 0.25]), np.array([0.5, math.nan, 0.5])]
    for rule in ("token", "block"):
        law: dict[tuple[int, ...], float] = {}

        def run(chance: Chance, rule: str = rule) -> Any:
            verdict = VERIFICATION_RULES[rule]([0, 1], draft, lambda row: target(()), chance, 0)
            return verdict.num_accepted, verdict.next_token

        for verdict, probability in every_way(run):
            law[verdict] = law.get(verdict, 0) + probability
        accepted = 1 if rule == "token" else 0
        assert law == pytest.approx({(accepted, 0): 0.5, (accepted, 1): 0.25, (accepted, 2): 0.25})
