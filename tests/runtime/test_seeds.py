"""The same seed, settings and drafts give the same text, whatever ran before or runs beside it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.generation import Generation
from paceline.sampling import SamplingParams
from paceline.testing import ScriptedDrafter, TableModel

from .law_cases import PROMPT, RULES


def text_of(generation: Generation) -> list[int]:
    return [token for step in generation for token in step.token_ids]


def test_case_26_the_seed_decides_the_text() -> None:
    target, draft = TableModel.random(5, seed=0), TableModel.random(5, seed=100)
    decoder = SpeculativeDecoder(target, draft, None, 5)

    def text(seed: int | None) -> tuple[int, ...]:
        generation = decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=20)
        return tuple(token for step in generation for token in step.token_ids)

    texts = [text(seed) for seed in range(100)]
    assert len(set(texts)) > 95
    assert texts == [text(seed) for seed in range(100)]
    assert text(None) != text(None)


def test_case_26_interleaved_generations_do_not_touch_each_other() -> None:
    target, draft = TableModel.random(5, seed=0), TableModel.random(5, seed=100)
    decoder = SpeculativeDecoder(target, draft, None, 5)
    alone = [list(decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=30)) for seed in (1, 2)]
    one, two = (decoder.generate(PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=30) for seed in (1, 2))
    steps: list[list[Any]] = [[], []]
    for pair in itertools.zip_longest(one, two):
        for kept, step in zip(steps, pair, strict=True):
            kept += [step] if step else []
    assert steps == alone


def seeded(decoder: SpeculativeDecoder, seed: int, request: int = 0, **arguments: Any) -> Generation:
    sampling = SamplingParams(1.0, frequency_penalty=0.3, seed=seed)
    return decoder.generate(PROMPT, sampling, max_new_tokens=24, num_draft_tokens=3, request=request, **arguments)


@pytest.mark.parametrize("rule", RULES)
def test_case_26_generations_beside_and_before_change_nothing(rule: str) -> None:
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(6, seed=2), None, 6)
    alone = [text_of(seeded(decoder, seed, verification=rule)) for seed in range(8)]
    # All at once, in an order that changes from step to step.
    running = dict(enumerate(seeded(decoder, seed, verification=rule) for seed in range(8)))
    rng, texts = np.random.default_rng(0), [list[int]() for _ in range(8)]
    while running:
        seed = int(rng.choice(list(running)))
        if (step := next(running[seed], None)) is None:
            del running[seed]
        else:
            texts[seed] += step.token_ids
    assert texts == alone
    # Behind ones that were interrupted anywhere, with the same seed and others.
    for seed, num_steps in itertools.product(range(3), range(5)):
        with seeded(decoder, seed + 1, verification=rule) as interrupted:
            for _ in range(num_steps):
                next(interrupted)
        with seeded(decoder, seed, verification=rule) as interrupted:
            for _ in range(num_steps):
                next(interrupted)
        assert text_of(seeded(decoder, seed, verification=rule)) == alone[seed]


def test_case_26_requests_with_one_seed_have_texts_of_their_own() -> None:
    decoder = SpeculativeDecoder(TableModel.random(6, seed=1), TableModel.random(6, seed=2), None, 6)
    texts = [tuple(text_of(seeded(decoder, 5, request))) for request in range(60)]
    assert len(set(texts)) > 55
    assert texts == [tuple(text_of(seeded(decoder, 5, request))) for request in range(60)]


def test_the_same_seed_gives_the_same_text_with_a_deterministic_drafter_and_without() -> None:
    target = TableModel.random(6, seed=1)
    decoder = SpeculativeDecoder(target, None, None, 6)
    for seed in range(20):
        sampling = SamplingParams(1.1, top_p=0.95, repetition_penalty=1.2, seed=seed)
        plain = text_of(decoder.generate(PROMPT, sampling, max_new_tokens=20))
        for script in ([0] * 30, [*PROMPT, *plain], [*PROMPT, *plain[:7], *[5] * 20]):
            for num_draft_tokens in (1, 4):
                drafter = ScriptedDrafter(script)
                generation = decoder.generate(
                    PROMPT, sampling, max_new_tokens=20, num_draft_tokens=num_draft_tokens, drafter=drafter
                )
                assert text_of(generation) == plain
