"""Published faults with penalties, masks, stops and seeds under speculation, by their number in facts/cases.md."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.generation import Generation
from paceline.row_sampler import RowSampler
from paceline.sampling import SamplingParams
from paceline.streams import Streams
from paceline.testing import ScriptedDrafter, TableModel
from paceline.verify import Draft, Verdict, verify

from .law_cases import FOUR, PARAMS, RULES, law_of, table
from .reference import Setting, constraint_of, naive_distribution_of, naive_logits, reference_law, total_variation

PROMPT = (1, 2, 1)


def text_of(generation: Generation) -> list[int]:
    return [token for step in generation for token in step.token_ids]


def naive_greedy(target: TableModel, prompt: Sequence[int], num_tokens: int, setting: Setting) -> list[int]:
    new: list[int] = []
    while len(new) < num_tokens and not setting.ends & set(new):
        row = naive_logits(target.next_logits([*prompt, *new]).tolist(), prompt, new, setting)
        new.append(max(range(len(row)), key=lambda i: (row[i], -i)))
    return new


GREEDY = {
    "penalties": Setting(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
    "n-grams": Setting(SamplingParams(no_repeat_ngram_size=3)),
    "wanted repetition": Setting(SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.1)),
    "min new tokens": Setting(SamplingParams(min_new_tokens=9, banned_token_ids=(3,)), frozenset({0, 5})),
    "forced and bias": Setting(SamplingParams(forced_token_ids=(6, 6, 0), logit_bias={2: 1.5, 4: -1.5})),
    "constraint": Setting(
        SamplingParams(frequency_penalty=0.4),
        allowed=lambda new: {len(new) % 7} if len(new) % 4 == 3 else {0, 2, 4, 6},
    ),
}


@pytest.mark.parametrize("num_draft_tokens", range(1, 6))
@pytest.mark.parametrize("name", GREEDY)
def test_cases_23_24_greedy_text_depends_neither_on_the_number_nor_on_the_worth_of_drafts(
    name: str, num_draft_tokens: int
) -> None:
    target, setting = table(7, 1), GREEDY[name]
    expected = naive_greedy(target, PROMPT, 30, setting)
    text = [*PROMPT, *expected]
    for draft, drafter in (
        (table(7, 2), None),
        (target, None),
        (None, ScriptedDrafter(text)),
        (None, ScriptedDrafter.always_wrong(text, 7)),
    ):
        decoder = SpeculativeDecoder(target, draft, None, 7, tuple(setting.ends))
        generation = decoder.generate(
            PROMPT,
            setting.params,
            max_new_tokens=30,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            constraint=constraint_of(setting, 7),
        )
        assert text_of(generation) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4])
def test_case_12_an_end_token_in_the_draft_waits_for_the_least_number_of_tokens(
    num_draft_tokens: int, temperature: float
) -> None:
    end = 0
    logits = np.zeros((4, 4))
    logits[:, end] = 6  # what target and draft want most
    target = TableModel(logits)
    for stop_ids, eos in (([end], ()), ([], (end,))):
        decoder = SpeculativeDecoder(target, target, None, 4, eos)
        for seed, drafter in itertools.product(range(20), (None, ScriptedDrafter([2, *[1, end] * 9]))):
            generation = decoder.generate(
                [2],
                SamplingParams(temperature, min_new_tokens=4, seed=seed),
                max_new_tokens=12,
                num_draft_tokens=num_draft_tokens,
                drafter=drafter if num_draft_tokens else None,
                stop_token_ids=stop_ids,
            )
            tokens = text_of(generation)
            assert len(tokens) >= 5
            assert end not in tokens[:4]
            assert (tokens[-1] == end) == (generation.finish_reason == "stop")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
def test_case_13_frequency_penalties_of_both_signs_change_the_text(num_draft_tokens: int, rule: str) -> None:
    target, draft = TableModel.random(8, seed=3, scale=0.5), TableModel.random(8, seed=4, scale=0.5)
    decoder = SpeculativeDecoder(target, draft, None, 8)

    def distinct(penalty: float) -> float:
        texts = [
            text_of(
                decoder.generate(
                    PROMPT,
                    SamplingParams(1.0, frequency_penalty=penalty, seed=seed),
                    max_new_tokens=16,
                    num_draft_tokens=num_draft_tokens,
                    verification=rule,
                )
            )
            for seed in range(20)
        ]
        return float(np.mean([len(set(text)) for text in texts]))

    assert distinct(-2.0) < distinct(0.0) - 1 < distinct(2.0) - 1
    assert distinct(2.0) == 8  # no id comes a third time before all have come


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.8, repetition_penalty=1.7),
        SamplingParams(1.0, presence_penalty=1.1),
        SamplingParams(1.3, frequency_penalty=0.9),
        SamplingParams(1.0, repetition_penalty=0.8, presence_penalty=-0.3, frequency_penalty=1.9, top_p=0.9),
    ],
    ids=["repetition", "presence", "frequency", "all"],
)
def test_case_14_every_row_counts_every_token_before_it_once(params: SamplingParams) -> None:
    logits = np.random.default_rng(0).standard_normal(6)
    prompt, emitted, drafted = [5, 1, 5], [2, 3], [3, 3, 3]
    sampler = RowSampler(params, vocab_size=6, num_prompt_tokens=3)
    for _ in range(2):  # the second time after a rejection
        for row in range(4):
            new = [*emitted, *drafted[:row]]
            expected = naive_distribution_of(naive_logits(logits.tolist(), prompt, new, Setting(params)), params)
            found = sampler.distribution(logits, [*prompt, *emitted], drafted[:row])
            np.testing.assert_allclose(found, expected, atol=1e-12)
        emitted = [*emitted, 3, 4]


def test_case_15_no_setting_is_dropped_under_speculation() -> None:
    """Each changes the law of a speculative text, and an unknown one is refused."""
    free = Setting(SamplingParams(1.0))
    target, draft = table(4, 5), table(4, 105)
    plain = law_of(target, 3, free, num_draft_tokens=2, draft=draft)
    for name, params in PARAMS.items():
        law = law_of(target, 3, Setting(params), num_draft_tokens=2, draft=draft)
        assert total_variation(law, plain) > 1e-3, name
    fields = set(SamplingParams.__dataclass_fields__)
    tried = {
        field for params in PARAMS.values() for field in fields if getattr(params, field) != getattr(free.params, field)
    }
    assert fields - tried == {"min_new_tokens", "seed"}  # these have tests of their own
    with pytest.raises(TypeError, match="mirostat"):
        SamplingParams(mirostat=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("rule", RULES)
def test_case_16_min_p_rules_out_a_drafted_token(rule: str) -> None:
    target = TableModel(np.log([[0.6, 0.3, 0.1]] * 3), dtype=np.float64)
    setting = Setting(SamplingParams(1.0, min_p=0.4))
    for drafts in (
        {"new_drafter": lambda: ScriptedDrafter([2] * 9)},
        {"draft": TableModel(np.log([[0.05, 0.05, 0.9]] * 3), dtype=np.float64), "draft_sampling": SamplingParams(1.0)},
    ):
        law = law_of(target, 3, setting, num_draft_tokens=2, rule=rule, **drafts)
        assert not any(2 in text for text in law)
        assert total_variation(law, reference_law(target, PROMPT, 3, setting)[0]) < 1e-12
        assert law[0, 0, 0] == pytest.approx((2 / 3) ** 3)


@pytest.mark.parametrize("rule", RULES)
def test_case_18_a_temperature_near_zero_is_greedy_for_every_rule_and_setting(rule: str) -> None:
    target, draft = table(4, 6), table(4, 106)
    for name in ("penalties and cuts", "constraint and penalties", "everything"):
        setting = FOUR[name]
        params = {field: getattr(setting.params, field) for field in ("repetition_penalty", "frequency_penalty")}
        laws = [
            law_of(
                target,
                3,
                Setting(SamplingParams(temperature, **params), setting.ends, setting.allowed),
                num_draft_tokens=2,
                draft=draft,
                rule=rule,
            )
            for temperature in (0.0, 1e-6)
        ]
        assert total_variation(*laws) < 1e-9
        assert max(laws[0].values()) == 1


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_case_25_a_bad_row_behind_a_rejection_is_never_looked_at(
    bad: float, rule: str, sampling: SamplingParams
) -> None:
    # The draft's token has no chance, so the rows behind it decide nothing.
    logits = np.full((3, 3), bad)
    logits[0] = [0.0, -np.inf, -np.inf]
    sampler = RowSampler(sampling, vocab_size=3, num_prompt_tokens=0)
    draft = Draft((1, 2), [np.array([0.0, 1.0, 0.0]), np.array([0.0, 0.0, 1.0])])
    assert verify(draft, logits, sampler, [], Streams(1), rule) == Verdict(0, 0)


@pytest.mark.parametrize("num_draft_tokens", range(6))
@pytest.mark.parametrize("place", range(1, 7))
def test_case_30_an_end_token_ends_the_text_wherever_it_falls_in_a_round(place: int, num_draft_tokens: int) -> None:
    """As an accepted row, as the row after a rejection, and as the bonus token."""
    end = 31
    text = [1, 10, 11, 12, 13, 14, 15, 16]
    text[place] = end
    logits = np.zeros((32, 32))
    for before, after in itertools.pairwise(text):
        logits[before, after] = 60
    target = TableModel(logits)
    decoder = SpeculativeDecoder(target, None, None, 32, (end,))
    for wrong in range(len(text)):
        script = [token if i != wrong else 20 for i, token in enumerate(text)]
        for sampling in (SamplingParams(), SamplingParams(1.0, seed=3)):
            generation = decoder.generate(
                [1],
                sampling,
                num_draft_tokens=num_draft_tokens,
                drafter=ScriptedDrafter(script) if num_draft_tokens else None,
            )
            assert text_of(generation) == text[1 : place + 1]
            assert generation.finish_reason == "stop"
