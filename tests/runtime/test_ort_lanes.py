"""Several texts in one pass of ONNX Runtime: logits, keys and texts are those of one by one."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import tiny_pair

import paceline
from paceline import AsyncEngine, SamplingParams, SpeculativeDecoder
from paceline.bundle import Bundle
from paceline.errors import BundleError, InvalidInputError
from paceline.kv_cache import KVCache
from paceline.model import Feed
from paceline.ort import OrtModel
from paceline.ort_lanes import LaneCache, LanesModel
from paceline_export.lanes import add_lanes

LANES = 3
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 255, 200)]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def bundle(request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with graphs for three texts."""
    folder = tmp_path_factory.mktemp(f"lanes-{request.param}")
    if request.param == "fp32":
        path = Path(shutil.copytree(tiny_bundle, folder / "bundle"))
    else:
        path = tiny_pair(folder, request.param, block_size=32, calibration="none")
    add_lanes(Bundle.open(path), LANES)
    return path


@pytest.fixture(scope="module")
def models(bundle: Path) -> tuple[LanesModel, OrtModel]:
    opened = Bundle.open(bundle)
    return LanesModel.open(opened, "target", max_batch=LANES), OrtModel.open(opened, "target")


class Twin:
    """A text that is fed in a lane and, by itself, to the usual graph; both must say the same."""

    def __init__(self, models: tuple[LanesModel, OrtModel], start: int, max_length: int) -> None:
        self.lanes, self.single = models
        self.mine, self.other = self.lanes.new_cache(max_length), self.single.new_cache(max_length)
        self.left = TEXT[start:]

    def feed(self, rows: int, num_logits: int) -> tuple[Feed, NDArray[np.float32]]:
        """What the lane is to be fed, and the logits that it should give."""
        tokens, self.left = self.left[:rows], self.left[rows:]
        return Feed(tokens, self.mine, num_logits), self.single.forward(tokens, self.other, num_logits).copy()

    def rollback(self, length: int) -> None:
        self.mine.rollback(length)
        self.other.rollback(length)


def compare(twins: Sequence[Twin], shapes: Sequence[tuple[int, int]]) -> None:
    """One pass in which each text has so many rows, and so many of them logits."""
    fed = [twin.feed(*shape) for twin, shape in zip(twins, shapes, strict=True)]
    found = twins[0].lanes.forward_all([feed for feed, _ in fed])
    for logits, (_, expected), (_, num_logits) in zip(found, fed, shapes, strict=True):
        assert logits.shape == (num_logits, 272)
        np.testing.assert_allclose(logits, expected, atol=tolerance(twins[0].single), rtol=1e-4)
    for twin in twins:
        assert twin.mine.length == twin.other.length
        for mine, other in zip(twin.mine.buffers, twin.other.buffers, strict=True):
            valid = slice(None), slice(None), slice(twin.mine.length)
            np.testing.assert_allclose(mine[valid], other[valid], atol=tolerance(twin.single), rtol=1e-4)


def tolerance(model: OrtModel) -> float:
    """Activations that products with few-bit weights round to 8 bits may be rounded otherwise in their last bit."""
    return 2e-4 if model.entry.precision == "fp32" else 0.3


def test_rows_lengths_and_capacities_may_all_differ(models: tuple[LanesModel, OrtModel]) -> None:
    twins = [Twin(models, start, max_length) for start, max_length in ((0, 60), (7, 200), (19, 41))]
    compare(twins, [(40, 4), (23, 1), (9, 9)])  # prompts
    compare(twins, [(1, 1), (1, 1), (1, 1)])
    compare(twins, [(1, 1), (5, 5), (3, 2)])  # one is plain, two verify
    twins[1].rollback(25)  # 4 of 5 fall
    compare(twins, [(2, 2), (4, 4), (1, 1)])
    compare([twins[2], twins[0]], [(6, 6), (1, 1)])  # another order, and one that does nothing
    compare([twins[1]], [(3, 3)])
    compare(twins, [(1, 1), (1, 1), (2, 1)])


def test_texts_that_outnumber_the_lanes_take_turns(models: tuple[LanesModel, OrtModel]) -> None:
    twins = [Twin(models, 10 * start, 50) for start in range(7)]
    for first in (0, 3, 5, 1, 4, 0, 2, 6):
        compare([twins[first], twins[(first + 2) % 7], twins[(first + 3) % 7]], [(2, 1), (1, 1), (3, 3)])
    seated = [twin.mine.lane for twin in twins if isinstance(twin.mine, LaneCache)]
    assert sorted(lane for lane in seated if lane is not None) == [0, 1, 2]


def test_texts_that_go_on_together_stay_in_their_lanes(models: tuple[LanesModel, OrtModel]) -> None:
    twins = [Twin(models, 10 * start, 50) for start in range(3)]
    compare(twins, [(2, 1)] * 3)
    lanes = [twin.mine.lane for twin in twins if isinstance(twin.mine, LaneCache)]
    compare(twins[::-1], [(2, 1)] * 3)
    assert [twin.mine.lane for twin in twins if isinstance(twin.mine, LaneCache)] == lanes


def test_a_lane_that_is_idle_for_a_pass_loses_nothing(models: tuple[LanesModel, OrtModel]) -> None:
    """What an idle lane writes goes nowhere, also where the text has filled its cache."""
    twins = [Twin(models, 10 * start, 4) for start in range(3)]
    compare(twins, [(3, 1), (4, 1), (1, 1)])
    kept = [buffer.copy() for buffer in twins[1].mine.buffers]
    compare([twins[2], twins[0]], [(2, 1), (1, 1)])
    assert all((mine == old).all() for mine, old in zip(twins[1].mine.buffers, kept, strict=True))


def test_a_text_alone_is_fed_in_pieces(models: tuple[LanesModel, OrtModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ort.PREFILL_ROWS", 16)
    lanes, single = models
    tokens = TEXT[:41]
    caches = lanes.new_cache(60), single.new_cache(60)
    found, expected = (model.forward(tokens, cache, 3) for model, cache in zip(models, caches, strict=True))
    np.testing.assert_allclose(found, expected, atol=tolerance(single), rtol=1e-4)
    assert caches[0].length == len(tokens)
    assert caches[0].seconds > 0


def test_logits_stay_while_other_texts_are_fed(models: tuple[LanesModel, OrtModel]) -> None:
    lanes, _ = models
    one, other = lanes.new_cache(20), lanes.new_cache(20)
    logits = lanes.forward([1, 2], one, 1)
    before = logits.copy()
    lanes.forward([3, 4], other, 1)
    assert (logits == before).all()


def test_a_pass_over_one_text_is_a_forward(models: tuple[LanesModel, OrtModel]) -> None:
    lanes, _ = models
    one, other = lanes.new_cache(20), lanes.new_cache(20)
    (found,) = lanes.forward_all([Feed([1, 2, 3], one, 2)])
    assert (found == lanes.forward([1, 2, 3], other, 2)).all()


def test_keys_and_values_are_freed_with_the_text(models: tuple[LanesModel, OrtModel]) -> None:
    """The lane that they were bound to does not keep them."""
    lanes, _ = models
    cache: KVCache | None = lanes.new_cache(50)
    assert isinstance(cache, LaneCache)
    other = lanes.new_cache(50)
    lanes.forward_all([Feed([1], cache, 1), Feed([1], other, 1)])
    buffers = [weakref.ref(buffer) for buffer in cache.buffers]
    cache = None
    gc.collect()
    assert [buffer() for buffer in buffers] == [None] * len(buffers)


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        (lambda c: [], "takes 1 to 3 texts, got 0"),
        (lambda c: [Feed([1], one, 1) for one in c], "takes 1 to 3 texts, got 4"),
        (lambda c: [Feed([1], c[0], 1), Feed([2], c[0], 1)], "only once in a pass"),
        (lambda c: [Feed([1], c[0], 1), Feed([272], c[1], 1)], "272 is outside the model's 272 ids"),
        (lambda c: [Feed([1], c[0], 1), Feed([1] * 9, c[1], 1)], "room for 8"),
        (lambda c: [Feed([1], c[0], 1), Feed([1], c[1], 2)], "num_logits must be"),
        (lambda c: [Feed([1], c[0], 1), Feed([1], KVCache(8), 1)], "made by another model"),
    ],
)
def test_a_pass_that_is_refused_feeds_nobody(
    feeds: Callable[[Any], list[Feed]], words: str, models: tuple[LanesModel, OrtModel]
) -> None:
    caches = [models[0].new_cache(8) for _ in range(4)]
    with pytest.raises(InvalidInputError, match=words):
        models[0].forward_all(feeds(caches))
    assert [cache.length for cache in caches] == [0] * 4


def test_threads_may_share_the_model(models: tuple[LanesModel, OrtModel]) -> None:
    """Passes of threads that know nothing of each other come one after the other, each with its own caches."""
    twins = [Twin(models, 10 * start, 60) for start in range(4)]
    feeds = [[twin.feed(rows, rows) for rows in (5, 1, 3, 1, 1)] for twin in twins]
    found: dict[int, list[NDArray[np.float32]]] = {}

    def run(index: int) -> None:
        lanes = twins[index].lanes
        found[index] = [lanes.forward_all([feed])[0].copy() for feed, _ in feeds[index]]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, fed in enumerate(feeds):
        for logits, (_, expected) in zip(found[index], fed, strict=True):
            np.testing.assert_allclose(logits, expected, atol=tolerance(models[1]), rtol=1e-4)


# The engine.


def texts(decoder: SpeculativeDecoder, max_batch: int, **options: Any) -> list[tuple[int, ...]]:
    """Seven texts of an engine, with and without a seed; random weights would end some of them at once."""
    decoder = dataclasses.replace(decoder, eos_token_ids=())

    async def run() -> list[tuple[int, ...]]:
        async with AsyncEngine(max_batch=max_batch) as engine:
            works = [
                decoder.generate(
                    TEXT[request : 3 * request + 20],
                    SamplingParams(temperature=0.8, seed=request) if request % 2 else SamplingParams(),
                    request=request,
                    max_new_tokens=24 + request,
                    **options,
                )
                for request in range(7)
            ]
            for stream in engine.run_all(works):
                async for _ in stream:
                    pass
            assert engine.stats.ended["finished"] == 7
            if max_batch > 1:
                assert (engine.stats.texts_per_pass or 0) > 1.2
            for work in works:
                assert work.stats.overhead_s >= 0
                assert 0 < work.stats.target_s <= work.stats.decode_s
            return [work.token_ids for work in works]

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"num_draft_tokens": 3}, {}])
def test_texts_in_a_batch_are_those_of_one_by_one(options: dict[str, Any], lanes_bundle: Path) -> None:
    """In fp32, where no two logits of these texts are as near as the order of sums could tell."""
    alone = texts(paceline.load(lanes_bundle, profile=None), 1, **options)
    decoder = paceline.load(lanes_bundle, profile=None, max_batch=LANES)
    assert texts(decoder, LANES, **options) == alone
    assert texts(decoder, 2, **options) == alone
    assert texts(decoder, 7, **options) == alone  # more than a pass takes
    assert texts(decoder, 1, **options) == alone


def test_the_prefix_cache_serves_lanes(lanes_bundle: Path) -> None:
    decoder = paceline.load(lanes_bundle, profile=None, max_batch=LANES, prefix_cache_bytes=1 << 24)
    prompts = [[*TEXT[:60], request] for request in range(3)]

    async def run() -> list[tuple[tuple[int, ...], int]]:
        async with AsyncEngine(max_batch=LANES) as engine:
            works = [decoder.generate(prompt, max_new_tokens=8) for prompt in prompts]
            for stream in engine.run_all(works):
                async for _ in stream:
                    pass
            return [(work.token_ids, work.stats.cached_tokens) for work in works]

    first, second = asyncio.run(run()), asyncio.run(run())
    assert [ids for ids, _ in first] == [ids for ids, _ in second]
    assert [cached for _, cached in second] == [60] * 3


# What refuses graphs.


def test_a_bundle_that_cannot_take_so_many_is_refused(tiny_bundle: Path, lanes_bundle: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"takes one text in a pass; add one with `paceline batch .* --max-batch"
    ):
        paceline.load(tiny_bundle, max_batch=2)
    with pytest.raises(InvalidInputError, match="takes at most 3 texts in a pass"):
        paceline.load(lanes_bundle, max_batch=4)
    with pytest.raises(InvalidInputError, match="max_batch must be an integer of at least 1, got 0"):
        paceline.load(lanes_bundle, max_batch=0)
    with pytest.raises(InvalidInputError, match="the sampler 'graph' is asked for"):
        paceline.load(lanes_bundle, max_batch=2, sampler="graph")
    with pytest.raises(InvalidInputError, match="the provider 'cuda' is asked for"):
        paceline.load(lanes_bundle, max_batch=2, provider="cuda")


def test_a_graph_that_is_not_the_manifests_is_refused(lanes_bundle: Path) -> None:
    bundle = Bundle.open(lanes_bundle)
    target, draft = bundle.manifest.target, bundle.manifest.draft
    assert draft is not None
    swapped = dataclasses.replace(bundle.manifest, target=dataclasses.replace(target, lanes=draft.lanes))
    with pytest.raises(BundleError, match=r"the inputs of draft/lanes-3\.onnx are not those of the manifest"):
        LanesModel.open(Bundle(lanes_bundle, swapped), "target", max_batch=2)
    without = {name: entry for name, entry in bundle.manifest.files.items() if "target/lanes" not in name}
    with pytest.raises(BundleError, match="does not list it among its files"):
        dataclasses.replace(bundle.manifest, files=without)
