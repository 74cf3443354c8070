"""Speedup against K, as the theory has it from what a benchmark measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.theory import speedup

from .document import Document
from .measurement import Measurement
from .methods import PLAIN

__all__ = ["acceptance_by_place", "forecast", "pass_and_rest"]


def forecast(document: Document, by_method: Mapping[int, Sequence[Measurement]]) -> list[dict[str, Any]]:
    """One curve for each drafter and rule that ran with a fixed K, up to the largest K: geometric means over prompts.

    For each prompt and K it is what `paceline.theory.speedup` gives. Costs are means over all texts, over the mean
    round of plain decoding: v(K) of the target's passes at the measured K, plain decoding's K = 0 among them, and on
    lines between; c of the draft's time for each drafted token; o of the rest of a round. Acceptance by place is the
    prompt's: rounds in which the token stood, over those that proposed it and in which all before it stood.
    """
    families: dict[tuple[str | None, str], dict[int, Sequence[Measurement]]] = {}
    plain: Sequence[Measurement] = ()
    for index, texts in by_method.items():
        method = document.methods[index]
        if method.name == PLAIN:
            plain = texts
        elif method.fixed and not method.bundle and sum(one.rounds for one in texts):
            families.setdefault((method.drafter, method.verification), {})[method.fixed] = texts
    plain_pass, plain_rest = pass_and_rest(plain)
    unit = plain_pass + plain_rest
    if not unit:
        return []
    return [
        {
            "drafter": drafter,
            "verification": verification,
            "points": _curve(dict(sorted(by_k.items())), plain_pass, unit),
        }
        for (drafter, verification), by_k in families.items()
    ]


def _curve(by_k: Mapping[int, Sequence[Measurement]], plain_pass: float, unit: float) -> list[dict[str, Any]]:
    """Points of a curve; `plain_pass` and `unit`, plain decoding's round, are in seconds."""
    rounds = [pass_and_rest(texts) for texts in by_k.values()]
    measured = [0, *by_k]
    passes = [seconds / unit for seconds in (plain_pass, *(target for target, _ in rounds))]
    rest = max(statistics.mean(other for _, other in rounds) / unit, 0.0)
    texts = [one for found in by_k.values() for one in found]
    drafted = sum(sum(one.steps_proposed) for one in texts)
    step = sum(one.draft_s for one in texts) / drafted / unit if drafted else 0.0
    largest = max(by_k)
    by_prompt: dict[int, list[Measurement]] = defaultdict(list)
    for one in texts:
        by_prompt[one.prompt].append(one)
    pooled = acceptance_by_place(texts, [0.0] * largest)
    rates = [acceptance_by_place(found, pooled) for found in by_prompt.values()]

    def cost(k: int) -> float:
        return float(np.interp(k, measured, passes))

    return [
        {
            "k": k,
            "speedup": statistics.geometric_mean(
                speedup(rate, k, step, verification_cost=cost, overhead=rest) for rate in rates
            ),
        }
        for k in range(1, largest + 1)
    ]


def pass_and_rest(texts: Sequence[Measurement]) -> tuple[float, float]:
    """Seconds of a round in the target, and outside both models."""
    rounds = sum(one.rounds for one in texts)
    if not rounds:
        return 0.0, 0.0
    target = sum(one.target_s for one in texts)
    rest = sum(one.decode_s - one.draft_s for one in texts) - target
    return target / rounds, rest / rounds


def acceptance_by_place(texts: Sequence[Measurement], unseen: Sequence[float]) -> list[float]:
    """By place, as many as `unseen` has: it says what is taken where no round got to the place."""
    proposed = np.concatenate([np.array(one.steps_proposed[1:], np.int64) for one in texts])
    accepted = np.concatenate([np.array(one.steps_accepted[1:], np.int64) for one in texts])
    rates = []
    for place, otherwise in enumerate(unseen, 1):
        reached = int(((proposed >= place) & (accepted >= place - 1)).sum())
        rates.append(int((accepted >= place).sum()) / reached if reached else otherwise)
    return rates
