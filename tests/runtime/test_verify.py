from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.errors import InvalidInputError, ModelOutputError
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams
from paceline.streams import Chance, Purpose, Streams
from paceline.testing import every_way
from paceline.verify import (
    VERIFICATION_RULES,
    Draft,
    TargetProbs,
    Verdict,
    acceptance,
    residual,
    verify,
    verify_deterministic,
    verify_greedy,
    verify_token,
)


class Scripted:
    """A chance that answers as told: acceptances by position, and always the most probable token."""

    def __init__(self, accept: Sequence[bool] = ()) -> None:
        self.accept = list(accept)

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        return self.accept.pop(0)

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        return int(np.argmax(weights))


def sampler(params: SamplingParams) -> RowSampler:
    return RowSampler(params, vocab_size=2, num_prompt_tokens=0)


def rows(*probs: Sequence[float]) -> TargetProbs:
    return lambda row: np.array(probs[row])


def test_the_first_rejection_draws_from_what_the_target_has_more_of() -> None:
    target = rows([0.2, 0.5, 0.3], [0.1, 0.8, 0.1])
    draft_probs = [np.array([0.1, 0.9, 0.0])]
    assert verify_token([1], draft_probs, target, Scripted([False]), 0) == Verdict(0, 2)


def test_all_accepted_draws_the_bonus_token_from_the_last_row() -> None:
    target = rows([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])
    draft_probs = [np.array([1.0, 0, 0]), np.array([0, 1.0, 0])]
    assert verify_token([0, 1], draft_probs, target, Scripted([True, True]), 0) == Verdict(2, 2)


def test_rows_behind_a_rejection_are_never_asked_for() -> None:
    reached: list[int] = []

    def target(row: int) -> FloatArray:
        reached.append(row)
        return np.array([0.0, 1.0])

    verify_token([1, 0, 1], [np.array([0.5, 0.5])] * 3, target, Streams(0), 0)
    assert reached == [0, 1]
    reached.clear()
    verify_deterministic([1, 0, 1], target, Streams(0), 0)
    assert reached == [0, 1]


def test_verify_takes_the_rule_of_the_draft_and_of_the_sampling() -> None:
    logits = np.log(np.array([[0.1, 0.9], [0.9, 0.1]]))
    sampled, greedy = sampler(SamplingParams(1.0)), sampler(SamplingParams())
    one_hot = Draft((0,), [np.array([1.0, 0.0])])
    # Greedy: id 0 is not the best of row 0, whatever chance and draft probabilities say.
    assert verify(one_hot, logits, greedy, [], Scripted([True])) == Verdict(0, 1)
    assert verify(one_hot, logits, sampled, [], Scripted([True])) == Verdict(1, 0)
    assert verify(Draft((1,), None), logits, sampled, [], Scripted()) == Verdict(1, 0)
    assert verify(Draft((), None), logits[:1], sampled, [], Scripted()) == Verdict(0, 1)
    assert verify(Draft((), []), logits[:1], sampled, [], Scripted()) == Verdict(0, 1)


def test_greedy_accepts_up_to_the_first_difference() -> None:
    best = [4, 5, 6, 7]
    assert verify_greedy([4, 5, 6], best.__getitem__) == Verdict(3, 7)
    assert verify_greedy([4, 9, 6], best.__getitem__) == Verdict(1, 5)


def test_an_error_names_the_position_of_the_row() -> None:
    good, bad = [0.0, 1.0], [math.nan, 1.0]
    draft = Draft((1,), [np.array([0.0, 1.0])])
    for params in (SamplingParams(), SamplingParams(1.0)):
        with pytest.raises(ModelOutputError, match="position 20 "):
            verify(draft, np.array([bad, good]), sampler(params), [0] * 20, Scripted([True]))
        # A later row that is bad ends the round before it: the text may end there, too.
        for rule in VERIFICATION_RULES:
            chance = Scripted([True, True])
            assert verify(draft, np.array([good, bad]), sampler(params), [0] * 20, chance, rule) == Verdict(0, 1)


def emitted_law(tokens: Sequence[int], draft_probs: Sequence[FloatArray], target: TargetProbs) -> dict[int, float]:
    """Exact law of the first token that a round emits, for one fixed draft."""
    law: dict[int, float] = {}

    def run(chance: Chance) -> tuple[int, ...]:
        verdict = verify_token(tokens, draft_probs, target, chance, 0)
        return (tokens[0] if verdict.num_accepted else verdict.next_token,)

    for (token,), probability in every_way(run):
        law[token] = law.get(token, 0) + probability
    return law


@pytest.mark.parametrize("seed", range(20))
def test_a_drafted_token_is_accepted_with_probability_one_minus_total_variation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, draft = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(5))
    accepted = 0.0
    for token in range(5):
        for (num,), probability in every_way(
            lambda chance, token=token: (  # type: ignore[misc]
                verify_token([token], [draft], lambda row: target, chance, 0).num_accepted,
            )
        ):
            accepted += draft[token] * probability * num
    assert accepted == pytest.approx(1 - abs(target - draft).sum() / 2, abs=1e-12)


def test_case_1_a_greedy_draft_is_deterministic_and_keeps_the_target_law() -> None:
    # With the softmax of a draft that always takes its best token, the old rule emitted token 0 with probability 1.
    target, draft_softmax = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    assert emitted_law([0], [draft_softmax], lambda row: target) == {0: pytest.approx(1.0)}

    def run(chance: Chance) -> tuple[int, ...]:
        verdict = verify_deterministic([0], lambda row: target, chance, 0)
        return (0 if verdict.num_accepted else verdict.next_token,)

    law = dict.fromkeys(range(3), 0.0)
    for (token,), probability in every_way(run):
        law[token] += probability
    assert list(law.values()) == pytest.approx(target)


def test_case_5_a_deterministic_proposal_is_accepted_as_often_as_the_target_says() -> None:
    target = np.array([0.01, 0.99])
    accepted = sum(
        probability
        for (num,), probability in every_way(
            lambda chance: (verify_deterministic([0], lambda row: target, chance, 0).num_accepted,)
        )
        if num
    )
    assert accepted == pytest.approx(0.01)


def test_case_16_a_token_that_the_target_never_takes_is_never_accepted() -> None:
    assert acceptance(0.0, 0.0) == 0
    assert acceptance(0.0, 0.5) == 0
    assert not Streams(0).happens(0.0, 0, Purpose.ACCEPT)


def test_acceptance_is_the_ratio_up_to_one() -> None:
    assert acceptance(0.3, 0.6) == 0.5
    assert acceptance(0.6, 0.3) == 1
    assert acceptance(0.6, 0.0) == 1
    assert all(Streams(seed).happens(1.0, 0, Purpose.ACCEPT) for seed in range(50))


def test_case_25_equal_rows_leave_no_residual_so_the_target_row_is_taken() -> None:
    target = np.array([0.25, 0.75])
    assert residual(target, target.copy(), 0) is target
    # Rounding in a forced rejection: one ulp is a residual.
    assert residual(np.nextafter(target, 1), target, 0).tolist() != target.tolist()
    assert verify_token([0], [target], lambda row: target, Scripted([False]), 0) == Verdict(0, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_25_a_residual_that_is_not_finite_falls_back_to_the_target_row(bad: float) -> None:
    target = np.array([0.25, 0.75])
    assert residual(target, np.array([0.5, bad]), 0) is target
    assert not Streams(0).happens(acceptance(0.25, math.nan), 0, Purpose.ACCEPT)


def test_one_row_of_probabilities_per_token_is_expected() -> None:
    with pytest.raises(InvalidInputError, match="2 tokens came with 1 rows"):
        Draft((1, 2), [np.ones(3)])
