"""A server whose texts share passes: its texts are the library's, and its figures say what was shared."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paceline
from paceline import SamplingParams
from paceline.bundle import Bundle
from paceline_export.lanes import add_lanes

from .conftest import running

PROMPTS = ("the cat", "a much longer prompt, of other words", "x")


def test_texts_that_share_passes_are_the_librarys(damaged: Path) -> None:
    add_lanes(Bundle.open(damaged), 4)
    decoder, alone = (paceline.load(damaged, profile=None, max_batch=max_batch) for max_batch in (4, 1))

    def ask(prompt: str) -> Any:
        body = {"prompt": prompt, "max_tokens": 30, "min_tokens": 30, "n": 4, "seed": 7, "temperature": 0.7}
        return server.post("/v1/completions", body).json()["choices"]

    with running(decoder, max_batch=4) as server, ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(ask, PROMPTS))
        figures = server.get("/metrics").text
    for prompt, choices in zip(PROMPTS, answers, strict=True):
        for request, choice in enumerate(choices):
            sampling = SamplingParams(temperature=0.7, seed=7, min_new_tokens=30)
            generation = alone.generate(prompt, sampling, max_new_tokens=30, request=request)
            list(generation)
            assert choice["text"] == generation.text
    passes, texts = (
        float(re.findall(rf"^paceline_shared_{name}_total (\S+)$", figures, re.MULTILINE)[0])
        for name in ("passes", "texts")
    )
    assert 0 < passes < texts
