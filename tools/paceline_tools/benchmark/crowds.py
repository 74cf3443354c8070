"""Several texts at once through `paceline.AsyncEngine`, method by method in turn: what readers wait, and in all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline import AsyncEngine, Generation, SpeculativeDecoder

from .measurement import Plan, all_decoders
from .methods import OURS

__all__ = ["Crowd", "measure_crowds"]

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Crowd:
    """Texts that were written at once by one method. All times in seconds.

    Attributes:
        method: its index in the document.
        repeat: from 0.
        prompts: their indices in the document, one for each text.
        wall_s: from the call of all to the last token of all.
        steps_s: of each text, time from the call, or from the step before, to each step, as its reader sees it: with
            the others' turns.
        steps_tokens: of each text, tokens that each step emitted.
    """

    method: int
    repeat: int
    prompts: tuple[int, ...]
    wall_s: float
    steps_s: tuple[tuple[float, ...], ...]
    steps_tokens: tuple[tuple[int, ...], ...]

    @property
    def new_tokens(self) -> int:
        """Emitted tokens of all texts."""
        return sum(map(sum, self.steps_tokens))


def measure_crowds(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    concurrencies: Sequence[int],
    on_progress: Callable[[str, float], None],
    beside: Mapping[str, SpeculativeDecoder],
) -> Iterator[Crowd]:
    """For each number of texts at once, each repeat and each group of so many prompts, all methods write in turn.

    Groups follow the prompts; the last is filled up from the first. Peers are left out.
    """
    decoders = all_decoders(decoder, beside, plan)
    methods = [index for index, method in enumerate(plan.methods) if method.engine == OURS]
    groups = [(size, group) for size in concurrencies for group in _groups(len(prompts), size)]
    whole = sum(size for size, _ in groups) * len(methods) * plan.repeats
    done = 0
    for repeat in range(plan.repeats):
        for number, (size, group) in enumerate(groups):
            order = [methods[(number + index) % len(methods)] for index in range(len(methods))]
            for index in order if repeat % 2 == 0 else reversed(order):
                on_progress(f"{size} at once, repeat {repeat + 1} of {plan.repeats}", done / whole)
                yield _crowd(decoders[plan.methods[index].bundle], prompts, group, plan, index, repeat)
                done += size
    on_progress("done", 1.0)


def _groups(count: int, size: int) -> list[tuple[int, ...]]:
    """Indices in groups of `size`."""
    return [tuple((start + index) % count for index in range(size)) for start in range(0, count, size)]


def _crowd(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    group: tuple[int, ...],
    plan: Plan,
    index: int,
    repeat: int,
) -> Crowd:
    method = plan.methods[index]
    generations = [
        plan.generation(decoder, prompts[prompt], method, repeat, request) for request, prompt in enumerate(group)
    ]
    seconds, steps = asyncio.run(_write(generations))
    return Crowd(
        index,
        repeat,
        group,
        round(seconds, _DIGITS),
        tuple(tuple(round(one, _DIGITS) for one, _ in text) for text in steps),
        tuple(tuple(tokens for _, tokens in text) for text in steps),
    )


async def _write(generations: Sequence[Generation]) -> tuple[float, list[list[tuple[float, int]]]]:
    """Seconds of all, and of each text the seconds and tokens of its steps."""
    async with AsyncEngine(max_running=len(generations)) as engine:
        started = time.perf_counter()
        streams = engine.run_all(generations)

        async def follow(index: int) -> list[tuple[float, int]]:
            steps, last = [], started
            async for step in streams[index]:
                now = time.perf_counter()
                steps.append((now - last, len(step.token_ids)))
                last = now
            return steps

        found = await asyncio.gather(*(follow(index) for index in range(len(streams))))
        return time.perf_counter() - started, list(found)
