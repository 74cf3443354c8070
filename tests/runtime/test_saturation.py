"""Speculation is turned down where the cores are busy: drafted rows that cost as much as passes bring nothing.

The models tell their own seconds, by a price list instead of a clock, so nothing here depends on the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline import AsyncEngine, Generation, SamplingParams, SpeculativeDecoder
from paceline.costs import Costs, CostsByLength
from paceline.kv_cache import KVCache
from paceline.testing import TableModel

VOCAB = 40
# Seconds by rows. Idle cores wait for memory, so that further rows cost little; busy ones compute each of them.
CALM, BUSY = Costs(0.2, (1.0, 1.1, 1.2, 1.3)), Costs(0.9, (1.0, 2.0, 3.0, 4.0))
PROFILE = CostsByLength((0,), (CALM,), "profile x")
TOKENS = 300


class PricedModel(TableModel):
    """Runs that take what a price list says: the calm one before some length of the text, the busy one from there on.

    Attributes:
        busy_from: that length.
    """

    def __init__(self, logits: Any, *, is_draft: bool) -> None:
        super().__init__(logits, max_length=512)
        self.busy_from = 1 << 30
        self._is_draft = is_draft

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> Any:
        prices = CALM if cache.length < self.busy_from else BUSY
        before = cache.seconds
        logits = super().forward(tokens, cache, num_logits)
        cache.seconds = before + (prices.draft_step if self._is_draft else prices.target(len(tokens)))
        return logits


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    """A pair whose draft is right about four times of five."""
    rng = np.random.default_rng(5)
    table = 2 * rng.standard_normal((VOCAB,) * 3)
    target, draft = (
        PricedModel(table + noise * rng.standard_normal(table.shape), is_draft=noise > 0) for noise in (0.0, 0.5)
    )
    return SpeculativeDecoder(target, draft, None, VOCAB)


def write(
    decoder: SpeculativeDecoder, *, busy_from: int = 1 << 30, seeded: bool = False
) -> list[list[tuple[int, int]]]:
    """Four texts at once; of each, the length and the number of drafted tokens at every round."""
    for model in (decoder.target, decoder.draft):
        assert isinstance(model, PricedModel)
        model.busy_from = busy_from

    async def rounds(engine: AsyncEngine, work: Generation) -> list[tuple[int, int]]:
        found, length = [], 2
        async with engine.run(work) as steps:
            async for step in steps:
                found.append((length, step.num_proposed))
                length += len(step.token_ids)
        return found[1:]  # the first is the prompt's

    async def all_texts() -> list[list[tuple[int, int]]]:
        async with AsyncEngine() as engine:
            works = [
                decoder.generate(
                    [first, 2],
                    SamplingParams(seed=3 if seeded else None),  # greedy, so that every run is the same
                    max_new_tokens=TOKENS,
                    drafter="draft-model",
                )
                for first in range(4)
            ]
            return list(await asyncio.gather(*(rounds(engine, work) for work in works)))

    return asyncio.run(asyncio.wait_for(all_texts(), 60))


def drafted(texts: list[list[tuple[int, int]]], since: int = 0) -> float:
    """Drafted tokens in a round, of rounds behind so many tokens."""
    return float(np.mean([proposed for text in texts for length, proposed in text if length >= since]))


@pytest.mark.parametrize("costs", [None, PROFILE], ids=["measured", "profile"])
def test_texts_that_begin_on_busy_cores_draft_next_to_nothing(
    decoder: SpeculativeDecoder, costs: CostsByLength | None
) -> None:
    decoder = SpeculativeDecoder(decoder.target, decoder.draft, None, VOCAB, costs=costs)
    assert drafted(write(decoder)) > 1
    busy = write(decoder, busy_from=0)
    assert drafted(busy) < 0.2
    assert drafted(busy, since=50) < 0.1
    assert drafted(write(decoder)) > 1  # and again, once the cores are idle


@pytest.mark.parametrize("costs", [None, PROFILE], ids=["measured", "profile"])
def test_texts_on_their_way_stop_drafting_when_the_cores_become_busy(
    decoder: SpeculativeDecoder, costs: CostsByLength | None
) -> None:
    decoder = SpeculativeDecoder(decoder.target, decoder.draft, None, VOCAB, costs=costs)
    texts = write(decoder, busy_from=100)
    before = drafted([[one for one in text if one[0] < 100] for text in texts])
    assert before > 1
    assert drafted(texts, since=200) < 0.15 * before


def test_a_seed_keeps_its_plans(decoder: SpeculativeDecoder) -> None:
    """They must come again, so the seconds have no say: such texts go on drafting."""
    assert write(decoder, seeded=True) == write(decoder, busy_from=0, seeded=True)
