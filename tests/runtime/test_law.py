"""The law of the text: exact by enumeration, by chi-squared over real generations, and red for every mutation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline import testing, verify
from paceline.decoder import SpeculativeDecoder
from paceline.drafters import Drafter
from paceline.sampling import FloatArray, SamplingParams, distribution
from paceline.streams import Chance, Purpose, Streams
from paceline.testing import ScriptedDrafter, TableModel, enumerate_law, every_way
from paceline.verify import Draft, DraftProbs, TargetProbs, Verdict

from .conftest import naive_distribution_of

Law = dict[tuple[int, ...], float]

PROMPT = (1, 2)
SAMPLINGS = {
    "temperature": SamplingParams(0.8),
    "top-k": SamplingParams(1.3, top_k=2),
    "top-p": SamplingParams(1.0, top_p=0.7),
    "all": SamplingParams(1.5, top_k=3, top_p=0.9),
}


def reference_law(target: TableModel, num_tokens: int, sampling: SamplingParams, vocab: int) -> Law:
    """Chain rule over the naive distribution: no code of paceline but the table."""
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        longer: Law = {}
        for text, reached in law.items():
            probs = naive_distribution_of(target.next_logits([*PROMPT, *text])[:vocab].tolist(), sampling)
            longer.update({(*text, token): reached * p for token, p in enumerate(probs) if p > 0})
        law = longer
    return law


def total_variation(one: Law, other: Law) -> float:
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in one.keys() | other.keys()) / 2


def models(vocab: int, *, seed: int = 0, draft_width: int | None = None) -> tuple[TableModel, TableModel]:
    target = TableModel.random(vocab, seed=seed, dtype=np.float64)
    return target, TableModel.random(draft_width or vocab, seed=seed + 100, dtype=np.float64)


DRAFTS: dict[str, dict[str, Any]] = {
    "model": {},
    # Case 1: a greedy draft under a sampling target.
    "greedy model": {"draft_sampling": SamplingParams()},
    # Case 32: a draft at its own temperature and truncation.
    "other temperature": {"draft_sampling": SamplingParams(2.0, top_k=2)},
    "script": {"new_drafter": lambda: ScriptedDrafter([0, 0, 1, 2, 0, 1, 2, 0])},
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("vocab", "num_draft_tokens"), [(3, 1), (3, 3), (4, 2), (4, 3), (5, 1), (5, 2)])
def test_the_law_is_the_targets(vocab: int, num_draft_tokens: int, sampling: str, drafts: str) -> None:
    target, draft = models(vocab, seed=vocab)
    law = enumerate_law(
        target,
        PROMPT,
        num_draft_tokens + 1,
        SAMPLINGS[sampling],
        num_draft_tokens=num_draft_tokens,
        draft=draft,
        **DRAFTS[drafts],
    )
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    expected = reference_law(target, num_draft_tokens + 1, SAMPLINGS[sampling], vocab)
    assert total_variation(law, expected) < 1e-9
    plain = enumerate_law(target, PROMPT, num_draft_tokens + 1, SAMPLINGS[sampling])
    assert total_variation(plain, expected) < 1e-9


def test_the_law_is_the_targets_for_the_largest_case() -> None:
    target, draft = models(5, seed=50)
    sampling = SamplingParams(1.1, top_p=0.95)
    law = enumerate_law(target, PROMPT, 4, sampling, num_draft_tokens=3, draft=draft)
    assert total_variation(law, reference_law(target, 4, sampling, 5)) < 1e-9


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_case_17_the_law_holds_for_padded_and_narrower_widths(num_draft_tokens: int) -> None:
    # Target 6 wide, common vocabulary 4, draft 3 wide: ids 4 and 5 are padding, id 3 is beyond the draft.
    target, draft = models(6, draft_width=3)
    for sampling in SAMPLINGS.values():
        law = enumerate_law(target, PROMPT, 4, sampling, num_draft_tokens=num_draft_tokens, draft=draft, vocab_size=4)
        assert total_variation(law, reference_law(target, 4, sampling, 4)) < 1e-9
        assert any(3 in text for text in law)


@pytest.mark.parametrize("draft_max_length", [64, 4])
def test_the_whole_generation_has_the_law_of_the_target(draft_max_length: int) -> None:
    """Not round by round: the decoder's own loop, with live caches over several rounds (case 19 with 4 positions)."""
    target, draft = models(3, seed=9)
    draft = TableModel.random(3, seed=109, dtype=np.float64, max_length=draft_max_length)
    decoder = SpeculativeDecoder(target, draft, None, 3)
    sampling = SamplingParams(0.9)

    def run(chance: Chance) -> tuple[int, ...]:
        generation = decoder.generate(PROMPT, sampling, max_new_tokens=4, num_draft_tokens=2)
        generation._chance = chance
        return tuple(token for step in generation for token in step.token_ids)

    law: Law = {}
    for text, probability in every_way(run):
        law[text] = law.get(text, 0) + probability
    assert total_variation(law, reference_law(target, 4, sampling, 3)) < 1e-9


def test_case_32_another_draft_temperature_changes_only_how_much_is_accepted() -> None:
    target, _ = models(4)
    decoder = SpeculativeDecoder(target, target, None, 4)

    def acceptance_rate(draft_sampling: SamplingParams) -> float:
        proposed = accepted = 0
        for seed in range(60):
            sampling = SamplingParams(1.0, seed=seed)
            generation = decoder.generate(PROMPT, sampling, max_new_tokens=20, draft_sampling=draft_sampling)
            for step in generation:
                proposed += step.num_proposed
                accepted += step.num_accepted
        return accepted / proposed

    assert acceptance_rate(SamplingParams(1.0)) == 1
    assert acceptance_rate(SamplingParams(3.0)) < 0.9


# Mutations: each is a published mistake, and each must bend the enumerated law.


def mutate_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio upside down."""
    right = verify.acceptance
    monkeypatch.setattr(verify, "acceptance", lambda target, draft: right(draft, target))


def mutate_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recovered token from the target's row instead of the residual."""
    monkeypatch.setattr(verify, "residual", lambda target_row, draft_row, token, scale=1.0: target_row)


def mutate_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 2: the number that drew the draft token draws the recovered token again."""
    right = testing._Branch._choose

    def choose(self: testing._Branch, key: tuple[int, Purpose, int], edges: Any) -> int:
        if key[1] is Purpose.RECOVER:
            key = next(known for known in self._intervals if known[:2] == (key[0], Purpose.DRAFT))
        return right(self, key, edges)

    monkeypatch.setattr(testing._Branch, "_choose", choose)


def mutate_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target row taken one too early."""
    right = verify.verify_token

    def shifted(
        tokens: Sequence[int], draft_probs: Sequence[DraftProbs], target_probs: TargetProbs, chance: Chance, at: int
    ) -> Verdict:
        return right(tokens, draft_probs, lambda row: target_probs(max(row - 1, 0)), chance, at)

    monkeypatch.setattr(verify, "VERIFICATION_RULES", {"token": shifted})


def mutate_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus token of a fully accepted draft taken from the last drafted row."""
    right = verify.verify_token

    def shifted(
        tokens: Sequence[int], draft_probs: Sequence[DraftProbs], target_probs: TargetProbs, chance: Chance, at: int
    ) -> Verdict:
        last = max(len(tokens) - 1, 0)
        return right(tokens, draft_probs, lambda row: target_probs(min(row, last)), chance, at)

    monkeypatch.setattr(verify, "VERIFICATION_RULES", {"token": shifted})


MUTATIONS = [mutate_swap, mutate_residual, mutate_shared_noise, mutate_row, mutate_bonus]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("num_draft_tokens", [1, 2])
def test_a_mutation_bends_the_law(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], num_draft_tokens: int
) -> None:
    target, draft = models(3)
    expected = reference_law(target, num_draft_tokens + 1, SamplingParams(1.0), 3)

    def distance() -> float:
        law = enumerate_law(
            target, PROMPT, num_draft_tokens + 1, SamplingParams(1.0), num_draft_tokens=num_draft_tokens, draft=draft
        )
        return total_variation(law, expected)

    assert distance() < 1e-9
    mutate(monkeypatch)
    assert distance() > 1e-3


class _FaultyDrafter(ScriptedDrafter):
    """Draws one token from `draw_probs` and submits `submit(token)`."""

    def __init__(self, draw_probs: FloatArray, submit: Callable[[int], Draft]) -> None:
        super().__init__([])
        self._draw_probs = draw_probs
        self._submit = submit

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        return self._submit(chance.draw(self._draw_probs, len(tokens), Purpose.DRAFT, len(tokens)))


DRAFT_PROBS = distribution(np.array([1.0, 0.8, -0.5]), SamplingParams(1.0))
FAULTS: dict[str, tuple[FloatArray, Callable[[int], Draft]]] = {
    "case 1: greedy draft, ratio with its softmax": (np.array([1.0, 0, 0]), lambda x: Draft((x,), [DRAFT_PROBS])),
    "case 3: drawn from rounded probabilities": (np.array([0.5, 0.5, 0.1]), lambda x: Draft((x,), [DRAFT_PROBS])),
    "case 5: a fixed proposal with made-up probabilities": (
        np.array([0, 0, 1.0]),
        lambda x: Draft((x,), [DRAFT_PROBS]),
    ),
    "a drawn token withheld after a look at it": (
        DRAFT_PROBS,
        lambda x: Draft((x,), [DRAFT_PROBS]) if DRAFT_PROBS[x] > 0.3 else Draft((), []),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_that_was_not_drawn_from_its_probabilities_bends_the_law(fault: str) -> None:
    target, _ = models(3)
    expected = reference_law(target, 2, SamplingParams(1.0), 3)

    def distance(new_drafter: Callable[[], Drafter]) -> float:
        law = enumerate_law(target, PROMPT, 2, SamplingParams(1.0), num_draft_tokens=1, new_drafter=new_drafter)
        return total_variation(law, expected)

    assert distance(lambda: _FaultyDrafter(DRAFT_PROBS, lambda x: Draft((x,), [DRAFT_PROBS]))) < 1e-9
    assert distance(lambda: _FaultyDrafter(DRAFT_PROBS, lambda x: Draft((x,), None))) < 1e-9
    assert distance(lambda: _FaultyDrafter(*FAULTS[fault])) > 1e-3


# Real generations, with the streams and the inverse CDF that enumeration replaces.


def chi_squared_pvalue(num_samples: int) -> float:
    """Of the first three tokens together: marginals would miss mistakes in later rows."""
    target, draft = models(4, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, 4)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_samples):
        generation = decoder.generate(
            PROMPT, SamplingParams(1.0, top_p=0.97, seed=seed), max_new_tokens=3, num_draft_tokens=2
        )
        counts[tuple(token for step in generation for token in step.token_ids)] += 1
    law = reference_law(target, 3, SamplingParams(1.0, top_p=0.97), 4)
    assert counts.keys() <= law.keys()
    texts = [text for text in itertools.product(range(4), repeat=3) if law.get(text, 0) * num_samples >= 5]
    observed = [counts[text] for text in texts]
    expected = [law[text] * num_samples for text in texts]
    if (rare := num_samples - sum(expected)) > 1e-6 * num_samples:
        observed.append(num_samples - sum(observed))
        expected.append(rare)
    return float(stats.chisquare(observed, expected).pvalue)


def test_sampled_generations_have_the_law_of_the_target() -> None:
    assert chi_squared_pvalue(20_000) > 1e-3


def test_case_2_shared_noise_between_draft_and_recovered_token_is_seen_in_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Streams.uniform

    def shared(self: Streams, position: int, purpose: Purpose, round_start: int = 0) -> float:
        return right(self, position, Purpose.DRAFT if purpose is Purpose.RECOVER else purpose, 0)

    monkeypatch.setattr(Streams, "uniform", shared)
    assert chi_squared_pvalue(6_000) < 1e-6


def test_case_26_the_seed_decides_the_text() -> None:
    target, draft = models(5)
    decoder = SpeculativeDecoder(target, draft, None, 5)

    def text(seed: int | None) -> tuple[int, ...]:
        generation = decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=20)
        return tuple(token for step in generation for token in step.token_ids)

    texts = [text(seed) for seed in range(100)]
    assert len(set(texts)) > 95
    assert texts == [text(seed) for seed in range(100)]
    assert text(None) != text(None)


def test_case_26_interleaved_generations_do_not_touch_each_other() -> None:
    target, draft = models(5)
    decoder = SpeculativeDecoder(target, draft, None, 5)
    alone = [list(decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=30)) for seed in (1, 2)]
    one, two = (decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=30) for seed in (1, 2))
    steps: list[list[Any]] = [[], []]
    for pair in itertools.zip_longest(one, two):
        for kept, step in zip(steps, pair, strict=True):
            kept += [step] if step else []
    assert steps == alone
