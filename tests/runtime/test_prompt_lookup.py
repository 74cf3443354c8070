from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.drafters.prompt_lookup import PromptLookupDrafter
from paceline.sampling import SamplingParams
from paceline.streams import Chance
from paceline.testing import TableModel, enumerate_law

NEVER = cast(Chance, None)  # a proposal that is looked up draws nothing


def proposal(text: list[int], k: int) -> tuple[int, ...]:
    drafter = PromptLookupDrafter()
    drafter.prefill(text[: len(text) // 2])
    return drafter.propose(text, k, NEVER).tokens


def test_the_longest_match_wins_and_the_latest_among_equals() -> None:
    assert proposal([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2) == (9, 7)  # 1 2 3 is longer than the later 2 3
    assert proposal([2, 3, 9, 0, 2, 3, 8, 5, 2, 3], 2) == (8, 5)
    assert proposal([1, 2, 3, 4], 2) == ()
    assert proposal([5], 2) == ()


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert proposal([4, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)
    assert proposal([7, 7, 7], 4) == (7, 7, 7, 7)


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_a_scan(seed: int) -> None:
    text = np.random.default_rng(seed).integers(3, size=60).tolist()
    drafter = PromptLookupDrafter()
    for end in range(2, len(text)):
        tokens = text[:end]
        lengths = {}
        for start in range(2, end):
            length = 0
            while length < min(start, 32) and tokens[start - 1 - length] == tokens[end - 1 - length]:
                length += 1
            lengths[start] = length
        drafted = drafter.propose(tokens, 1, NEVER).tokens
        recent = [s for s in lengths if lengths[s] >= 2][-16:]
        best = max(recent, key=lambda s: (lengths[s], s), default=None)
        assert drafted == (() if best is None else (tokens[best],))
        assert drafter.match_length == (0 if best is None else lengths[best])


def test_the_text_is_that_of_plain_decoding_with_the_same_seed() -> None:
    target = TableModel.random(4, seed=3, max_length=256)
    decoder = SpeculativeDecoder(target, None, None, 4)
    for sampling in (SamplingParams(), SamplingParams(0.7, seed=5)):
        plain = decoder.generate([1, 2], sampling, max_new_tokens=100)
        looked_up = decoder.generate(
            [1, 2], sampling, max_new_tokens=100, num_draft_tokens=4, drafter=PromptLookupDrafter()
        )
        list(plain), list(looked_up)
        assert looked_up.token_ids == plain.token_ids
        assert looked_up.stats.accepted > 0


def test_the_law_is_the_targets() -> None:
    target = TableModel.random(3, seed=4, dtype=np.float64)
    sampling, prompt = SamplingParams(1.2), [0, 1, 2, 0, 1]
    plain = enumerate_law(target, prompt, 4, sampling)
    law = enumerate_law(target, prompt, 4, sampling, num_draft_tokens=3, new_drafter=PromptLookupDrafter)
    assert sum(abs(law.get(text, 0) - plain.get(text, 0)) for text in law.keys() | plain.keys()) < 1e-9
