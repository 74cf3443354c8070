"""A prompt that begins like an earlier text: what is left out, what is kept, and that the text stays the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline import Generation, KVCache, PrefixCache, SamplingParams, SpeculativeDecoder
from paceline.drafters import DraftModelDrafter
from paceline.errors import InvalidInputError
from paceline.ort import OrtModel
from paceline.planner import Planner
from paceline.row_sampler import RowSampler
from paceline.streams import Streams
from paceline.testing import TableModel

TURNS = ("Name three primes.", "And three more, please.", "What is the sum of all six?")


@pytest.fixture(scope="module")
def fresh(smol_bundle: Path) -> SpeculativeDecoder:
    return paceline.load(smol_bundle)


@pytest.fixture
def keeping(fresh: SpeculativeDecoder) -> SpeculativeDecoder:
    return dataclasses.replace(fresh, prefixes=PrefixCache(1 << 30))


def finished(generation: Generation) -> Generation:
    list(generation)
    return generation


def position_bytes(decoder: SpeculativeDecoder) -> int:
    models = (decoder.target, decoder.draft)
    return sum(model.entry.kv_bytes_per_position for model in models if isinstance(model, OrtModel))


# With a seed, the int4 draft's last bits change what it drafts, and so which text of the same law comes.
@pytest.mark.parametrize(("temperature", "num_draft_tokens"), [(0.0, 0), (0.0, 3), (0.0, "auto"), (0.8, 0)])
def test_a_chat_goes_on_where_it_stopped(
    fresh: SpeculativeDecoder, keeping: SpeculativeDecoder, temperature: float, num_draft_tokens: int | str
) -> None:
    assert fresh.tokenizer is not None
    sampling = SamplingParams(temperature=temperature, seed=5 if temperature else None)
    messages: list[dict[str, str]] = []
    known = 0
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        prompt = fresh.tokenizer.encode_chat(messages)
        options = {"max_new_tokens": 10, "num_draft_tokens": num_draft_tokens}
        want = finished(fresh.generate(prompt, sampling, **options))  # type: ignore[arg-type]
        got = finished(keeping.generate(prompt, sampling, **options))  # type: ignore[arg-type]
        assert got.token_ids == want.token_ids
        assert got.stats.cached_tokens >= known
        assert want.stats.cached_tokens == 0
        messages.append({"role": "assistant", "content": got.text})
        # The next prompt holds this one, its system prompt and its answer, but for what a template puts behind it.
        known = len(prompt)
    assert known > 40


def test_the_same_prompt_again_feeds_one_token(keeping: SpeculativeDecoder, fresh: SpeculativeDecoder) -> None:
    prompt = list(range(300, 400))
    first = finished(keeping.generate(prompt, max_new_tokens=8))
    again = finished(keeping.generate(prompt, max_new_tokens=8))
    assert (first.stats.cached_tokens, again.stats.cached_tokens) == (0, 99)
    assert again.token_ids == first.token_ids == finished(fresh.generate(prompt, max_new_tokens=8)).token_ids


def test_another_length_of_the_cache_and_a_longer_text(keeping: SpeculativeDecoder, fresh: SpeculativeDecoder) -> None:
    """Caches are as long as their own text; a copy must land where the longer one wants it."""
    prompt = list(range(300, 340))
    finished(keeping.generate(prompt, max_new_tokens=4))
    for longer in (prompt, [*prompt, *range(500, 560)]):
        got = finished(keeping.generate(longer, max_new_tokens=40))
        assert got.stats.cached_tokens >= 39
        assert got.token_ids == finished(fresh.generate(longer, max_new_tokens=40)).token_ids


def test_a_text_closed_early_is_kept_up_to_there(keeping: SpeculativeDecoder) -> None:
    prompt = list(range(300, 340))
    with keeping.generate(prompt, max_new_tokens=64) as generation:
        for _ in range(3):
            next(generation)
    text = [*prompt, *generation.token_ids]
    again = finished(keeping.generate([*text, 5], max_new_tokens=2))
    assert again.stats.cached_tokens == len(text) - 1  # the last token of a text was never fed


def test_a_failed_round_keeps_nothing(keeping: SpeculativeDecoder) -> None:
    class Failing:
        seconds = 0.0

        def prefill(self, tokens: Sequence[int]) -> None: ...

        def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: object) -> paceline.Draft:
            raise RuntimeError("drafter")

        def rollback(self, length: int) -> None: ...

    with pytest.raises(RuntimeError, match="drafter"):
        finished(keeping.generate(list(range(300, 340)), num_draft_tokens=2, drafter=Failing()))
    assert keeping.prefixes is not None
    assert keeping.prefixes.num_bytes == 0


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_text_that_is_repeatable_is_planned_as_if_nothing_had_been_cached(repeatable: bool) -> None:
    missed: list[int] = []

    class Asked(Planner):
        def worth_a_prefill(self, count: int) -> bool:
            missed.append(count)
            return False

        def worth_a_step(self, rows: int = 1) -> bool:
            missed.append(rows)
            return len(missed) == 2 or super().worth_a_step(rows)

    model = TableModel.random(7, seed=2)
    cache = model.new_cache(64)
    model.forward([1] * 20, cache, 1)
    sampler = RowSampler(SamplingParams(), vocab_size=7, num_prompt_tokens=30)
    drafter = DraftModelDrafter(model, cache, sampler, 7, Asked(repeatable=repeatable))
    drafter.prefill([1] * 30)
    drafter.propose([1] * 31, 3, Streams(seed=1))
    assert missed[:3] == ([30, 31, 1] if repeatable else [10, 11, 1])


def test_the_least_recently_used_go_first(fresh: SpeculativeDecoder) -> None:
    prompts = [list(range(start, start + 40)) for start in (300, 400, 500)]
    each = 42 * position_bytes(fresh)  # prompt and two new tokens
    prefixes = PrefixCache(2 * each + 1000)
    decoder = dataclasses.replace(fresh, prefixes=prefixes)

    def cached(index: int) -> int:
        return finished(decoder.generate(prompts[index], num_draft_tokens=2, max_new_tokens=2)).stats.cached_tokens

    assert [cached(0), cached(1)] == [0, 0]
    assert prefixes.num_bytes == 2 * each
    assert cached(0) == 39  # used again
    assert cached(2) == 0  # pushes 1 out
    assert prefixes.num_bytes <= prefixes.max_bytes
    assert [cached(0), cached(2), cached(1)] == [39, 39, 0]
    prefixes.clear()
    assert prefixes.num_bytes == 0
    assert cached(0) == 0


def test_a_text_larger_than_the_bound_is_not_kept(fresh: SpeculativeDecoder) -> None:
    prefixes = PrefixCache(20 * position_bytes(fresh))
    decoder = dataclasses.replace(fresh, prefixes=prefixes, draft=None)
    finished(decoder.generate(list(range(300, 380)), max_new_tokens=2))
    assert prefixes.num_bytes == 0


def test_room_that_a_text_did_not_use_is_not_kept(keeping: SpeculativeDecoder) -> None:
    prompt = list(range(300, 340))
    with keeping.generate(prompt, max_new_tokens=4000) as generation:
        for _ in range(3):
            next(generation)
    assert keeping.prefixes is not None
    held = (len(prompt) + len(generation.token_ids)) * position_bytes(keeping)
    assert held // 2 < keeping.prefixes.num_bytes <= held


def test_a_text_that_goes_on_replaces_its_beginning(keeping: SpeculativeDecoder) -> None:
    prompt = list(range(300, 340))
    first = finished(keeping.generate(prompt, num_draft_tokens=2, max_new_tokens=4))
    longer = [*prompt, *first.token_ids, *range(400, 440)]
    finished(keeping.generate(longer, num_draft_tokens=2, max_new_tokens=4))
    assert keeping.prefixes is not None
    assert keeping.prefixes.num_bytes == (len(longer) + 4) * position_bytes(keeping)


def test_generations_at_once_share_it(keeping: SpeculativeDecoder, fresh: SpeculativeDecoder) -> None:
    system = list(range(300, 360))
    prompts = [[*system, *range(400 + 10 * i, 405 + 10 * i)] for i in range(6)]
    finished(keeping.generate(prompts[0], max_new_tokens=2))
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda ids: finished(keeping.generate(ids, max_new_tokens=8)), prompts))
    for ids, generation in zip(prompts, got, strict=True):
        assert generation.stats.cached_tokens >= len(system)
        assert generation.token_ids == finished(fresh.generate(ids, max_new_tokens=8)).token_ids


def test_restored_keys_and_values_give_the_logits_of_a_prefill(fresh: SpeculativeDecoder) -> None:
    model = fresh.target
    tokens = np.random.default_rng(1).integers(0, fresh.vocab_size, 80).tolist()
    earlier, prefixes = model.new_cache(100), PrefixCache(1 << 28)
    model.forward([*tokens[:60], 7, 8], earlier, 1)
    prefixes.keep(earlier, model, [*tokens[:60], 7, 8])
    cache = model.new_cache(90)
    assert prefixes.fill(cache, model, tokens) == 60
    live = model.forward(tokens[60:], cache, 20).copy()
    np.testing.assert_allclose(live, model.forward(tokens, model.new_cache(90), 20), atol=2e-3)
    with pytest.raises(InvalidInputError, match="Only an empty KV cache"):
        prefixes.fill(cache, model, tokens)


def test_models_do_not_read_each_others(fresh: SpeculativeDecoder) -> None:
    assert fresh.draft is not None
    prefixes, tokens = PrefixCache(1 << 28), list(range(300, 340))
    cache = fresh.target.new_cache(64)
    fresh.target.forward(tokens, cache, 1)
    prefixes.keep(cache, fresh.target, tokens)
    assert prefixes.fill(fresh.draft.new_cache(64), fresh.draft, tokens) == 0
    assert prefixes.fill(fresh.target.new_cache(64), fresh.target, tokens) == 39
    assert prefixes.fill(fresh.target.new_cache(20), fresh.target, tokens) == 20


@pytest.mark.parametrize("max_bytes", [0, -1, True, 1.5, "1", None])
def test_the_bound_must_be_a_number_of_bytes(max_bytes: object) -> None:
    with pytest.raises(InvalidInputError, match="max_bytes must be an integer of at least 1"):
        PrefixCache(max_bytes)  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_saved_says_so() -> None:
    class Bare(KVCache):
        pass

    class Model(TableModel):
        def new_cache(self, max_length: int) -> KVCache:  # type: ignore[override]
            return Bare(max_length)

    model = Model(np.zeros((4, 4)))
    decoder = SpeculativeDecoder(model, None, None, 4, prefixes=PrefixCache(100))
    with pytest.raises(InvalidInputError, match="A Bare cannot be saved"):
        next(decoder.generate([1, 2, 3]))
