from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.errors import ContextLengthError, InvalidInputError, ModelOutputError
from paceline.generation import Generation
from paceline.kv_cache import KVCache
from paceline.sampling import SamplingParams
from paceline.streams import Chance, Purpose
from paceline.testing import ScriptedDrafter, TableCache, TableModel
from paceline.verify import Draft

VOCAB = 7
PROMPT = [3, 1, 4]


def chain(text: Sequence[int], vocab: int = 32, max_length: int = 64) -> TableModel:
    """A model whose greedy text is `text`: each token, none of them twice, leads to the next."""
    table = np.zeros((vocab, vocab))
    for before, after in itertools.pairwise(text):
        table[before, after] = 5
    return TableModel(table, max_length=max_length)


def run(generation: Generation) -> list[int]:
    return [token for step in generation for token in step.token_ids]


def plain(target: TableModel, prompt: Sequence[int], max_new_tokens: int, vocab: int | None = None) -> list[int]:
    """The greedy text, from the table alone."""
    text = list(prompt)
    for _ in range(max_new_tokens):
        text.append(int(target.next_logits(text)[:vocab].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
@pytest.mark.parametrize("drafts", ["right", "wrong", "self", "other", "half"])
def test_cases_23_24_greedy_speculative_text_is_greedy_plain_text(num_draft_tokens: int, drafts: str) -> None:
    target = TableModel.random(VOCAB, seed=1)
    other = TableModel.random(VOCAB, seed=2)
    expected = plain(target, PROMPT, 40)
    text = PROMPT + expected
    drafters: dict[str, Callable[[], ScriptedDrafter | None]] = {
        "right": lambda: ScriptedDrafter(text),
        "wrong": lambda: ScriptedDrafter.always_wrong(text, VOCAB),
        "half": lambda: ScriptedDrafter([t if i % 2 else (t + 1) % VOCAB for i, t in enumerate(text)]),
        "self": lambda: None,
        "other": lambda: None,
    }
    decoder = SpeculativeDecoder(target, target if drafts == "self" else other, None, VOCAB)
    assert run(decoder.generate(PROMPT, max_new_tokens=40, num_draft_tokens=0)) == expected
    generation = decoder.generate(
        PROMPT, max_new_tokens=40, num_draft_tokens=num_draft_tokens, drafter=drafters[drafts]()
    )
    assert run(generation) == expected
    rate = generation.stats.acceptance_rate
    assert rate is not None
    assert {"right": rate == 1, "self": rate == 1, "wrong": rate == 0}.get(drafts, rate < 1)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_case_7_a_prompt_of_one_token(num_draft_tokens: int) -> None:
    target, draft = TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)
    assert run(decoder.generate([5], max_new_tokens=12, num_draft_tokens=num_draft_tokens)) == plain(target, [5], 12)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.2, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_case_29_after_every_round_the_caches_hold_the_text_but_its_last_token(
    num_draft_tokens: int, sampling: SamplingParams
) -> None:
    target, draft = TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)
    text = list(PROMPT)
    rejected = 0
    for step in decoder.generate(PROMPT, sampling, max_new_tokens=30, num_draft_tokens=num_draft_tokens):
        text += step.token_ids
        rejected += step.num_proposed - step.num_accepted
        (cache,) = target.live_caches
        assert cache.tokens == text[:-1]
        assert cache.length == len(text) - 1
        for draft_cache in draft.live_caches:
            # After full acceptance the draft has not seen its own last token yet.
            missing = len(text) - 1 - draft_cache.length
            assert missing in ((0, 1) if step.num_proposed else (1, 2))
            assert draft_cache.tokens == text[: len(text) - 1 - missing]
        # The live cache gives the logits of a fresh prefill.
        fresh = target.forward(text, target.new_cache(64), 1).tolist()
        if cache.room:
            assert target.forward(text[-1:], cache, 1).tolist() == fresh
            cache.rollback(len(text) - 1)
    assert (rejected > 0) == (num_draft_tokens > 0)


class _OneWayCache(TableCache):
    def rollback(self, length: int) -> None:
        raise InvalidInputError("This model's state cannot be taken back.")


class _OneWayModel(TableModel):
    def new_cache(self, max_length: int) -> TableCache:
        cache = _OneWayCache(max_length)
        self.live_caches.add(cache)
        return cache


def test_case_29_a_cache_that_cannot_roll_back_is_refused_before_the_first_token() -> None:
    target = _OneWayModel([[0, 1], [1, 0]])
    decoder = SpeculativeDecoder(target, target, None, 2)
    generation = decoder.generate([1], max_new_tokens=3)
    with pytest.raises(InvalidInputError, match="cannot be taken back"):
        next(generation)
    assert run(decoder.generate([1], max_new_tokens=3, num_draft_tokens=0)) == [0, 1, 0]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 6])
def test_case_8_an_end_token_inside_an_accepted_draft_ends_the_text(num_draft_tokens: int) -> None:
    target = chain([1, 10, 11, 30, 12, 13])
    decoder = SpeculativeDecoder(target, target, None, 32, eos_token_ids=(30,))
    generation = decoder.generate([1], num_draft_tokens=num_draft_tokens)
    steps = list(generation)
    assert generation.token_ids == (10, 11, 30)
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish_reason == generation.finish_reason == "stop"
    assert generation.stats.new_tokens == 3


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("max_new_tokens", [2, 3, 4, 20])
def test_case_9_a_custom_stop_token_also_at_the_last_position(num_draft_tokens: int, max_new_tokens: int) -> None:
    target = chain([1, 10, 11, 12, 13, 14])
    decoder = SpeculativeDecoder(target, target, None, 32)
    generation = decoder.generate(
        [1], max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens, stop_token_ids=[12]
    )
    assert run(generation) == [10, 11, 12][:max_new_tokens]
    assert generation.finish_reason == ("length" if max_new_tokens == 2 else "stop")


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5, 6])
@pytest.mark.parametrize(("max_new_tokens", "reason", "length"), [(5, "stop", 3), (3, "stop", 3), (2, "length", 2)])
def test_case_10_a_stop_inside_the_limit_wins_over_the_limit(
    num_draft_tokens: int, max_new_tokens: int, reason: str, length: int
) -> None:
    target = chain([1, 10, 11, 31, 20, 21, 22])
    decoder = SpeculativeDecoder(target, target, None, 32, eos_token_ids=(31,))
    generation = decoder.generate([1], max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens)
    assert (len(run(generation)), generation.finish_reason) == (length, reason)


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_the_limit_is_met_exactly(max_new_tokens: int, num_draft_tokens: int) -> None:
    target = TableModel.random(VOCAB, seed=1)
    decoder = SpeculativeDecoder(target, target, None, VOCAB)
    generation = decoder.generate(PROMPT, max_new_tokens=max_new_tokens, num_draft_tokens=num_draft_tokens)
    assert run(generation) == plain(target, PROMPT, max_new_tokens)
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 9])
@pytest.mark.parametrize("prompt_length", [1, 5, 9])
def test_a_text_that_fills_the_context_ends_with_length(prompt_length: int, num_draft_tokens: int) -> None:
    target = TableModel.random(VOCAB, seed=1, max_length=10)
    decoder = SpeculativeDecoder(target, target, None, VOCAB)
    prompt = [2] * prompt_length
    generation = decoder.generate(prompt, max_new_tokens=100, num_draft_tokens=num_draft_tokens)
    assert run(generation) == plain(target, prompt, 10 - prompt_length)
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_case_17_padded_ids_are_never_emitted(num_draft_tokens: int, sampling: SamplingParams) -> None:
    # Target 12 wide, draft 10 wide, tokenizer 9: the padding has by far the largest logits in both.
    rng = np.random.default_rng(0)
    target_table, draft_table = rng.standard_normal((12,) * 3), rng.standard_normal((10,) * 3)
    target_table[..., 9:] = draft_table[..., 9:] = 50
    target, draft = TableModel(target_table), TableModel(draft_table)
    decoder = SpeculativeDecoder(target, draft, None, 9)
    tokens = run(decoder.generate([1], sampling, max_new_tokens=40, num_draft_tokens=num_draft_tokens))
    assert max(tokens) < 9
    if sampling.greedy:
        assert tokens == plain(target, [1], 40, vocab=9)


def test_case_17_a_draft_narrower_than_the_vocabulary_stops_at_an_id_it_does_not_know() -> None:
    target = chain([1, 2, 3, 9, 4, 5, 6, 7])
    draft = TableModel(np.zeros((9, 9)))
    decoder = SpeculativeDecoder(target, draft, None, 32)
    steps = list(decoder.generate([1], max_new_tokens=7, num_draft_tokens=1))
    assert [token for step in steps for token in step.token_ids] == [2, 3, 9, 4, 5, 6, 7]
    assert [step.num_proposed for step in steps] == [0, 1, 1, 0, 0, 0, 0]
    assert run(decoder.generate([9], max_new_tokens=2)) == [4, 5]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_case_18_temperature_zero_and_almost_zero_take_the_largest_logit(num_draft_tokens: int) -> None:
    target, draft = TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)
    for temperature in (0.0, 1e-6):
        sampling = SamplingParams(temperature, seed=1)
        tokens = run(decoder.generate(PROMPT, sampling, max_new_tokens=30, num_draft_tokens=num_draft_tokens))
        assert tokens == plain(target, PROMPT, 30)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 8])
def test_case_19_a_text_that_outgrows_the_draft_goes_on_plainly(
    num_draft_tokens: int, sampling: SamplingParams
) -> None:
    target, draft = TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2, max_length=16)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)
    position, proposals = len(PROMPT), {}
    for step in decoder.generate(PROMPT, sampling, max_new_tokens=40, num_draft_tokens=num_draft_tokens):
        proposals[position] = step.num_proposed
        position += len(step.token_ids)
        assert len(draft.live_caches) <= 1
    assert position == len(PROMPT) + 40
    assert all(num == 0 for start, num in proposals.items() if start > 16)
    assert any(num > 0 for start, num in proposals.items() if 3 < start <= 16)


def test_case_19_a_prompt_longer_than_the_drafts_context_is_decoded_plainly() -> None:
    target, draft = TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2, max_length=4)
    generation = SpeculativeDecoder(target, draft, None, VOCAB).generate(
        [1, 2, 3, 4, 5], max_new_tokens=10, num_draft_tokens=3
    )
    assert run(generation) == plain(target, [1, 2, 3, 4, 5], 10)
    assert generation.stats.proposed == 0


class _Silent(ScriptedDrafter):
    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        return Draft((), None if len(tokens) % 2 else [])


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
def test_case_34_a_drafter_that_proposes_nothing_is_plain_decoding(sampling: SamplingParams) -> None:
    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    silent = decoder.generate(PROMPT, sampling, max_new_tokens=9, num_draft_tokens=4, drafter=_Silent([]))
    assert run(silent) == run(decoder.generate(PROMPT, sampling, max_new_tokens=9))
    assert silent.stats.acceptance_rate is None
    assert silent.stats.block_efficiency == 1


def test_case_34_a_prompt_that_is_empty_or_fills_the_context_is_refused() -> None:
    target = TableModel.random(VOCAB, seed=1, max_length=8)
    decoder = SpeculativeDecoder(target, target, None, VOCAB)
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        decoder.generate([])
    for length in (8, 9):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.* holds 8 "):
            decoder.generate([1] * length)
    assert len(run(decoder.generate([1] * 7))) == 1


class _Broken(TableModel):
    """Returns `value` in every logit of the row at a position."""

    def __init__(self, position: int, value: float) -> None:
        super().__init__(np.zeros((VOCAB, VOCAB)))
        self._position, self._value = position, value

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> Any:
        logits = super().forward(tokens, cache, num_logits)
        for row in range(num_logits):
            if cache.length - num_logits + row + 1 == self._position:
                logits[row] = self._value
        return logits


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_case_25_bad_logits_end_the_generation_with_their_position(
    role: str, sampling: SamplingParams, value: float
) -> None:
    good, broken = TableModel(np.zeros((VOCAB, VOCAB))), _Broken(8, value)
    target, draft = (broken, good) if role == "target" else (good, broken)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)
    generation = decoder.generate(PROMPT, sampling, max_new_tokens=20, num_draft_tokens=3)
    with pytest.raises(ModelOutputError, match=f"The {role} model's logits for position 8 "):
        run(generation)
    assert list(generation) == []
    assert len(good.live_caches) == len(broken.live_caches) == 0


class _Faulty(ScriptedDrafter):
    def __init__(self, draft: Any) -> None:
        super().__init__([])
        self._draft = draft

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        return cast(Draft, self._draft)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft((1, 2, 3), None), "3 tokens where at most 2"),
        (Draft((VOCAB,), None), f"id {VOCAB}, outside"),
        (Draft((-1,), None), "id -1, outside"),
        (Draft((1,), [np.ones(VOCAB + 1)]), r"shape \(8,\); expected a float array of shape \(7,\)"),
        (None, "proposed None; expected a paceline.Draft"),
        (((1,), None), "expected a paceline.Draft"),
        (Draft((1.0,), None), "expected integer ids"),  # type: ignore[arg-type]
        (Draft((1,), [[1 / 7] * 7]), "as .*; expected a float array"),  # type: ignore[list-item]
        (Draft((1,), [np.ones(VOCAB, np.int64)]), "int64 of shape"),
        (Draft((1,), [np.ones(VOCAB)]), "their sum is 7"),
        (Draft((1,), [np.zeros(VOCAB)]), "their sum is 0"),
        (Draft((1,), [np.full(VOCAB, np.nan)]), "their sum is nan"),
        (Draft((1,), [np.array([-0.5, 1.5, 0, 0, 0, 0, 0])]), "the smallest is -0.5"),
        (Draft((1,), [np.eye(VOCAB)[2]]), "that of the drawn id 0"),
    ],
)
def test_a_faulty_drafter_is_told_so(draft: Any, message: str) -> None:
    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    with pytest.raises(InvalidInputError, match=message):
        run(decoder.generate(PROMPT, num_draft_tokens=2, drafter=_Faulty(draft)))


def test_the_probabilities_of_a_drafter_may_come_as_one_array() -> None:
    class Uniform(ScriptedDrafter):
        def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
            probs = np.full((num_draft_tokens, VOCAB), 1 / VOCAB)
            drawn = (
                chance.draw(row, len(tokens) + i, Purpose.DRAFT, round_start=len(tokens)) for i, row in enumerate(probs)
            )
            return Draft(tuple(drawn), probs)  # type: ignore[arg-type]

    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    generation = decoder.generate(
        PROMPT, SamplingParams(1.0, seed=3), max_new_tokens=9, num_draft_tokens=2, drafter=Uniform([])
    )
    assert len(run(generation)) == 9
    assert generation.stats.proposed > 0


def test_a_drafter_cannot_change_the_text() -> None:
    class Meddling(ScriptedDrafter):
        def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
            assert isinstance(tokens, tuple)
            return super().propose(tokens, num_draft_tokens, chance)

    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    run(decoder.generate(PROMPT, num_draft_tokens=2, drafter=Meddling([0] * 20)))
    with pytest.raises(InvalidInputError, match="a float, lacks seconds, prefill, propose, rollback"):
        decoder.generate(PROMPT, num_draft_tokens=2, drafter=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="one of 'draft-model', 'prompt-lookup', 'hybrid', got 'draft'"):
        decoder.generate(PROMPT, num_draft_tokens=2, drafter="draft")
    with pytest.raises(InvalidInputError, match="drafter='hybrid' needs a draft model"):
        decoder.generate(PROMPT, drafter="hybrid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": [1, VOCAB]}, f"prompt holds id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ({"prompt": [-1]}, "prompt holds id -1"),
        ({"prompt": [1.5]}, "prompt must be text or integer token ids"),
        ({"prompt": "text"}, "no tokenizer"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be 'auto' or an integer of at least 0.*got -1"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens must be 'auto' or an integer"),
        ({"num_draft_tokens": True}, "num_draft_tokens must be 'auto' or an integer"),
        ({"num_draft_tokens": "fast"}, "num_draft_tokens must be 'auto' or an integer .* got 'fast'"),
        ({"num_draft_tokens": 2, "drafter": "hybrid"}, "drafter='hybrid' plans its drafts"),
        ({"num_draft_tokens": 12}, "=12 needs one position more.* has 12; use at most 11"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": True}, "max_new_tokens must be"),
        ({"stop_token_ids": [VOCAB]}, f"stop_token_ids holds id {VOCAB}"),
        ({"stop": ["x"]}, "Stop strings need a tokenizer"),
        ({"stop": "x"}, "stop must be a sequence of strings"),
        ({"stop": [""]}, "stop must be a sequence of strings that are not empty"),
        ({"sampling": {"temperature": 1}}, "sampling must be SamplingParams"),
        ({"draft_sampling": SamplingParams(seed=1)}, "draft_sampling takes no seed"),
        ({"draft_sampling": 1.0}, "draft_sampling must be SamplingParams"),
        ({"draft_sampling": SamplingParams(), "drafter": ScriptedDrafter([])}, "draft_sampling is for the draft model"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments: dict[str, Any], message: str) -> None:
    target = TableModel.random(VOCAB, seed=1, max_length=12)
    decoder = SpeculativeDecoder(target, target, None, VOCAB)
    with pytest.raises(InvalidInputError, match=message):
        decoder.generate(**{"prompt": PROMPT, **arguments})


def test_drafting_without_anything_to_draft_with_is_refused_and_plain_is_the_default() -> None:
    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    with pytest.raises(InvalidInputError, match="num_draft_tokens=2, but there is nothing to draft with"):
        decoder.generate(PROMPT, num_draft_tokens=2)
    assert decoder.generate(PROMPT).stats.proposed == 0


def test_the_largest_allowed_number_of_draft_tokens_works() -> None:
    target = TableModel.random(VOCAB, seed=1, max_length=12)
    decoder = SpeculativeDecoder(target, target, None, VOCAB)
    assert run(decoder.generate([1], num_draft_tokens=11)) == plain(target, [1], 11)


@pytest.mark.parametrize("vocab_size", [0, VOCAB + 1])
def test_a_vocabulary_that_the_target_cannot_score_is_refused(vocab_size: int) -> None:
    with pytest.raises(InvalidInputError, match=f"target's {VOCAB} logits, got {vocab_size}"):
        SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, vocab_size)


def test_numpy_ids_are_ids() -> None:
    target = TableModel.random(VOCAB, seed=1)
    decoder = SpeculativeDecoder(target, None, None, VOCAB, eos_token_ids=(np.int64(6),))  # type: ignore[arg-type]
    assert run(decoder.generate(np.array(PROMPT), max_new_tokens=5)) == run(  # type: ignore[arg-type]
        decoder.generate(PROMPT, max_new_tokens=5)
    )
