"""Steps of several texts at once, on table models: who shares a pass, and that no text is another one for it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import paceline.strand
from paceline import AsyncEngine, Generation, SamplingParams, SpeculativeDecoder
from paceline.batching import Batchable, Rendezvous
from paceline.errors import DeadlineError, InvalidInputError
from paceline.kv_cache import KVCache
from paceline.model import CausalLM, Feed
from paceline.pass_cost import PassCost
from paceline.scheduler import Job, Outcome, Scheduler
from paceline.strand import Strand, text_time
from paceline.testing import TableModel

VOCAB = 12


class Tables(TableModel):
    """A table model that feeds several caches in a pass, and tells which numbers of rows each pass had."""

    max_batch = 4
    passes: list[tuple[str, tuple[int, ...]]]
    name = "target"
    refuses = False  # passes over several texts

    def forward_all(self, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
        assert 1 <= len(feeds) <= self.max_batch
        assert len({id(feed.cache) for feed in feeds}) == len(feeds)
        if self.refuses:
            raise RuntimeError("this pass does not run")
        if any(token >= VOCAB for feed in feeds for token in feed.tokens):
            raise InvalidInputError("one of them is refused")
        logits = [super(Tables, self).forward(feed.tokens, feed.cache, feed.num_logits) for feed in feeds]
        self.passes.append((self.name, tuple(len(feed.tokens) for feed in feeds)))
        return logits

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        logits = super().forward(tokens, cache, num_logits)
        self.passes.append((self.name, (len(tokens),)))
        return logits


class Pair:
    """A decoder whose models' passes are seen."""

    def __init__(self, *, batched: bool = True, ends: tuple[int, ...] = ()) -> None:
        self.passes: list[tuple[str, tuple[int, ...]]] = []
        self.target, self.draft = Tables.random(VOCAB, seed=1), Tables.random(VOCAB, seed=2)
        self.draft.name = "draft"
        self.target.passes = self.draft.passes = self.passes
        target: CausalLM = Batchable(self.target) if batched else self.target
        draft: CausalLM = Batchable(self.draft, is_draft=True) if batched else self.draft
        self.decoder = SpeculativeDecoder(target, draft, None, VOCAB, ends)

    def start(self, request: int = 0, **options: Any) -> Generation:
        sampling = SamplingParams(temperature=1.0, seed=5)
        prompt = options.pop("prompt", [1 + request % 7, 2])
        return self.decoder.generate(prompt, sampling, request=request, **{"max_new_tokens": 40} | options)


class Ends:
    """Runs jobs in a scheduler without threads of an engine, and takes down how they end."""

    def __init__(self, max_batch: int = 4, max_running: int = 16) -> None:
        self.scheduler = Scheduler(max_running=max_running, max_waiting=64, kv_budget=None, max_batch=max_batch)
        self.ends: dict[int, tuple[Outcome, Exception | None]] = {}
        self.steps: list[int] = []

    def submit(self, *works: Any) -> list[Job]:
        first = len(self.ends) + self.scheduler.num_running + self.scheduler.num_waiting

        def job(work: Any, name: int) -> Job:
            def on_end(outcome: Outcome, error: Exception | None) -> None:
                self.ends[name] = outcome, error

            return Job(work, lambda step: self.steps.append(name), on_end)

        jobs = [job(work, first + index) for index, work in enumerate(works)]
        self.scheduler.submit(jobs)
        return jobs

    def run(self) -> None:
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.scheduler.turn()
        self.scheduler.end()


@pytest.mark.parametrize("max_batch", [2, 4, 6])
def test_texts_of_an_engine_are_those_of_the_library(max_batch: int) -> None:
    pair, plain = Pair(ends=(11,)), Pair(batched=False, ends=(11,))

    async def all_of_them() -> list[list[Any]]:
        async with AsyncEngine(max_batch=max_batch) as engine:
            streams = engine.run_all([pair.start(request) for request in range(16)])
            texts = [[step async for step in stream] for stream in streams]
            assert engine.stats.ended["finished"] == 16
            shared = engine.stats.shared_passes  # whoever is left alone at the end shares none
            assert engine.stats.shared_texts == sum(len(rows) for _, rows in pair.passes[:shared])
            assert {len(rows) for _, rows in pair.passes[shared:]} <= {1}
            assert engine.stats.as_dict()["texts_per_pass"] == engine.stats.shared_texts / shared > 1.5
            return texts

    assert asyncio.run(asyncio.wait_for(all_of_them(), 60)) == [list(plain.start(request)) for request in range(16)]
    assert max(len(rows) for _, rows in pair.passes) == min(max_batch, 4)  # what the engine and the model both take


def test_targets_wait_until_all_have_drafted() -> None:
    pair, run = Pair(), Ends()
    lengths = (1, 3, 2)  # drafted tokens of a round
    run.submit(*(pair.start(request, num_draft_tokens=count) for request, count in enumerate(lengths)))
    run.scheduler.turn()
    assert pair.passes == [("target", (2, 2, 2))]  # the prompts
    pair.passes.clear()
    run.scheduler.turn()
    prompts, *drafts, target = pair.passes
    assert prompts == ("draft", (2, 2, 2))
    assert [len(rows) for name, rows in drafts if name == "draft"] == [3, 2, 1]
    assert target == ("target", (2, 4, 3))
    run.run()


def test_who_shares_a_pass_is_the_same_every_time() -> None:
    seen = []
    for _ in range(2):
        pair, run = Pair(ends=(11,)), Ends()
        run.submit(*(pair.start(request) for request in range(9)))
        run.run()
        seen.append((pair.passes, run.steps))
    assert seen[0] == seen[1]
    assert {len(rows) for _, rows in seen[0][0]} >= {1, 2, 3, 4}


def test_rounds_are_shared_fairly_where_more_run_than_a_pass_takes() -> None:
    pair, run = Pair(), Ends(max_batch=2)
    run.submit(*(pair.start(request, num_draft_tokens=0, max_new_tokens=20) for request in range(5)))
    for _ in range(5):
        run.scheduler.turn()
    assert sorted(run.steps) == sorted([0, 1, 2, 3, 4] * 2)
    run.run()


def test_a_long_prompt_has_a_pass_to_itself() -> None:
    pair, run = Pair(), Ends()
    run.submit(pair.start(0, prompt=[1] * 33), pair.start(1), pair.start(2, prompt=[2] * 32), pair.start(3))
    run.scheduler.turn()
    assert pair.passes == [("target", (2, 32, 2)), ("target", (33,))]  # which the others do not wait for
    run.run()
    assert {outcome for outcome, _ in run.ends.values()} == {"finished"}


def test_an_error_ends_its_own_text_alone() -> None:
    pair, plain, run = Pair(), Pair(batched=False), Ends()

    def refuse(new_tokens: Any) -> None:
        if len(new_tokens) > 3:
            raise InvalidInputError("no further")

    good = [pair.start(request) for request in (1, 2)]
    run.submit(pair.start(0, constraint=refuse), *good)
    run.run()
    assert str(run.ends[0][1]) == "no further"
    assert [run.ends[index][0] for index in range(3)] == ["failed", "finished", "finished"]
    for request, text in enumerate(good, 1):
        alone = plain.start(request)
        list(alone)
        assert text.token_ids == alone.token_ids


def test_a_feed_that_is_refused_ends_its_own_text_alone() -> None:
    """The pass over all is refused for one of them; the others get theirs."""
    model = Tables.random(VOCAB, seed=1)
    model.passes = []
    batchable = Batchable(model)

    def ask(token: int) -> Any:
        def task() -> Any:
            try:
                return batchable.forward([token], batchable.new_cache(8), 1).copy()
            except InvalidInputError as error:
                return str(error)

        return task

    rendezvous = Rendezvous()
    answers = dict(rendezvous.play([ask(1), ask(VOCAB), ask(2)]))
    rendezvous.stop()
    assert "outside the vocabulary" in answers[1]
    for index, token in ((0, 1), (2, 2)):
        assert (answers[index] == model.next_logits([token])).all()


def test_a_pass_that_fails_is_run_one_by_one() -> None:
    pair, plain, run = Pair(), Pair(batched=False), Ends()
    pair.target.refuses = True
    texts = [pair.start(request) for request in range(3)]
    run.submit(*texts)
    run.run()
    for request, text in enumerate(texts):
        alone = plain.start(request)
        list(alone)
        assert text.token_ids == alone.token_ids


def test_a_text_that_is_cancelled_in_the_middle_leaves_the_others_right() -> None:
    pair, plain = Pair(), Pair(batched=False)
    run = Ends()
    texts = [pair.start(request) for request in range(3)]
    jobs = run.submit(*texts)
    run.scheduler.turn()
    run.scheduler.turn()
    run.scheduler.cancel(jobs[1])
    run.run()
    assert [run.ends[index][0] for index in range(3)] == ["finished", "cancelled", "finished"]
    for request in (0, 2):
        alone = plain.start(request)
        list(alone)
        assert texts[request].token_ids == alone.token_ids
    assert not pair.target.live_caches
    assert not pair.draft.live_caches


def test_a_deadline_ends_its_own_text_alone() -> None:
    pair, run = Pair(), Ends()
    jobs = run.submit(*(pair.start(request) for request in range(2)))
    run.scheduler.turn()
    jobs[0].deadline = 0.0
    run.run()
    assert run.ends[0][0] == "expired"
    assert isinstance(run.ends[0][1], DeadlineError)
    assert run.ends[1][0] == "finished"


def test_stopping_ends_all_and_the_threads() -> None:
    pair = Pair()

    async def close() -> list[str]:
        engine = AsyncEngine(max_batch=3)
        engine.run_all([pair.start(request) for request in range(3)])
        await engine.aclose()
        assert engine.stats.running == 0
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]

    before = [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline")]
    assert asyncio.run(asyncio.wait_for(close(), 60)) == before


def test_models_that_take_one_text_run_as_ever() -> None:
    decoder = SpeculativeDecoder(TableModel.random(VOCAB, seed=1), None, None, VOCAB)
    run = Ends(max_batch=3)
    texts = [decoder.generate([request + 1], max_new_tokens=3) for request in range(3)]
    run.submit(*texts)
    run.run()
    assert run.steps == [0, 1, 2] * 3
    assert [text.token_ids for text in texts] == [
        tuple(token for step in decoder.generate([request + 1], max_new_tokens=3) for token in step.token_ids)
        for request in range(3)
    ]


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2"])
def test_a_bad_max_batch_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidInputError, match="max_batch must be an integer of at least 1"):
        AsyncEngine(max_batch=bad)


def test_a_strand_hands_questions_answers_and_errors_over() -> None:
    strand = Strand("test")

    def task() -> str:
        here = Strand.current()
        assert here is strand
        try:
            return f"{here.ask('first')} {here.ask('second')}"
        except InvalidInputError as error:
            return f"caught {error}"

    assert strand.begin(task) == "first"
    assert strand.answer(1) == "second"
    assert strand.answer(2) is None
    assert strand.result() == "1 2"
    assert strand.begin(task) == "first"
    assert strand.answer(error=InvalidInputError("no")) is None
    assert strand.result() == "caught no"

    def fail() -> None:
        raise SystemExit(3)

    assert strand.begin(fail) is None
    with pytest.raises(SystemExit):
        strand.result()
    assert Strand.current() is None
    strand.stop()
    assert not strand._thread.is_alive()


def test_a_texts_time_stands_still_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(100.0)  # each look at it is a second later
    monkeypatch.setattr(paceline.strand, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))

    class Slow(Tables):
        def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
            for _ in range(7):
                next(clock)  # what the pass takes; this text's own share of it is three seconds
            cache.seconds += 3
            return super().forward(tokens, cache, num_logits)

    model = Slow.random(VOCAB, seed=1)
    model.passes = []
    batchable = Batchable(model)

    def task() -> float:
        cache = batchable.new_cache(8)
        cache.seconds = 0.0
        started = text_time()
        batchable.forward([1], cache, 1)
        return text_time() - started

    # Two of the looks are those of `ask` itself, one is between the two of `task`.
    rendezvous = Rendezvous()
    assert dict(rendezvous.play([task])) == {0: pytest.approx(3 + 2, abs=0.5)}
    rendezvous.stop()


def test_what_a_pass_costs_its_texts() -> None:
    cost = PassCost()
    assert cost.share(1.0, [1]) == [1.0]
    for rows in (1, 2, 4, 8, 3, 16, 5) * 20:
        cost.share(10 + 2 * rows, [rows])
    shares = cost.share(18.0, [1, 3])
    assert sum(shares) == pytest.approx(18)
    assert shares == pytest.approx([5 + 2, 5 + 6], rel=0.02)
    assert cost.share(300.0, [290, 1]) == pytest.approx([5 + 580, 5 + 2], rel=0.5)
    assert cost.share(18.0, [1, 3]) == pytest.approx(shares, rel=0.02)  # a prompt bends no line


def test_shares_of_a_pass_are_above_nothing_whatever_the_clock_says() -> None:
    cost = PassCost()
    for seconds, rows in ((5.0, [9]), (1.0, [1, 1]), (0.5, [20]), (0.0, [2, 3])):
        shares = cost.share(seconds, rows)
        assert sum(shares) == pytest.approx(seconds)
        assert min(shares) >= 0
