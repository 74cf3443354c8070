"""Documents of benchmarks made up from given costs, to know what their figures should say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from paceline_tools.benchmark.document import Document, MeasuredPrompt
from paceline_tools.benchmark.measurement import Measurement
from paceline_tools.benchmark.methods import all_methods

PASS_MS, STEP_MS, REST_MS = 30.0, 8.0, 0.5
RUN = {
    "paceline": "0.1.0",
    "command": ["paceline", "bench"],
    "started": "2026-11-30T10:00:00+00:00",
    "seconds": 12.5,
    "complete": True,
    "machine": {"cpu": "a processor", "cores": 2, "system": "Linux", "python": "3.11", "packages": {"numpy": "2.4"}},
    "bundle": {
        "manifest_sha256": "0" * 64,
        "target": {"source": "big", "precision": "int4"},
        "draft": {"source": "small", "precision": "int4"},
    },
    "settings": {"max_new_tokens": 64, "repeats": 4},
    "load_s": 1.5,
    "peak_bytes": 2_000_000_000,
    "target_bytes": 600_000_000,
    "read_bytes_per_s": 28e9,
}


@cache
def _text(prompt: int, k: int) -> tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Seconds of each step, and its tokens: emitted, proposed, accepted."""
    rng = np.random.default_rng([prompt, k])
    tokens, accepted = [1], [0]
    while sum(tokens) < 64:
        accepted.append(int(np.cumprod(rng.random(k) < 0.6 + 0.1 * (prompt % 4)).sum()))
        tokens.append(min(accepted[-1] + 1, 64 - sum(tokens)))
    rounds = len(tokens) - 1
    seconds = (0.2, *[(PASS_MS * (1 + 0.15 * k) + k * STEP_MS + REST_MS) / 1000] * rounds)
    return seconds, tuple(tokens), (0, *[k] * rounds), tuple(accepted)


def made_up(
    seed: int,
    *,
    noise: float = 0.03,
    slower: float = 1.0,
    slower_methods: Mapping[str, float] | None = None,
    prompts: int = 6,
    repeats: int = 4,
    categories: tuple[str, ...] = ("code", "prose"),
    num_draft_tokens: tuple[int | str, ...] = ("auto", 2, 4),
    temperatures: tuple[float, ...] = (0.0,),
) -> Document:
    """A run of 64 new tokens a text, where times wobble by `noise` and are `slower` times as long.

    What is drafted and accepted depends on the prompt alone, so that runs differ in times only.
    """
    methods = all_methods(num_draft_tokens, (), (), temperatures)
    rng = np.random.default_rng(seed)
    measured = []
    for repeat in range(repeats):
        for prompt in range(prompts):
            for index, method in enumerate(methods):
                k = method.fixed or (3 if method.num_draft_tokens == "auto" else 0)
                seconds, tokens, proposed, accepted = _text(prompt, k)
                factor = slower * (slower_methods or {}).get(method.name, 1.0) * float(np.exp(rng.normal(0, noise)))
                steps = tuple(round(one * factor, 6) for one in seconds)
                rounds = len(steps) - 1
                measured.append(
                    Measurement(
                        prompt=prompt,
                        method=index,
                        repeat=repeat,
                        steps_s=steps,
                        steps_tokens=tokens,
                        steps_proposed=proposed,
                        steps_accepted=accepted,
                        prefill_s=steps[0],
                        decode_s=sum(steps[1:]),
                        target_s=rounds * PASS_MS * (1 + 0.15 * k) * factor / 1000,
                        draft_s=rounds * k * STEP_MS * factor / 1000,
                        finish_reason="length",
                        text=f"{prompt:016x}",
                        predicted_speedup=1.5 if method.num_draft_tokens == "auto" else None,
                        energy_j=None,
                    )
                )
    names = [categories[index * len(categories) // prompts] for index in range(prompts)]
    listed = tuple(MeasuredPrompt(f"{name} {index}", name, 50 + index) for index, name in enumerate(names))
    run = {**RUN, "settings": {"max_new_tokens": 64, "repeats": repeats}}
    return Document(run, tuple(methods), listed, (), tuple(measured))


def drifting(document: Document, factor: Callable[[float], float]) -> Document:
    """The run on a machine that takes `factor` times as long, at moments from 0 to 1."""
    measured = []
    for index, one in enumerate(document.measurements):
        times = factor(index / len(document.measurements))
        slower: dict[str, Any] = {
            name: getattr(one, name) * times for name in ("prefill_s", "decode_s", "target_s", "draft_s")
        }
        measured.append(replace(one, steps_s=tuple(times * step for step in one.steps_s), **slower))
    return replace(document, measurements=tuple(measured))
