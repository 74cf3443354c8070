"""Logprobs of what was emitted: the target's own, the same as plain decoding's, cut where the ids are cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.generation import Generation
from paceline.logprobs import TokenLogprobs
from paceline.sampling import SamplingParams
from paceline.testing import ScriptedDrafter, TableModel

from .conftest import byte_level_tokenizer
from .law_cases import FOUR, PROMPT, RULES
from .reference import Setting, constraint_of

NUM_TOP = 3


def assert_logprobs(generation: Generation, target: TableModel, vocab: int, num_top: int = NUM_TOP) -> None:
    """Those of every emitted token are the softmax of the target's logits over the common vocabulary."""
    text, entries = list(PROMPT), list[TokenLogprobs]()
    for step in generation:
        assert step.logprobs is not None
        assert len(step.logprobs) == len(step.token_ids)
        entries += step.logprobs
        for token, entry in zip(step.token_ids, step.logprobs, strict=True):
            values = target.next_logits(text)[:vocab].astype(np.float64).tolist()
            normaliser = math.log(math.fsum(map(math.exp, values)))
            best = sorted(range(vocab), key=lambda i: (-values[i], i))[:num_top]
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(values[token] - normaliser, abs=1e-6)
            assert [i for i, _ in entry.top] == best
            assert [logprob for _, logprob in entry.top] == pytest.approx(
                [values[i] - normaliser for i in best], abs=1e-6
            )
            text.append(token)
    assert generation.logprobs == tuple(entries)
    assert generation.token_ids == tuple(entry.token_id for entry in entries)


@pytest.mark.parametrize("num_draft_tokens", range(5))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*FOUR, "forced run"])
def test_they_are_the_targets_for_every_setting(name: str, rule: str, num_draft_tokens: int) -> None:
    forced_run = Setting(SamplingParams(0.9), allowed=lambda new: {(2, 0, 3)[len(new) % 3]} if len(new) < 7 else None)
    setting = FOUR.get(name, forced_run)
    target, draft = TableModel.random(6, seed=1), TableModel.random(4, seed=2)
    decoder = SpeculativeDecoder(target, draft, None, 4, tuple(setting.ends))
    # n-grams of so few ids run out.
    num_tokens = 3 if setting.params.no_repeat_ngram_size == 2 else 9
    for seed in range(4):
        generation = decoder.generate(
            PROMPT,
            replace(setting.params, seed=seed),
            max_new_tokens=num_tokens,
            num_draft_tokens=num_draft_tokens,
            verification=rule,
            constraint=constraint_of(setting, 4),
            logprobs=NUM_TOP,
        )
        assert_logprobs(generation, target, 4)


TOKENIZER = byte_level_tokenizer([("h", "a"), ("Ġ", "ha")])
EOS = TOKENIZER.eos_token_ids[0]


def text_model(ids: Sequence[int]) -> TableModel:
    """A model that mostly continues `ids[0]` with the rest; pairs of ids must not repeat."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((TOKENIZER.vocab_size,) * 3).astype(np.float32)
    for before, last, following in zip([0, *ids], ids, ids[1:], strict=False):
        logits[before, last, following] = 25
    return TableModel(logits)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return TOKENIZER.encode("> ha! ha? 😀 end")


@pytest.fixture(scope="module")
def model(ids: list[int]) -> TableModel:
    return text_model(ids)


CUTS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["a? 😀"]},
    "stop string within a token": {"stop": ["? ", "zz"]},
    "two stop strings": {"stop": [" e", "!x", "😀 "]},
    "limit": {"max_new_tokens": 6},
    "limit in a character": {"max_new_tokens": 8},
    "to the end": {},
}


def outcome(generation: Generation) -> tuple[Any, ...]:
    steps = list(generation)
    assert "".join(step.text for step in steps) == generation.text
    assert [t for step in steps for t in step.token_ids] == list(generation.token_ids)
    assert [e for step in steps for e in step.logprobs or ()] == list(generation.logprobs or ())
    return generation.token_ids, generation.text, generation.finish_reason, generation.logprobs


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", CUTS)
def test_case_11_ids_text_and_logprobs_are_cut_as_in_plain_decoding(
    cut: str, num_draft_tokens: int, ids: list[int], model: TableModel
) -> None:
    """A drafter of fixed proposals draws plain decoding's numbers, so the whole outcome is the same."""
    decoder = SpeculativeDecoder(model, None, TOKENIZER, TOKENIZER.vocab_size, (EOS,))
    half = [token if i % 4 else 7 for i, token in enumerate(ids)]
    late = SamplingParams(min_new_tokens=6)
    for sampling, script in itertools.product((SamplingParams(), SamplingParams(0.7, seed=4), late), (ids, half)):
        arguments: dict[str, Any] = {"max_new_tokens": len(ids) - 1, "logprobs": 2, **CUTS[cut]}
        plain = outcome(decoder.generate(">", sampling, **arguments))
        drafted = decoder.generate(
            ">", sampling, num_draft_tokens=num_draft_tokens, drafter=ScriptedDrafter(script), **arguments
        )
        assert outcome(drafted) == plain
        assert plain[3] is not None
        assert len(plain[3]) == len(plain[0]) < len(ids)
        assert all(len(entry.top) == 2 for entry in plain[3])
        assert len(plain[0]) >= sampling.min_new_tokens
        if "stop" in arguments and sampling is not late:
            assert plain[2] == "stop"


@pytest.mark.parametrize("num_draft_tokens", range(5))
def test_case_11_an_end_token_within_a_block_has_the_last_logprob(num_draft_tokens: int) -> None:
    target = TableModel.random(6, seed=1)
    decoder = SpeculativeDecoder(target, target, None, 6, (5,))
    plain = decoder.generate(PROMPT, max_new_tokens=20, num_draft_tokens=0, logprobs=0)
    list(plain)
    for end in set(plain.token_ids):
        stopped = decoder.generate(
            PROMPT, max_new_tokens=20, num_draft_tokens=num_draft_tokens, logprobs=0, stop_token_ids=[end]
        )
        list(stopped)
        length = plain.token_ids.index(end) + 1
        assert stopped.token_ids == plain.token_ids[:length]
        assert stopped.logprobs == (plain.logprobs or ())[:length]


def test_nobody_asks_nobody_gets() -> None:
    target = TableModel.random(4, seed=1)
    generation = SpeculativeDecoder(target, target, None, 4).generate(PROMPT, max_new_tokens=5)
    assert all(step.logprobs is None for step in generation)
    assert generation.logprobs is None


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_as_many_as_asked_the_lowest_id_first_among_equals(num_top: int) -> None:
    target = TableModel(np.zeros((4, 4)))
    generation = SpeculativeDecoder(target, target, None, 4).generate(PROMPT, max_new_tokens=5, logprobs=num_top)
    for step in generation:
        for entry in step.logprobs or ():
            assert [i for i, _ in entry.top] == list(range(num_top))
            assert [logprob for _, logprob in entry.top] == pytest.approx([math.log(0.25)] * num_top)
