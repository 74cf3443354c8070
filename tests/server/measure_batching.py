"""Measures what passes over several texts bring, and what they cost a text alone.

    PYTHONPATH=runtime:export:tools python tests/server/measure_batching.py BUNDLE [--texts 1,4,8] [--tokens 48]

BUNDLE needs the graphs of `paceline batch`. First what both kinds of graphs take of memory; then passes of a model at
--length positions: the usual graph with one text, that with lanes with several; then whole texts in an engine,
with and without batches. All is interleaved, medians are printed. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import paceline
from paceline import AsyncEngine, SamplingParams, SpeculativeDecoder
from paceline.bundle import Bundle
from paceline.model import Feed
from paceline.ort_lanes import LanesModel

PROMPTS = (
    "def quicksort(items):\n",
    "The three largest rivers of Europe are",
    "Question: why do riders of a paceline take turns at its front?\nAnswer:",
    'class Stack:\n    """A stack of integers."""\n',
    "Dear Sir or Madam,\n\nI am writing to you about",
    "import json\n\n\ndef read_config(path):\n",
    "Once upon a time, in a village by the sea,",
    "SELECT name, count(*) FROM",
)
ROOM = 64  # positions behind the valid ones


def median_ms(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Medians of the milliseconds that each takes, in turns."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if repeat >= 2:  # behind the warm-up
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def resident_mb() -> float:
    """Megabytes of this process in memory, pages of files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measure_passes(which: str, lanes: LanesModel, length: int, repeats: int) -> dict[str, Any]:
    """Passes of one model: the usual graph's with one text, and those with lanes."""
    entry = lanes.entry
    rng = np.random.default_rng(0)

    def ready(number: int) -> Any:
        cache = lanes.new_cache(length + ROOM)
        cache.pretend(length - 7 * number, rng)
        return cache

    alone, caches = ready(0), [ready(number) for number in range(lanes.max_batch)]

    def pass_alone(rows: int) -> None:
        lanes.forward([1] * rows, alone, rows)
        alone.rollback(length)

    def pass_of(texts: int, rows: int) -> None:
        lanes.forward_all([Feed([1] * rows, cache, rows) for cache in caches[:texts]])
        for number, cache in enumerate(caches[:texts]):
            cache.rollback(length - 7 * number)

    sizes = [texts for texts in (2, 4, 8, 16) if texts <= lanes.max_batch]
    found: dict[str, Any] = {}
    print(f"\n{which}, {entry.architecture} {entry.precision}, {length} positions, {lanes.max_batch} lanes")
    print(
        "rows  usual graph, 1 text   "
        + "".join(f"lanes, {texts:2}   " for texts in sizes)
        + "   (ms, times one by one)"
    )
    for rows in (1, 2, 4):
        runs: dict[Any, Callable[[], Any]] = {0: partial(pass_alone, rows)}
        runs |= {texts: partial(pass_of, texts, rows) for texts in sizes}
        ms = median_ms(runs, repeats)
        parts = [f"{ms[texts]:6.1f} {texts * ms[0] / ms[texts]:.2f}  " for texts in sizes]
        print(f"{rows:4}  {ms[0]:19.1f}  " + "".join(parts))
        found[str(rows)] = {str(texts): value for texts, value in ms.items()}
    return found


def measure_texts(
    decoders: dict[str, tuple[SpeculativeDecoder, int]], texts: int, tokens: int, repeats: int, **options: Any
) -> dict[str, float]:
    """Tokens per second of an engine that writes so many texts at once, medians by decoder."""

    async def write(decoder: SpeculativeDecoder, max_batch: int) -> float:
        async with AsyncEngine(max_batch=max_batch) as engine:
            works = [
                decoder.generate(
                    PROMPTS[number % len(PROMPTS)],
                    SamplingParams(min_new_tokens=tokens),
                    max_new_tokens=tokens,
                    **options,
                )
                for number in range(texts)
            ]
            started = time.perf_counter()
            for stream in engine.run_all(works):
                async for _ in stream:
                    pass
            return texts * tokens / (time.perf_counter() - started)

    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for repeat in range(repeats + 1):
        for name, (decoder, max_batch) in decoders.items():
            rate = asyncio.run(write(decoder, max_batch))
            if repeat:
                rates[name].append(rate)
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--texts", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--repeats", type=int, default=3, help="of whole texts; passes are repeated five times as often"
    )
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    if bundle.manifest.target.lanes is None:
        parser.error(f"{options.bundle} has no graphs for several texts; `paceline batch` adds them")
    max_batch = bundle.manifest.target.lanes.count
    seen: dict[str, Any] = {"max_batch": max_batch, "resident_mb": {}, "passes": {}, "tokens_per_s": {}}
    decoders = {}
    for name, count in (("usual", 1), ("lanes", max_batch)):
        before = resident_mb()
        decoders[name] = paceline.load(options.bundle, max_batch=count), count
        seen["resident_mb"][name] = resident_mb() - before
        print(f"loaded for {count} texts in a pass: {seen['resident_mb'][name]:.0f} MB resident")
    batched = decoders["lanes"][0]
    for which, model in (("target", batched.target), ("draft", getattr(batched.draft, "inner", None))):
        inner = getattr(model, "inner", model)  # of a draft with another tokenizer
        if isinstance(inner, LanesModel):
            seen["passes"][which] = measure_passes(which, inner, options.length, 5 * options.repeats)
    print(f"\nengine, {options.tokens} tokens a text, greedy: tokens per second")
    print("texts  drafts   one by one   batches of", max_batch, "  times as fast")
    for texts in map(int, options.texts.split(",")):
        for drafts in (0, "auto") if bundle.manifest.draft else (0,):
            rates = measure_texts(decoders, texts, options.tokens, options.repeats, num_draft_tokens=drafts)
            print(
                f"{texts:5}  {drafts:6}  {rates['usual']:10.1f}  {rates['lanes']:12.1f}      "
                f"{rates['lanes'] / rates['usual']:.2f}"
            )
            seen["tokens_per_s"][f"{texts} texts, drafts {drafts}"] = rates
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
