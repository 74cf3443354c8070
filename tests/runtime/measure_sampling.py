"""Print what sampling and verification cost per round, without any model: `python tests/runtime/measure_sampling.py`.

Draft and target rows together, K = 4, at the vocabulary of Qwen2.5; the median of 60 rounds.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.sampling import FloatArray, SamplingParams, distribution, greedy_token
from paceline.streams import Purpose, Streams
from paceline.verify import Draft, verify

VOCAB, NUM_DRAFT_TOKENS, ROUNDS = 151_936, 4, 60

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(0.8),
    "top-p 0.95": SamplingParams(0.8, top_p=0.95),
    "top-k 40": SamplingParams(0.8, top_k=40),
    "top-k 40, top-p 0.95": SamplingParams(0.8, top_k=40, top_p=0.95),
}


def make_logits(kind: str, rng: np.random.Generator) -> FloatArray:
    shape = (NUM_DRAFT_TOKENS + 1, VOCAB)
    if kind == "flat":
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)
    zipf = -1.6 * np.log(np.arange(1, VOCAB + 1))
    rows = np.stack([rng.permutation(zipf) for _ in range(shape[0])])
    return (rows + 0.5 * rng.standard_normal(shape)).astype(np.float32)


def one_round(draft_logits: FloatArray, target_logits: FloatArray, params: SamplingParams, streams: Streams) -> int:
    tokens: list[int] = []
    probs: list[FloatArray] = []
    for row, logits in enumerate(draft_logits):
        if params.greedy:
            tokens.append(greedy_token(logits))
        else:
            probs.append(distribution(logits, params))
            tokens.append(streams.draw(probs[-1], row, Purpose.DRAFT))
    draft = Draft(tuple(tokens), None if params.greedy else probs)
    return verify(draft, target_logits, params, streams, 0).num_accepted


def main() -> None:
    for kind in ("zipf", "flat"):
        rng = np.random.default_rng(0)
        target_logits = make_logits(kind, rng)
        noise = 0.3 * rng.standard_normal((NUM_DRAFT_TOKENS, VOCAB))
        draft_logits = (target_logits[:NUM_DRAFT_TOKENS] + noise).astype(np.float32)
        for name, params in SAMPLINGS.items():
            times, accepted = [], 0
            for seed in range(ROUNDS):
                started = time.perf_counter()
                accepted += one_round(draft_logits, target_logits, params, Streams(seed))
                times.append(time.perf_counter() - started)
            print(f"{kind:5} {name:21} {1000 * np.median(times):6.2f} ms   {accepted / ROUNDS:.2f} accepted")


if __name__ == "__main__":
    main()
