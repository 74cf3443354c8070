"""Measure speculative against plain decoding of one prompt: interleaved, in both orders, warm-up apart.

Both run greedily, so they should write the same text. Quantised kernels round differently with the number of rows, so
where the target's two best logits are nearly equal the texts may part; `compare` finds the place and says how near.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from paceline import SpeculativeDecoder, Stats
from paceline.cost_profile import cpu_name
from paceline.ort_session import onnxruntime_packages

__all__ = ["Comparison", "Divergence", "Run", "compare", "find_divergence", "machine"]

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One measured generation."""

    token_ids: tuple[int, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two greedy texts part.

    Attributes:
        index: of the first new token that differs, from 0; the length of the shorter text if one only ends earlier.
        plain_token: what plain decoding wrote there; None behind its end.
        speculative_token: what speculative decoding wrote there; None behind its end.
        gap: the target's best logit less its second best there, in a fresh pass over the text before it.
        best_tokens: ids of these two logits, the best first.
    """

    index: int
    plain_token: int | None
    speculative_token: int | None
    gap: float
    best_tokens: tuple[int, int]

    @property
    def between_the_best(self) -> bool:
        """Whether the two tokens are the target's two best: then the texts part at a near-tie if `gap` is small."""
        return {self.plain_token, self.speculative_token} == set(self.best_tokens)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain and speculative runs of one prompt. Every figure is a median over its runs."""

    num_draft_tokens: int | str
    plain: tuple[Run, ...]
    speculative: tuple[Run, ...]
    divergence: Divergence | None

    @property
    def plain_tokens_per_second(self) -> float:
        """Tokens per second of plain decoding, the prompt left out."""
        return _tokens_per_second(self.plain)

    @property
    def speculative_tokens_per_second(self) -> float:
        """Tokens per second of speculative decoding, the prompt left out."""
        return _tokens_per_second(self.speculative)

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over proposed tokens."""
        return self.speculative[0].stats.acceptance_rate

    @property
    def block_efficiency(self) -> float | None:
        """Tokens per target pass."""
        return self.speculative[0].stats.block_efficiency

    @property
    def overhead_share(self) -> float:
        """The part of the decoding time outside both models' own runs."""
        return statistics.median(run.stats.overhead_s / run.stats.decode_s for run in self.speculative)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        names = (
            "num_draft_tokens plain_tokens_per_second speculative_tokens_per_second speedup acceptance_rate "
            "block_efficiency overhead_share"
        )
        divergence = self.divergence
        return {
            **{name: getattr(self, name) for name in names.split()},
            "identical": divergence is None,
            "divergence": divergence
            and {
                "index": divergence.index,
                "plain_token": divergence.plain_token,
                "speculative_token": divergence.speculative_token,
                "gap": divergence.gap,
                "between_the_best": divergence.between_the_best,
            },
            "plain_runs": [run.stats.as_dict() for run in self.plain],
            "speculative_runs": [run.stats.as_dict() for run in self.speculative],
        }


def compare(
    decoder: SpeculativeDecoder,
    prompt: Sequence[int],
    *,
    num_draft_tokens: int | str,
    max_new_tokens: int,
    repeats: int,
    on_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run plain and speculative decoding of one prompt, greedily, `repeats` times each.

    The order alternates (plain, speculative, speculative, plain, …): a machine that grows warmer or busier favours
    neither. `on_run` is called after each measured run.
    """
    for k in (0, num_draft_tokens):
        _run(decoder, prompt, k, min(_WARM_UP_TOKENS, max_new_tokens))
    plain: list[Run] = []
    speculative: list[Run] = []
    for repeat in range(repeats):
        order: list[tuple[list[Run], int | str]] = [(plain, 0), (speculative, num_draft_tokens)]
        for runs, k in order if repeat % 2 == 0 else reversed(order):
            runs.append(_run(decoder, prompt, k, max_new_tokens))
            on_run()
    divergence = find_divergence(decoder, prompt, plain[0].token_ids, speculative[0].token_ids)
    return Comparison(num_draft_tokens, tuple(plain), tuple(speculative), divergence)


def find_divergence(
    decoder: SpeculativeDecoder, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Divergence | None:
    """Where two texts after `prompt` part, and how near the target's two best logits are there; None if nowhere."""
    if tuple(plain) == tuple(speculative):
        return None
    shorter = min(len(plain), len(speculative))
    index = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    text = [*prompt, *plain[:index]]
    target = decoder.target
    logits = target.forward(text, target.new_cache(len(text)), 1)[0, : decoder.vocab_size]  # [vocab]
    second, best = np.argpartition(logits, -2)[-2:]
    return Divergence(
        index=index,
        plain_token=plain[index] if index < len(plain) else None,
        speculative_token=speculative[index] if index < len(speculative) else None,
        gap=float(logits[best] - logits[second]),
        best_tokens=(int(best), int(second)),
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("numpy", *onnxruntime_packages(), "tokenizers")},
    }


def _run(decoder: SpeculativeDecoder, prompt: Sequence[int], num_draft_tokens: int | str, max_new_tokens: int) -> Run:
    with decoder.generate(prompt, num_draft_tokens=num_draft_tokens, max_new_tokens=max_new_tokens) as generation:
        for _ in generation:
            pass
        return Run(generation.token_ids, generation.stats)


def _tokens_per_second(runs: Sequence[Run]) -> float:
    return statistics.median(run.stats.tokens_per_second or 0.0 for run in runs)
