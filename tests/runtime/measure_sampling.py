"""Print what sampling and verification cost per round, without any model: `python tests/runtime/measure_sampling.py`.

Draft and target rows together, K = 4, in numpy and by the graphs of a bundle, which the graphs' provider runs on all
cores; medians. The graphs read the logits where they lie. `… measure_sampling.py numpy` leaves the graphs out.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import numpy as np

from paceline.ort_sampler import BoundGraph, GraphInputs, SamplerGraphs
from paceline.ort_session import open_session
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams
from paceline.streams import Purpose, Streams
from paceline.verify import VERIFICATION_RULES, Draft, DraftProbs, verify
from paceline_export.sampler.draft import greedy_sampler, sampler
from paceline_export.sampler.draw import padded
from paceline_export.sampler.verify import block_verifier, greedy_verifier, token_verifier

VOCABS, NUM_DRAFT_TOKENS, ROUNDS, GRAPH_ROUNDS = (49_152, 151_936), 4, 60, 20

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(0.8),
    "top-p 0.95": SamplingParams(0.8, top_p=0.95),
    "top-k 40": SamplingParams(0.8, top_k=40),
    "top-k 40, top-p 0.95": SamplingParams(0.8, top_k=40, top_p=0.95),
    "min-p 0.05": SamplingParams(0.8, min_p=0.05),
    "typical-p 0.95": SamplingParams(0.8, typical_p=0.95),
    "penalties": SamplingParams(0.8, repetition_penalty=1.1, frequency_penalty=0.2, no_repeat_ngram_size=4),
}
# A text of this length stands before the round, half of it prompt.
TEXT_LENGTH = 1024


def make_logits(kind: str, vocab: int, rng: np.random.Generator) -> FloatArray:
    shape = (NUM_DRAFT_TOKENS + 1, vocab)
    if kind == "flat":
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)
    zipf = -1.6 * np.log(np.arange(1, vocab + 1))
    rows = np.stack([rng.permutation(zipf) for _ in range(shape[0])])
    return (rows + 0.5 * rng.standard_normal(shape)).astype(np.float32)


def one_round(
    draft_logits: FloatArray, target_logits: FloatArray, samplers: list[RowSampler], text: list[int], rule: str
) -> int:
    draft_sampler, target_sampler = samplers
    streams = Streams(int(text[-1]))
    tokens: list[int] = []
    probs: list[DraftProbs] = []
    for row, logits in enumerate(draft_logits):
        if draft_sampler.greedy:
            tokens.append(draft_sampler.greedy_token(logits, text, tokens))
        else:
            probs.append(probs_row := draft_sampler.distribution(logits, text, tokens))
            tokens.append(streams.draw(probs_row, len(text) + row, Purpose.DRAFT))
    draft = Draft(tuple(tokens), None if draft_sampler.greedy else probs)
    return verify(draft, target_logits, target_sampler, text, streams, rule).num_accepted


@functools.cache
def graphs(vocab: int) -> SamplerGraphs:
    models = {
        "draft": sampler(vocab, vocab),
        "greedy_draft": greedy_sampler(vocab, vocab),
        "token": token_verifier(vocab, vocab),
        "block": block_verifier(vocab, vocab),
        "greedy": greedy_verifier(vocab, vocab),
    }
    sessions = {name: open_session(model.SerializeToString()) for name, model in models.items()}
    return SamplerGraphs(sessions, vocab, padded(vocab))


def graph_rounds(
    draft_logits: FloatArray, target_logits: FloatArray, params: SamplingParams, text: list[int], rule: str
) -> float:
    """Median milliseconds of a round by the graphs, whose inputs are bound before the clock starts."""
    rows, vocab = target_logits.shape
    loaded = graphs(vocab)
    inputs = GraphInputs(params, prompt=text, vocab_size=vocab, width=loaded.width)
    draft = loaded.bound("greedy_draft" if params.greedy else "draft", inputs)
    verifier = loaded.bound("greedy" if params.greedy else rule, inputs)
    drafted, probs = np.full((1, rows), -1), np.zeros((rows, loaded.width), np.float32)
    uniforms = np.random.default_rng(1).integers(2**53, size=(rows,))
    shared: dict[str, Any] = {"bias": inputs.bias(len(text), 1), "drafted": drafted}
    last: dict[str, Any] = {
        "logits": target_logits[np.newaxis],
        "draft_probs": probs,
        "any_deterministic": np.array(False),
        "deterministic": np.zeros(rows, np.bool_),
        "accept_uniforms": uniforms,
        "draw_uniforms": uniforms,
    }
    bind(verifier, shared | last)
    verifier.bind_output("verdict", np.empty(3, np.int64))
    times = []
    for _ in range(GRAPH_ROUNDS):
        started = time.perf_counter()
        for step, logits in enumerate(draft_logits):
            bind(draft, shared | {"logits": logits[np.newaxis, np.newaxis], "uniform": uniforms[step : step + 1]})
            draft.bind_output("token", drafted[:, step : step + 1])
            draft.bind_output("healthy", np.empty(1, np.bool_))
            if not params.greedy:
                draft.bind_output("probs", probs[step : step + 1])
            draft.run()
        verifier.run()
        times.append(time.perf_counter() - started)
        drafted[:] = -1
    return 1000 * float(np.median(times))


def bind(graph: BoundGraph, inputs: dict[str, Any]) -> None:
    for name, value in inputs.items():
        graph.bind_input(name, value)


def main() -> None:
    for kind, vocab in ((kind, vocab) for kind in ("zipf", "flat") for vocab in VOCABS):
        rng = np.random.default_rng(0)
        target_logits = make_logits(kind, vocab, rng)
        noise = 0.3 * rng.standard_normal((NUM_DRAFT_TOKENS, vocab))
        draft_logits = (target_logits[:NUM_DRAFT_TOKENS] + noise).astype(np.float32)
        for name, params in SAMPLINGS.items():
            for rule in VERIFICATION_RULES:
                text = rng.integers(vocab, size=TEXT_LENGTH).tolist()
                samplers = [RowSampler(params, vocab_size=vocab, num_prompt_tokens=TEXT_LENGTH // 2) for _ in range(2)]
                times, accepted = [], 0
                for _ in range(ROUNDS):
                    started = time.perf_counter()
                    accepted += one_round(draft_logits, target_logits, samplers, text, rule)
                    times.append(time.perf_counter() - started)
                    text.append(int(rng.integers(vocab)))
                by_graph = ""
                if "numpy" not in sys.argv:
                    by_graph = f"   graphs {graph_rounds(draft_logits, target_logits, params, text, rule):6.2f} ms"
                median = 1000 * np.median(times)
                mean = accepted / ROUNDS
                print(f"{kind:5} {vocab:7} {name:21} {rule:6} numpy {median:6.2f} ms{by_graph}   {mean:.2f} accepted")


if __name__ == "__main__":
    main()
