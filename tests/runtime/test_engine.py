"""Many generations at once, on table models: the texts are those of the library, and every limit is driven."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from paceline import AsyncEngine, Generation, PrefixCache, SamplingParams, SpeculativeDecoder, Step
from paceline.errors import DeadlineError, EngineClosedError, InvalidInputError, MemoryBudgetError, OverloadError
from paceline.scheduler import Job, Outcome, Scheduler
from paceline.scoring import Scoring
from paceline.testing import TableModel

_T = TypeVar("_T")
VOCAB = 12


class SlowModel(TableModel):
    """Its forwards wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(0).standard_normal((VOCAB,) * 3), max_length=64)
        self.gate = threading.Event()
        self.num_forwards = 0
        self.closes_after: int | None = None

    def forward(self, *args: Any, **options: Any) -> Any:
        self.num_forwards += 1
        assert self.gate.wait(10)
        if self.num_forwards == self.closes_after:
            self.gate.clear()
        return super().forward(*args, **options)


def pair(**options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(
        TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2), None, VOCAB, (11,), **options
    )


def start(decoder: SpeculativeDecoder, request: int = 0, **options: Any) -> Generation:
    sampling = SamplingParams(temperature=1.0, seed=5)
    return decoder.generate([1 + request % 7, 2], sampling, request=request, **{"max_new_tokens": 40} | options)


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


@pytest.mark.parametrize("max_running", [1, 3, 16])
def test_sixteen_texts_at_once_are_those_of_the_library(max_running: int) -> None:
    decoder = pair()

    async def ask(engine: AsyncEngine, request: int) -> list[Step]:
        return [step async for step in engine.run(start(decoder, request))]

    async def all_of_them() -> list[list[Step]]:
        async with AsyncEngine(max_running=max_running) as engine:
            texts = await asyncio.gather(*(ask(engine, request) for request in range(16)))
            assert engine.stats.ended["finished"] == 16
            assert engine.stats.new_tokens == sum(len(step.token_ids) for steps in texts for step in steps)
            assert engine.stats.accepted == sum(step.num_accepted for steps in texts for step in steps)
            assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_bytes) == (0, 0, 0)
            return texts

    assert run(all_of_them()) == [list(start(decoder, request)) for request in range(16)]


def test_leaving_the_stream_ends_the_work_and_frees_the_caches() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def leave() -> int:
        async with AsyncEngine() as engine:
            async with engine.run(start(decoder)) as steps:
                model.closes_after = 1
                model.gate.set()
                await anext(steps)
            model.gate.set()  # the second round, which is on its way perhaps
            await engine.drain()
            assert engine.stats.ended["cancelled"] == 1
            assert len([step async for step in steps]) <= 1  # what is left, without an error
            assert len(model.live_caches) == 0
            return model.num_forwards

    assert run(leave()) <= 2


def test_a_waiting_text_can_be_cancelled() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def cancel() -> None:
        async with AsyncEngine(max_running=1) as engine:
            first, second = engine.run(start(decoder, 0)), engine.run(start(decoder, 1))
            second.cancel()
            model.gate.set()
            assert [step async for step in second] == []
            assert [step async for step in first]
            assert (engine.stats.ended["cancelled"], engine.stats.ended["finished"]) == (1, 1)

    run(cancel())


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def fill() -> None:
        async with AsyncEngine(max_running=1, max_waiting=2) as engine:
            streams = [engine.run(start(decoder, request)) for request in range(3)]
            with pytest.raises(OverloadError, match="of at most 1 and 2") as caught:
                engine.run(start(decoder, 3))
            assert 0 < caught.value.retry_after_s <= 60
            with pytest.raises(OverloadError):
                engine.run_all([start(decoder, 4), start(decoder, 5)])
            with pytest.raises(InvalidInputError, match="only 3 may run and wait"):
                engine.run_all([start(decoder, request) for request in range(4)])
            assert engine.stats.refused == 3
            model.gate.set()
            for stream in streams:
                assert [step async for step in stream][-1].finish_reason == "length"
            assert [step async for step in engine.run(start(decoder, 3))]

    run(fill())


def test_memory_is_reserved_before_a_text_begins() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)
    assert start(decoder, max_new_tokens=10).kv_bytes == 12
    assert pair().generate([1, 2], max_new_tokens=10).kv_bytes == 24
    assert pair().generate([1, 2], max_new_tokens=10, num_draft_tokens=0).kv_bytes == 12
    assert pair().generate([1, 2], max_new_tokens=1000).kv_bytes == 2 * 64

    async def budget() -> None:
        async with AsyncEngine(kv_budget=30) as engine:
            with pytest.raises(MemoryBudgetError, match=r"up to 32 bytes, but the budget for all texts is 30"):
                engine.run(start(decoder, max_new_tokens=30))
            streams = [engine.run(start(decoder, request, max_new_tokens=10)) for request in range(3)]
            while engine.stats.running < 2:
                await asyncio.sleep(0.01)
            assert (engine.stats.kv_bytes, engine.stats.waiting) == (24, 1)
            model.gate.set()
            for stream in streams:
                assert [step async for step in stream][-1].finish_reason == "length"
            assert engine.stats.kv_bytes == 0

    run(budget())


@pytest.mark.parametrize("max_running", [1, 2])
def test_a_deadline_ends_a_text_that_runs_or_waits(max_running: int) -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def late() -> None:
        async with AsyncEngine(max_running=max_running) as engine:
            streams = [engine.run(start(decoder, request), timeout_s=0.05) for request in range(2)]
            await asyncio.sleep(0.1)
            model.gate.set()
            for stream in streams:
                with pytest.raises(DeadlineError, match="deadline passed"):
                    _ = [step async for step in stream]
            assert engine.stats.ended["expired"] == 2

    run(late())


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_bad_timeout_is_refused(bad: Any) -> None:
    async def ask() -> None:
        async with AsyncEngine() as engine:
            with pytest.raises(InvalidInputError, match="timeout_s"):
                engine.run(start(pair()), timeout_s=bad)
            await engine.drain()  # nothing is counted as open

    run(ask())


def test_an_error_ends_its_own_text_alone() -> None:
    decoder = pair()

    def refuse(new_tokens: Any) -> None:
        if len(new_tokens) > 3:
            raise InvalidInputError("no further")

    async def both() -> None:
        async with AsyncEngine() as engine:
            bad = engine.run(start(decoder, constraint=refuse))
            good = engine.run(start(decoder, 1))
            with pytest.raises(InvalidInputError, match="no further"):
                _ = [step async for step in bad]
            assert [step async for step in good] == list(start(decoder, 1))
            assert engine.stats.ended["failed"] == 1

    run(both())


def test_draining_lets_texts_end_and_takes_nothing_new() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def drain() -> None:
        engine = AsyncEngine(max_running=1)
        streams = [engine.run(start(decoder, request)) for request in range(2)]
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        with pytest.raises(EngineClosedError):
            engine.run(start(decoder))
        assert not draining.done()
        model.gate.set()
        await draining
        for stream in streams:
            assert [step async for step in stream][-1].finish_reason == "length"
        await engine.aclose()
        assert not engine.alive

    run(drain())


def test_what_outlasts_a_drain_is_told_so() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def drain() -> None:
        engine = AsyncEngine(max_running=1)
        streams = [engine.run(start(decoder, request)) for request in range(2)]
        draining = asyncio.create_task(engine.drain(0.01))
        await asyncio.sleep(0.05)
        model.gate.set()
        await draining
        for stream in streams:
            with pytest.raises(EngineClosedError, match="before the text was complete"):
                assert len([step async for step in stream]) <= 1
        assert engine.stats.ended["cancelled"] == 2
        bad: tuple[Any, ...] = (-1, True, "1", math.inf, math.nan)
        for given in bad:
            with pytest.raises(InvalidInputError, match="timeout_s must be None or a number of seconds from 0, got"):
                await engine.drain(given)
        await engine.aclose()

    run(drain())


def test_closing_cancels_what_runs_and_what_waits() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)

    async def close() -> None:
        engine = AsyncEngine(max_running=1)
        streams = [engine.run(start(decoder, request)) for request in range(2)]
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0.01)
        model.gate.set()
        await closing
        assert sum([len([step async for step in stream]) for stream in streams]) <= 1
        assert engine.stats.ended["cancelled"] == 2

    run(close())


def test_an_event_loop_that_is_gone_ends_its_texts() -> None:
    model = SlowModel()
    decoder = SpeculativeDecoder(model, None, None, VOCAB)
    engine = AsyncEngine()

    async def ask() -> None:
        engine.run(start(decoder))

    asyncio.run(ask())
    model.gate.set()
    asyncio.run(engine.drain())
    assert engine.stats.ended["cancelled"] == 1
    asyncio.run(engine.aclose())


def test_the_prefix_cache_serves_all_texts() -> None:
    decoder = pair(prefixes=PrefixCache(1000))
    prompt = [int(token) for token in np.arange(30) % 10]

    async def ask() -> None:
        async with AsyncEngine() as engine:
            for _ in range(2):
                _ = [step async for step in engine.run(decoder.generate(prompt, max_new_tokens=4))]
            assert engine.stats.cached_tokens == 29

    run(ask())


def test_a_text_is_scored_like_its_own_generation() -> None:
    decoder = pair()
    generation = decoder.generate([1, 2, 3], max_new_tokens=40, logprobs=2, num_draft_tokens=0)
    generated = [entry for step in generation for entry in step.logprobs or ()]

    async def score() -> list[Any]:
        async with AsyncEngine() as engine:
            scoring = Scoring(decoder, [1, 2, 3, *generation.token_ids], 2)
            return [entry async for piece in engine.run(scoring) for entry in piece]

    scored = run(score())
    assert [entry.token_id for entry in scored] == [2, 3, *generation.token_ids]
    for one, other in zip(scored[2:], generated, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("tokens", "words"), [([], "no token"), ([1] * 65, "65 tokens"), ([12], "outside the vocabulary"), (["a"], "'a'")]
)
def test_what_cannot_be_scored(tokens: list[Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Scoring(pair(), tokens)


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"max_running": 0}, "max_running"), ({"max_waiting": -1}, "max_waiting"), ({"kv_budget": 0}, "kv_budget")],
)
def test_bad_limits(limits: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        AsyncEngine(**limits)


class Letters:
    """Work that gives so many letters."""

    kv_bytes = 3

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def finished(self) -> bool:
        return self.left == 0

    def close(self) -> None:
        self.left = 0

    def advance(self) -> str:
        self.left -= 1
        return "abc"[self.left % 3]


def test_rounds_take_turns_and_a_newcomer_joins_them() -> None:
    scheduler = Scheduler(max_running=3, max_waiting=8, kv_budget=None)
    order: list[str] = []

    def submit(name: str, count: int) -> None:
        scheduler.submit([Job(Letters(count), lambda step: order.append(name), lambda outcome, error: None)])

    submit("a", 4)
    submit("b", 3)
    scheduler.turn()
    submit("c", 2)
    submit("d", 1)
    while scheduler.num_running:
        scheduler.turn()
    assert "".join(order) == "abacbacbad"


class InPieces(TableModel):
    """Reads three tokens of a prompt at a time, and takes down how many it was fed."""

    prefill_rows = 3

    def __init__(self) -> None:
        super().__init__(np.random.default_rng(4).standard_normal((VOCAB,) * 3), max_length=64)
        self.fed: list[int] = []

    def forward(self, tokens: Any, *args: Any, **options: Any) -> Any:
        self.fed.append(len(tokens))
        return super().forward(tokens, *args, **options)


LONG = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    decoder = SpeculativeDecoder(InPieces(), None, None, VOCAB)
    scheduler = Scheduler(max_running=2, max_waiting=8, kv_budget=None)
    order: list[str] = []

    def submit(name: str, prompt: list[int]) -> None:
        work = decoder.generate(prompt, max_new_tokens=4)
        scheduler.submit([Job(work, lambda step: order.append(name), lambda outcome, error: None)])

    submit("long", LONG)  # pieces of 3, 3, 3, and the 2 that are left
    submit("short", LONG[:2])
    while scheduler.num_running or scheduler.num_waiting:
        scheduler.turn()
    assert order == ["short"] * 3 + ["long", "short", "long", "long", "long"]


def test_pieces_of_a_prompt_change_no_text_and_are_no_steps() -> None:
    model = InPieces()
    whole = SpeculativeDecoder(TableModel(model._table, max_length=64), None, None, VOCAB)
    sampling = SamplingParams(temperature=1.0, seed=3)
    expected = list(whole.generate(LONG, sampling, max_new_tokens=6))
    in_pieces = SpeculativeDecoder(model, None, None, VOCAB).generate(LONG, sampling, max_new_tokens=6)
    assert list(in_pieces) == expected
    assert model.fed == [3, 3, 3, 2, 1, 1, 1, 1, 1]
    assert in_pieces.stats.new_tokens == 6
    for length in (1, 2, 3, 4):  # three tokens at most are read in one go
        model.fed.clear()
        next(SpeculativeDecoder(model, None, None, VOCAB).generate(LONG[:length], max_new_tokens=2))
        assert model.fed == ([length] if length < 4 else [3, 1])


def test_a_prompt_that_is_given_up_in_the_middle_is_not_read_to_its_end_and_what_was_read_is_kept() -> None:
    model = InPieces()
    decoder = SpeculativeDecoder(model, None, None, VOCAB, prefixes=PrefixCache(1 << 20))
    scheduler = Scheduler(max_running=1, max_waiting=8, kv_budget=None)
    prompt = [place % VOCAB for place in range(40)]
    ends: list[Outcome] = []
    job = Job(decoder.generate(prompt), lambda step: None, lambda outcome, error: ends.append(outcome))
    scheduler.submit([job])
    for _ in range(7):
        scheduler.turn()
    scheduler.cancel(job)
    scheduler.turn()
    assert ends == ["cancelled"]
    assert model.fed == [3] * 7
    again = decoder.generate(prompt, max_new_tokens=1)
    next(again)
    assert again.stats.cached_tokens == 21
    assert sum(model.fed) == 40


def test_a_text_that_fits_waits_behind_one_that_does_not_yet() -> None:
    """The queue keeps its order, so that a large text is not passed over for ever."""
    scheduler = Scheduler(max_running=8, max_waiting=8, kv_budget=6)
    ends: list[str] = []

    def job(name: str, kv_bytes: int, count: int) -> Job:
        work = Letters(count)
        work.kv_bytes = kv_bytes
        return Job(work, lambda step: None, lambda outcome, error: ends.append(name))

    scheduler.submit([job("first", 3, 3), job("large", 6, 1), job("small", 3, 1)])
    for _ in range(5):
        scheduler.turn()
    assert ends == ["first", "large", "small"]
    assert scheduler.kv_reserved == 0


def test_time_spent_waiting_for_work_costs_nothing() -> None:
    scheduler = Scheduler(max_running=1, max_waiting=0, kv_budget=None)
    used = time.thread_time()
    threading.Timer(0.2, scheduler.stop).start()
    assert not scheduler.wait()
    assert time.thread_time() - used < 0.1
