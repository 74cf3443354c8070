"""Plans leave the law alone: enumerated round by round, and over whole generations that adapt as they go."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from paceline.costs import ASSUMED_COSTS, Costs
from paceline.decoder import SpeculativeDecoder
from paceline.planner import Planner
from paceline.sampling import SamplingParams
from paceline.streams import Chance
from paceline.testing import TableModel, enumerate_law, every_way

PROMPT = (1, 2, 0, 1, 2)
Law = dict[tuple[int, ...], float]
# Drafts that cost next to nothing, some, and nearly too much.
COSTS = {"cheap": Costs(0.01, (1.0, 1.01)), "some": ASSUMED_COSTS, "dear": Costs(0.3, (1.0, 1.3))}


def total_variation(one: Law, other: Law) -> float:
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in one.keys() | other.keys()) / 2


@pytest.mark.parametrize("draft_temperature", [None, 0.5, 0.0])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("costs", COSTS)
def test_stopping_by_confidence_keeps_the_law_of_a_round(
    costs: str, rule: str, draft_temperature: float | None
) -> None:
    target = TableModel.random(4, seed=21, dtype=np.float64)
    draft = TableModel.random(4, seed=22, dtype=np.float64, scale=2.0)
    sampling = SamplingParams(0.9, top_p=0.95)
    drafted: set[int] = set()

    class Noting(Planner):
        def end(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("rounds are enumerated one by one")

        def worth_drawing(self, confidence: float) -> bool:
            worth = super().worth_drawing(confidence)
            drafted.add(len(self._confidences))
            return worth

    law = enumerate_law(
        target,
        PROMPT,
        4,
        sampling,
        num_draft_tokens=3,
        draft=draft,
        draft_sampling=None if draft_temperature is None else SamplingParams(draft_temperature),
        rule=rule,
        new_planner=lambda: Noting(costs=COSTS[costs]),
    )
    assert total_variation(law, enumerate_law(target, PROMPT, 4, sampling)) < 1e-9
    assert len(drafted) > 1  # some rounds drafted more than others


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("drafter", ["draft-model", "hybrid", "prompt-lookup"])
@pytest.mark.parametrize("costs", COSTS)
def test_a_generation_that_adapts_keeps_the_law(costs: str, drafter: str, rule: str) -> None:
    target = TableModel.random(3, seed=31, dtype=np.float64)
    draft = TableModel.random(3, seed=32, dtype=np.float64)
    decoder = SpeculativeDecoder(target, draft, None, 3, costs=COSTS[costs])
    sampling = SamplingParams(0.8)

    def run(chance: Chance) -> tuple[int, ...]:
        generation = decoder.generate(PROMPT, sampling, max_new_tokens=5, drafter=drafter, verification=rule)
        generation._chance = chance
        return tuple(token for step in generation for token in step.token_ids)

    law: Law = {}
    for text, probability in every_way(run):
        law[text] = law.get(text, 0) + probability
    assert total_variation(law, enumerate_law(target, PROMPT, 5, sampling)) < 1e-9


@pytest.mark.parametrize("drafter", [None, "draft-model", "prompt-lookup"])
def test_greedy_text_is_plain_decodings(drafter: str | None) -> None:
    target, draft = TableModel.random(7, seed=1, max_length=256), TableModel.random(7, seed=2, max_length=256)
    decoder = SpeculativeDecoder(target, draft, None, 7)
    plain, planned = (
        decoder.generate(PROMPT, max_new_tokens=200, num_draft_tokens=k, drafter=d)
        for k, d in ((0, None), ("auto", drafter))
    )
    list(plain), list(planned)
    assert planned.token_ids == plain.token_ids
    assert planned.stats.proposed > 0


def test_a_seed_plans_without_the_clock() -> None:
    target, draft = TableModel.random(7, seed=1, max_length=256), TableModel.random(7, seed=2, max_length=256)
    decoder = SpeculativeDecoder(target, draft, None, 7)

    def steps() -> list[Any]:
        return list(decoder.generate(PROMPT, SamplingParams(1.0, seed=4), max_new_tokens=200))

    assert steps() == steps()


def test_the_hybrid_copies_where_the_text_repeats_itself() -> None:
    text = [1, 2, 3, 4, 5, 6] * 12
    table = np.zeros((7, 7))
    for before, after in itertools.pairwise(text):
        table[before, after] = 9
    target, draft = TableModel(table, max_length=256), TableModel.random(7, seed=2, max_length=256)
    decoder = SpeculativeDecoder(target, draft, None, 7, costs=ASSUMED_COSTS)
    efficiency = {}
    for drafter in ("draft-model", "hybrid"):
        generation = decoder.generate(text[:12], max_new_tokens=60, drafter=drafter)
        assert [token for step in generation for token in step.token_ids] == text[12:72]
        efficiency[drafter] = generation.stats.block_efficiency or 0.0
    assert efficiency["hybrid"] > 4
    assert efficiency["draft-model"] < 2
