"""What every engine's process runs: JSON lines in, JSON lines out. Only the standard library, for foreign Pythons.

Requests:

    {"open": "k3"}                                                     load what the method needs, and warm up
    {"run": "k3", "prompt_ids": […], "max_new_tokens": 128, "temperature": 0.7, "top_p": 0.95, "seed": 1,
     "ignore_end": false, "end_ids": […]}                              temperature 0 is greedy

Answers: {"ready": {versions, methods}} at the start, {"opened": …}, a run's figures, or {"error": sentence}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Engine", "Figures", "Request", "record", "serve"]


@dataclass(frozen=True)
class Request:
    """One text to write; see the module. A text ends before or at an id of `end_ids`, which counts as emitted."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    ignore_end: bool
    end_ids: list[int]


@dataclass
class Figures:
    """What one text cost.

    Attributes:
        token_ids: emitted tokens.
        first_tokens: how many of them came with the pass over the prompt.
        first_s: seconds from the call to these.
        decode_s: seconds from these to the last token.
        steps_s: seconds from the call, or from the block before, to each block of tokens.
        steps_tokens: tokens of each block.
        extra: whatever else the engine tells.
    """

    token_ids: list[int]
    first_tokens: int
    first_s: float
    decode_s: float
    steps_s: list[float]
    steps_tokens: list[int]
    extra: dict[str, Any]


class Engine(Protocol):
    """What an adapter makes of its package."""

    methods: tuple[str, ...]
    versions: dict[str, str]

    def open(self, method: str) -> None:
        """Load what the method needs, if it is not there yet."""

    def run(self, method: str, request: Request) -> Figures:
        """Write one text."""


def record(blocks: Iterator[list[int]], request: Request, extra: Callable[[], dict[str, Any]] = dict) -> Figures:
    """Time an iterator over blocks of new tokens; its first block, maybe empty, comes with the pass over the prompt."""
    ends = set() if request.ignore_end else set(request.end_ids)
    ids: list[int] = []
    seconds: list[float] = []
    tokens: list[int] = []
    last = time.perf_counter()
    for block in blocks:
        now = time.perf_counter()
        ended = next((index for index, token in enumerate(block) if token in ends), None)
        new = block if ended is None else block[: ended + 1]
        ids += new
        seconds.append(now - last)
        tokens.append(len(new))
        last = now
        if ended is not None or len(ids) >= request.max_new_tokens:
            break
    first_s = seconds[0] if seconds else 0.0
    return Figures(ids, tokens[0] if tokens else 0, first_s, sum(seconds[1:]), seconds, tokens, extra())


def serve(engine: Engine) -> None:
    """Answer requests until stdin ends. What the packages print to stdout goes to stderr."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: stopped, it would outlive whoever asks.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    answer({"ready": {"methods": engine.methods, "versions": engine.versions}})
    for line in sys.stdin:
        document = json.loads(line)
        try:
            if "open" in document:
                started = time.perf_counter()
                engine.open(document["open"])
                answer({"opened": document["open"], "seconds": time.perf_counter() - started})
            else:
                method = document.pop("run")
                answer(vars(engine.run(method, Request(**document))))
        except Exception as error:  # whatever a foreign package raises goes to whoever asked
            answer({"error": f"{type(error).__name__}: {error}"})
