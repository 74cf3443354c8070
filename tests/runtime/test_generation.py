"""A generation as its consumer sees it: cancellation, several at once, timings."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.errors import InvalidInputError
from paceline.kv_cache import KVCache
from paceline.sampling import SamplingParams
from paceline.testing import TableModel

VOCAB = 7
PROMPT = [3, 1, 4]


def make_decoder(target: TableModel | None = None) -> SpeculativeDecoder:
    return SpeculativeDecoder(target or TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2), None, VOCAB)


def live_caches(decoder: SpeculativeDecoder) -> int:
    assert isinstance(decoder.target, TableModel)
    assert isinstance(decoder.draft, TableModel)
    return len(decoder.target.live_caches) + len(decoder.draft.live_caches)


def test_nothing_runs_before_the_first_step_and_caches_live_until_the_end() -> None:
    decoder = make_decoder()
    generation = decoder.generate(PROMPT, max_new_tokens=9)
    assert live_caches(decoder) == 0
    first = next(generation)
    assert live_caches(decoder) == 1  # the first token needs the target's prefill alone
    assert len(first.token_ids) == 1
    next(generation)
    assert live_caches(decoder) == 2
    list(generation)
    assert live_caches(decoder) == 0
    assert generation.finish_reason == "length"
    with pytest.raises(StopIteration):
        next(generation)


def test_the_draft_model_reads_a_prompt_where_the_text_can_bring_that_in() -> None:
    """Reading a long prompt takes longer than drafting saves on a few tokens; a fixed number of tokens asks for it."""
    for prompt, length, number, read in ((50, 8, "auto", False), (50, 8, 2, True), (20, 40, "auto", True)):
        decoder = make_decoder()
        assert isinstance(decoder.draft, TableModel)
        generation = decoder.generate(
            [3] * prompt, SamplingParams(seed=1), num_draft_tokens=number, max_new_tokens=length
        )
        next(generation)
        next(generation)
        (cache,) = decoder.draft.live_caches
        assert bool(cache.length) == read
        generation.close()


def test_the_cache_is_no_larger_than_the_text_can_get() -> None:
    decoder = make_decoder()
    assert isinstance(decoder.target, TableModel)
    generation = decoder.generate(PROMPT, max_new_tokens=9)
    next(generation)
    assert [cache.max_length for cache in decoder.target.live_caches] == [len(PROMPT) + 9]


def test_close_cancels_and_frees_the_caches() -> None:
    decoder = make_decoder()
    generation = decoder.generate(PROMPT, max_new_tokens=30)
    emitted = [*next(generation).token_ids, *next(generation).token_ids]
    generation.close()
    assert live_caches(decoder) == 0
    assert list(generation) == []
    assert list(generation.token_ids) == emitted
    assert generation.finish_reason is None
    assert generation.stats.rounds == 1
    generation.close()


def test_close_before_the_first_step() -> None:
    decoder = make_decoder()
    generation = decoder.generate(PROMPT)
    generation.close()
    assert list(generation) == []


def test_leaving_a_with_block_closes() -> None:
    decoder = make_decoder()
    with decoder.generate(PROMPT, max_new_tokens=30) as generation:
        next(generation)
        next(generation)
    assert live_caches(decoder) == 0


class _Gate(TableModel):
    """Waits inside forward until it is let through."""

    def __init__(self) -> None:
        super().__init__([[0.0, 1.0], [1.0, 0.0]])
        self.entered, self.passed = threading.Event(), threading.Event()

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> Any:
        self.entered.set()
        assert self.passed.wait(30)
        return super().forward(tokens, cache, num_logits)


def test_close_from_another_thread_takes_effect_after_the_step_in_hand() -> None:
    target = _Gate()
    generation = SpeculativeDecoder(target, None, None, 2).generate([0], max_new_tokens=50)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: list(generation))
        assert target.entered.wait(30)
        generation.close()
        target.passed.set()
        steps = running.result(30)
    assert len(steps) == 1
    assert len(target.live_caches) == 0


def test_a_second_step_beside_the_one_in_hand_is_refused() -> None:
    target = _Gate()
    generation = SpeculativeDecoder(target, None, None, 2).generate([0], max_new_tokens=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: list(generation))
        assert target.entered.wait(30)
        with pytest.raises(InvalidInputError, match="in the middle of a step"):
            next(generation)
        target.passed.set()
        assert sum(len(step.token_ids) for step in running.result(30)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_threads_over_one_pair_write_what_each_would_write_alone(temperature: float) -> None:
    decoder = make_decoder()

    def text(seed: int) -> tuple[int, ...]:
        prompt = [seed % VOCAB, 1, 2]
        generation = decoder.generate(prompt, SamplingParams(temperature, seed=seed), max_new_tokens=50)
        return tuple(token for step in generation for token in step.token_ids)

    alone = [text(seed) for seed in range(24)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(text, range(24))) == alone
    assert live_caches(decoder) == 0


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_counters_agree_with_the_steps(num_draft_tokens: int, seed: int) -> None:
    generation = make_decoder().generate(
        PROMPT, SamplingParams(1.0, seed=seed), max_new_tokens=40, num_draft_tokens=num_draft_tokens
    )
    steps = list(generation)
    stats = generation.stats
    assert stats.prompt_tokens == 3
    assert stats.new_tokens == len(generation.token_ids) == sum(len(step.token_ids) for step in steps) == 40
    assert stats.rounds == len(steps) - 1
    assert stats.proposed == sum(step.num_proposed for step in steps)
    assert stats.accepted == sum(step.num_accepted for step in steps)
    assert stats.new_tokens == 1 + stats.rounds + stats.accepted
    for index, (proposed, accepted) in enumerate(zip(stats.proposed_at, stats.accepted_at, strict=False)):
        assert proposed == sum(step.num_proposed > index for step in steps)
        assert accepted == sum(step.num_accepted > index for step in steps)
    assert all(len(step.token_ids) == step.num_accepted + 1 for step in steps)


def test_steps_report_stats_as_they_come() -> None:
    generation = make_decoder().generate(PROMPT, max_new_tokens=40)
    assert generation.stats.new_tokens == 0
    for step in generation:
        assert generation.stats.new_tokens == len(generation.token_ids)
        assert generation.token_ids[-len(step.token_ids) :] == step.token_ids


class _Slow(TableModel):
    """Each run takes at least 2 ms of its own time."""

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> Any:
        time.sleep(0.002)
        cache.seconds += 0.002
        return super().forward(tokens, cache, num_logits)


def test_the_timings_divide_the_time_inside_the_generator() -> None:
    target = _Slow.random(VOCAB, seed=1)
    started = time.perf_counter()
    slept = 0.0
    generation = make_decoder(target).generate(PROMPT, max_new_tokens=12)
    for _ in generation:
        time.sleep(0.01)  # the consumer's time
        slept += 0.01
    wall = time.perf_counter() - started
    stats = generation.stats
    assert stats.prefill_s >= 0.002
    assert stats.prefill_s + stats.decode_s <= wall - slept
    assert stats.target_s >= 0.002 * stats.rounds
    assert stats.draft_s > 0
    assert stats.target_s + stats.draft_s + stats.overhead_s == pytest.approx(stats.decode_s)
    assert stats.ms_per_token == pytest.approx(1000 * stats.decode_s / 11)


def test_plain_decoding_takes_no_draft_time() -> None:
    decoder = make_decoder()
    generation = decoder.generate(PROMPT, max_new_tokens=12, num_draft_tokens=0)
    list(generation)
    assert generation.stats.draft_s == 0
    assert generation.stats.block_efficiency == 1
