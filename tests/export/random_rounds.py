"""Random rounds of every rule: `python tests/export/random_rounds.py [ROUNDS] [VOCAB]` counts those that agree."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from graph_rounds import Case, compare

from paceline.sampling import SamplingParams


def random_case(rng: np.random.Generator, vocab_size: int, width: int, num_drafted: int, **params: Any) -> Case:
    """A round with logits as a language model gives them, or flat ones, and a draft that resembles the target."""
    shape = (num_drafted + 1, width)
    if rng.random() < 0.2:
        target = rng.standard_normal(shape)
    else:
        zipf = -1.6 * np.log(np.arange(1, width + 1))
        target = np.stack([rng.permutation(zipf) for _ in range(shape[0])]) + 0.5 * rng.standard_normal(shape)
    target = target.astype(np.float32)
    draft = (target[:num_drafted] + 0.4 * rng.standard_normal((num_drafted, width))).astype(np.float32)
    target_params = SamplingParams(**params)
    draft_params = target_params
    if not target_params.greedy and rng.random() < 0.3:
        draft_params = SamplingParams(temperature=float(rng.uniform(0.5, 1.5)))
    return Case(
        vocab_size=vocab_size,
        prompt=rng.integers(0, vocab_size, 20).tolist(),
        new_tokens=rng.integers(0, min(vocab_size, 50), 5).tolist(),
        draft_logits=draft,
        target_logits=target,
        target_params=target_params,
        draft_params=draft_params,
        seed=int(rng.integers(0, 2**63)),
    )


def random_params(rng: np.random.Generator, vocab_size: int, *, cut_share: float = 0.5) -> dict[str, Any]:
    """Sampling parameters, each set or not by chance."""

    def maybe(share: float, value: Any, neutral: Any) -> Any:
        return value if rng.random() < share else neutral

    ids = rng.integers(0, vocab_size, 4).tolist()
    return {
        "temperature": float(rng.uniform(0.3, 1.5)),
        "top_k": maybe(cut_share, int(rng.choice((1, 3, 20, 90, 1500))), 0),
        "top_p": maybe(cut_share, float(rng.uniform(0.5, 0.99)), 1.0),
        "min_p": maybe(cut_share, float(rng.uniform(0.0, 0.2)), 0.0),
        "typical_p": maybe(cut_share / 2, float(rng.uniform(0.3, 0.95)), 1.0),
        "repetition_penalty": maybe(0.3, float(rng.uniform(0.8, 1.4)), 1.0),
        "presence_penalty": maybe(0.3, float(rng.uniform(-1, 1)), 0.0),
        "frequency_penalty": maybe(0.3, float(rng.uniform(-1, 1)), 0.0),
        "logit_bias": maybe(0.3, {ids[0]: 2.5, ids[1]: -1.0}, {}),
        "banned_token_ids": maybe(0.3, tuple(ids[2:]), ()),
    }


def random_rounds(rng: np.random.Generator, rounds: int, vocab_size: int) -> Iterator[tuple[str, Case]]:
    """Rules and rounds of up to four drafted tokens, some of them deterministic."""
    for number in range(rounds):
        rule = ("token", "block", "deterministic", "token", "greedy")[number % 5]
        params = random_params(rng, vocab_size, cut_share=0.15)
        if rule == "greedy":
            params["temperature"] = 0.0
        case = random_case(rng, vocab_size, vocab_size, int(rng.integers(1, 5)), **params)
        share = 1.0 if rule == "deterministic" else 0.1
        for step, row in enumerate(case.target_logits[:-1]):
            if rng.random() < share and not case.target_params.greedy:
                case.forced[step] = int(row.argmax())
        yield rule, case


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    vocab_size = int(sys.argv[2]) if len(sys.argv) > 2 else 151_936
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    for number, (rule, case) in enumerate(random_rounds(np.random.default_rng(20261129), rounds, vocab_size), start=1):
        counts[f"{rule}: {compare(case, rule)}"] += 1
        if number % 500 == 0:
            print(number, f"{time.perf_counter() - started:.0f} s", dict(counts), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
