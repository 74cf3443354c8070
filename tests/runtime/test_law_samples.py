"""The law of the text in samples: real generations, with the streams and the inverse CDF that enumeration replaces."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline import verify
from paceline.decoder import SpeculativeDecoder
from paceline.sampling import SamplingParams
from paceline.streams import Purpose, Streams
from paceline.testing import TableModel

from .law_cases import FOUR, PROMPT, RULES, TableDrafter
from .reference import Law, Setting, constraint_of, reference_law

# Settings with an effect in every row, so that a row with the wrong history or mask shows.
SETTING = Setting(
    SamplingParams(1.0, top_p=0.97, frequency_penalty=0.5), allowed=lambda new: None if new else {0, 1, 3}
)


def chi_squared_pvalue(num_samples: int, rule: str = "token") -> float:
    """Of the first three tokens together: marginals would miss mistakes in later rows."""
    target, draft = TableModel.random(4, seed=2), TableModel.random(4, seed=102)
    decoder = SpeculativeDecoder(target, draft, None, 4)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_samples):
        generation = decoder.generate(
            PROMPT,
            replace(SETTING.params, seed=seed),
            max_new_tokens=3,
            num_draft_tokens=2,
            verification=rule,
            constraint=constraint_of(SETTING, 4),
        )
        counts[tuple(token for step in generation for token in step.token_ids)] += 1
    law, _ = reference_law(target, PROMPT, 3, SETTING)
    return pvalue(counts, law)


def pvalue(counts: Counter[tuple[int, ...]], law: Law) -> float:
    num_samples = counts.total()
    assert counts.keys() <= law.keys()
    texts = [text for text in law if law[text] * num_samples >= 5]
    observed = [counts[text] for text in texts]
    expected = [law[text] * num_samples for text in texts]
    if (rare := num_samples - sum(expected)) > 1e-6 * num_samples:
        observed.append(num_samples - sum(observed))
        expected.append(rare)
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize("rule", RULES)
def test_sampled_generations_have_the_law_of_the_target(rule: str) -> None:
    assert chi_squared_pvalue(4_000, rule) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_case_2_shared_noise_between_draft_and_recovered_token_is_seen_in_samples(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    right = Streams.uniform

    def shared(self: Streams, position: int, purpose: Purpose, round_start: int = 0) -> float:
        return right(self, position, Purpose.DRAFT if purpose is Purpose.RECOVER else purpose, 0)

    monkeypatch.setattr(Streams, "uniform", shared)
    assert chi_squared_pvalue(3_000, rule) < 1e-6


def test_case_2_the_published_figures() -> None:
    """With shared noise the report's law, [.100, .577, .322]; with its own the target's."""
    target, draft = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.5, 0.2])
    counts = {"own": np.zeros(3), "shared": np.zeros(3)}
    num_samples = 20_000
    for seed in range(num_samples):
        # The report's noise is Gumbel's: the largest of log probability + noise.
        noise, fresh = (-np.log(-np.log(np.random.default_rng((seed, i)).random(3))) for i in (0, 1))
        token = int((np.log(draft) + noise).argmax())
        accepted = Streams(seed).happens(verify.acceptance(target[token], draft[token]), 0, Purpose.ACCEPT)
        with np.errstate(divide="ignore"):
            left = np.log(verify.residual(target, draft, token))
        counts["own"][token if accepted else int((left + fresh).argmax())] += 1
        counts["shared"][token if accepted else int((left + noise).argmax())] += 1
    error = 4 * 0.5 / np.sqrt(num_samples)
    assert counts["own"] / num_samples == pytest.approx(target, abs=error)
    assert counts["shared"] / num_samples == pytest.approx([0.100, 0.577, 0.322], abs=error)


def rare_pvalue() -> float:
    """Of a token that the draft proposes nearly always and the target takes once in two thousand texts."""
    target = TableModel(np.log([[0.0005, 0.5, 0.4995]] * 3))
    draft = TableModel(np.log([[0.95, 0.025, 0.025]] * 3))
    decoder = SpeculativeDecoder(target, draft, None, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(2_000):
        sampling = SamplingParams(1.0, seed=seed)
        generation = decoder.generate([1], sampling, max_new_tokens=3, num_draft_tokens=1)
        token = [token for step in generation for token in step.token_ids][1]
        counts[(token,)] += 1
    return pvalue(counts, {(0,): 0.0005, (1,): 0.5, (2,): 0.4995})


def test_accept_tests_on_a_grid_of_101_numbers_are_seen_in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rare_pvalue() > 1e-3
    right = Streams.uniform

    def grid(self: Streams, position: int, purpose: Purpose, round_start: int = 0) -> float:
        uniform = right(self, position, purpose, round_start)
        return int(uniform * 101) / 100 if purpose is Purpose.ACCEPT else uniform

    monkeypatch.setattr(Streams, "uniform", grid)
    assert rare_pvalue() < 1e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["temperature", "penalties and cuts", "constraint", "min new tokens"])
def test_no_random_number_decides_twice(monkeypatch: pytest.MonkeyPatch, name: str, rule: str) -> None:
    used: list[tuple[object, ...]] = []
    right = Streams.uniform

    def noted(self: Streams, *key: Any, **start: Any) -> float:
        used.append((self.seed, self.request, *key, *start.values()))
        return right(self, *key, **start)

    monkeypatch.setattr(Streams, "uniform", noted)
    target, draft = TableModel.random(4, seed=1), TableModel.random(4, seed=101)
    decoder = SpeculativeDecoder(target, draft, None, 4, tuple(FOUR[name].ends))
    for seed in range(20):
        # Of the drafters of one generation too: the draft model's and one that decides in other ways.
        for drafter in (None, TableDrafter(draft, SamplingParams(1.0), fixed=lambda text: text[-1] == 2)):
            used.clear()
            list(
                decoder.generate(
                    PROMPT,
                    replace(FOUR[name].params, seed=seed, no_repeat_ngram_size=0),
                    max_new_tokens=30,
                    num_draft_tokens=4,
                    verification=rule,
                    constraint=constraint_of(FOUR[name], 4),
                    drafter=drafter,
                )
            )
            assert len(set(used)) == len(used)
