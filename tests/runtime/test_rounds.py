"""What a round tells of the target: how sure it was of each token that was emitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.generation import Generation
from paceline.planner import Planner
from paceline.rounds import play_round
from paceline.row_sampler import RowSampler
from paceline.sampling import SamplingParams
from paceline.streams import Streams
from paceline.testing import ScriptedDrafter, TableModel

from .law_cases import PROMPT

VOCAB = 6


def largest_probability(target: TableModel, text: list[int]) -> float:
    exponentials = np.exp(target.next_logits(text)[:VOCAB].astype(np.float64))
    return float(exponentials.max() / exponentials.sum())


@pytest.mark.parametrize("num_right", range(4))
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.5, seed=3), SamplingParams(logit_bias={1: 99.0})]
)
@pytest.mark.parametrize("num_top_logprobs", [None, 2])
def test_confidences_are_the_targets_for_what_was_emitted(
    params: SamplingParams, num_right: int, num_top_logprobs: int | None
) -> None:
    target = TableModel.random(VOCAB, seed=5)
    sampler = RowSampler(params, vocab_size=VOCAB, num_prompt_tokens=len(PROMPT))
    streams = Streams.from_seed(params.seed, 0)

    def play(drafter: ScriptedDrafter | None, limit: int, wanted: bool) -> tuple[list[int], tuple[float, ...]]:
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + limit:
            played = play_round(
                tokens,
                len(PROMPT) + limit - len(tokens),
                3,
                target=target,
                cache=target.new_cache(64),
                drafter=drafter,
                sampler=sampler,
                vocab_size=VOCAB,
                chance=streams,
                num_top_logprobs=num_top_logprobs,
                wants_confidences=wanted,
            )
            if drafter:
                break
        return tokens, played.confidences

    right, none = play(None, 4, wanted=False)
    assert none == ()
    script = right[: len(PROMPT) + num_right] + [(token + 1) % VOCAB for token in right[len(PROMPT) + num_right :]]
    tokens, confidences = play(ScriptedDrafter(script), 4, wanted=True)
    assert tokens == right[: len(tokens)]
    assert len(tokens) == len(PROMPT) + num_right + 1
    expected = [largest_probability(target, tokens[:length]) for length in range(len(PROMPT), len(tokens))]
    assert confidences == pytest.approx(expected, rel=1e-5)


def test_the_planner_of_a_generation_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, ...]] = []
    end = Planner.end

    def noting(self: Planner, *args: Any, confidences: tuple[float, ...], **kwargs: Any) -> None:
        seen.append(confidences)
        end(self, *args, confidences=confidences, **kwargs)

    monkeypatch.setattr(Planner, "end", noting)
    target = TableModel.random(VOCAB, seed=5)
    decoder = SpeculativeDecoder(target, TableModel.random(VOCAB, seed=6), None, VOCAB)
    list(decoder.generate(PROMPT, max_new_tokens=12, drafter="prompt-lookup"))
    assert seen
    assert not any(seen)  # of what copies stand, they tell little
    seen.clear()
    generation: Generation = decoder.generate(PROMPT, max_new_tokens=12)
    steps = list(generation)[1:]
    assert [len(confidences) for confidences in seen] == [step.num_accepted + 1 for step in steps]
    text = [*PROMPT, *generation.token_ids]
    told = [confidence for confidences in seen for confidence in confidences]
    expected = [largest_probability(target, text[:length]) for length in range(len(PROMPT) + 1, len(text))]
    assert told == pytest.approx(expected, rel=1e-5)
