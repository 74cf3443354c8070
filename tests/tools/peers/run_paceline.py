"""paceline's own process: `python -m tests.tools.peers.run_paceline BUNDLE`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import paceline
from paceline import SamplingParams
from paceline_tools.peers.line_server import Figures, Request, record, serve

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"num_draft_tokens": 0},
    "auto": {},
    "auto-draft-model": {"drafter": "draft-model"},
    "auto-prompt-lookup": {"drafter": "prompt-lookup"},
    **{f"k{k}": {"drafter": "draft-model", "num_draft_tokens": k} for k in range(1, 7)},
}


class Paceline:
    """A bundle with a draft model."""

    def __init__(self, bundle: str) -> None:
        self.decoder = paceline.load(bundle)
        self.methods = tuple(METHODS)
        self.versions = {name: version(name) for name in ("onnxruntime", "numpy")}

    def open(self, method: str) -> None:
        """The pair is there from the start."""

    def run(self, method: str, request: Request) -> Figures:
        """Write one text; without a seed, as greedy texts are, the clock may plan it. A negative seed is none."""
        decoder = dataclasses.replace(self.decoder, eos_token_ids=()) if request.ignore_end else self.decoder
        seed = request.seed if request.temperature and request.seed >= 0 else None
        sampling = SamplingParams(request.temperature, top_p=request.top_p, seed=seed)
        generation = decoder.generate(
            request.prompt_ids, sampling, max_new_tokens=request.max_new_tokens, **METHODS[method]
        )

        def blocks() -> Iterator[list[int]]:
            for step in generation:
                yield list(step.token_ids)

        figures = record(blocks(), request, lambda: {"stats": generation.stats.as_dict()})
        # The drafter's own pass over the prompt comes after the first token: it is the prompt's, not the decoding's.
        stats = generation.stats
        figures.first_s, figures.decode_s = stats.prefill_s, stats.decode_s
        return figures


if __name__ == "__main__":
    serve(Paceline(sys.argv[1]))
