"""Print what sampling and verification cost per round, without any model: `python tests/runtime/measure_sampling.py`.

Draft and target rows together, K = 4, at the vocabulary of Qwen2.5; the median of 60 rounds.
"""

from __future__ import annotations

import time

import numpy as np

from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams
from paceline.streams import Purpose, Streams
from paceline.verify import VERIFICATION_RULES, Draft, DraftProbs, verify

VOCAB, NUM_DRAFT_TOKENS, ROUNDS = 151_936, 4, 60

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


def make_logits(kind: str, rng: np.random.Generator) -> FloatArray:
    shape = (NUM_DRAFT_TOKENS + 1, VOCAB)
    if kind == "flat":
        return (0.5 * rng.standard_normal(shape)).astype(np.float32)
    zipf = -1.6 * np.log(np.arange(1, VOCAB + 1))
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


def main() -> None:
    for kind in ("zipf", "flat"):
        rng = np.random.default_rng(0)
        target_logits = make_logits(kind, rng)
        noise = 0.3 * rng.standard_normal((NUM_DRAFT_TOKENS, VOCAB))
        draft_logits = (target_logits[:NUM_DRAFT_TOKENS] + noise).astype(np.float32)
        for name, params in SAMPLINGS.items():
            for rule in VERIFICATION_RULES:
                text = rng.integers(VOCAB, size=TEXT_LENGTH).tolist()
                samplers = [RowSampler(params, vocab_size=VOCAB, num_prompt_tokens=TEXT_LENGTH // 2) for _ in range(2)]
                times, accepted = [], 0
                for _ in range(ROUNDS):
                    started = time.perf_counter()
                    accepted += one_round(draft_logits, target_logits, samplers, text, rule)
                    times.append(time.perf_counter() - started)
                    text.append(int(rng.integers(VOCAB)))
                median = 1000 * np.median(times)
                print(f"{kind:5} {name:21} {rule:6} {median:6.2f} ms   {accepted / ROUNDS:.2f} accepted")


if __name__ == "__main__":
    main()
