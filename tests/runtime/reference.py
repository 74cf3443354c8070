"""Plain decoding as the settings define it: lists, float64, full sorts, every row from its whole text.

Written from the definitions, with no code of paceline but the tables of `TableModel`, so that what agrees with it is
right twice over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.sampling import SamplingParams
from paceline.testing import TableModel

Law: TypeAlias = dict[tuple[int, ...], float]
# The ids that may follow some new text; None where all may.
Allowed: TypeAlias = Callable[[tuple[int, ...]], set[int] | None]


@dataclass(frozen=True)
class Setting:
    """What the law of a text depends on besides the model and the prompt."""

    params: SamplingParams
    ends: frozenset[int] = frozenset()
    allowed: Allowed | None = None


def bitmask(ids: set[int] | None, vocab: int) -> NDArray[np.uint32] | None:
    """The same set as a constraint gives it."""
    if ids is None:
        return None
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


def constraint_of(setting: Setting, vocab: int) -> Callable[[Sequence[int]], NDArray[Any] | None] | None:
    allowed = setting.allowed
    return None if allowed is None else lambda new: bitmask(allowed(tuple(new)), vocab)


def naive_logits(logits: Sequence[float], prompt: Sequence[int], new: Sequence[int], setting: Setting) -> list[float]:
    """The row of logits behind `prompt + new`, after penalties, bias and masks."""
    params, row, text = setting.params, list(logits), [*prompt, *new]
    for token in set(text):
        x, penalty = row[token], params.repetition_penalty
        row[token] = x / penalty if x > 0 else x * penalty
    for token, count in Counter(new).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias

    forbidden = set(params.banned_token_ids)
    if size := params.no_repeat_ngram_size:
        for token in range(len(row)):
            last = (*text, token)[-size:]
            grams = {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
            forbidden |= {token} if last in grams else set()
    if len(new) < params.min_new_tokens:
        forbidden |= setting.ends
    if setting.allowed and (allowed := setting.allowed(tuple(new))) is not None:
        forbidden |= set(range(len(row))) - allowed
    if len(new) < len(params.forced_token_ids):
        forbidden |= set(range(len(row))) - {params.forced_token_ids[len(new)]}
    return [-math.inf if token in forbidden else x for token, x in enumerate(row)]


def naive_cuts(logits: Sequence[float], params: SamplingParams) -> tuple[NDArray[np.float64], float]:
    """Probabilities after temperature and cuts, and how near a decision of a cut was to falling otherwise."""
    values = np.asarray(logits, dtype=np.float64)
    if params.temperature == 0:
        one_hot = np.zeros(len(values))
        one_hot[max(range(len(values)), key=lambda i: (values[i], -i))] = 1
        return one_hot, math.inf
    margins = [math.inf]
    with np.errstate(over="ignore"):
        weights = np.exp((values - values.max()) / params.temperature)
    probs: NDArray[np.float64] = weights / weights.sum()

    def keep(ids: Sequence[int]) -> NDArray[np.float64]:
        kept = np.zeros(len(probs))
        kept[list(ids)] = probs[list(ids)]
        kept /= kept.sum()
        return kept

    def smallest_set(order: Sequence[int], needed: float) -> Sequence[int]:
        mass = np.cumsum(probs[list(order)])
        margins.append(float(abs(mass - needed).min()))
        return order[: min(int((mass < needed).sum()) + 1, len(order))]

    if params.top_k:
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))
        probs = keep(order[: params.top_k])
    if params.top_p < 1:
        order = sorted(np.flatnonzero(probs).tolist(), key=lambda i: (-probs[i], i))
        probs = keep(smallest_set(order, params.top_p))
    if params.min_p > 0:
        least = params.min_p * probs.max()
        margins += [abs(p - least) for p in probs if p != probs.max()]
        probs = keep([i for i, p in enumerate(probs) if p >= least and p > 0])
    if params.typical_p < 1:
        possible: list[int] = np.flatnonzero(probs).tolist()
        entropy = -sum(probs[i] * math.log(probs[i]) for i in possible)
        distance = {i: abs(-math.log(probs[i]) - entropy) for i in possible}
        order = sorted(possible, key=lambda i: (distance[i], i))
        kept = smallest_set(order, params.typical_p)
        inside, outside = kept[-1], order[len(kept) : len(kept) + 1]
        margins += [distance[i] - distance[inside] for i in outside if probs[i] != probs[inside]]
        probs = keep(kept)
    return probs, min(margins)


def naive_distribution_of(logits: Sequence[float], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities after temperature and cuts."""
    return naive_cuts(logits, params)[0]


def reference_law(
    target: TableModel, prompt: Sequence[int], num_tokens: int, setting: Setting, vocab: int | None = None
) -> tuple[Law, float]:
    """The law of the next tokens by the chain rule, and the smallest margin of any cut on the way."""
    law: Law = {(): 1.0}
    margin = math.inf
    for length in range(num_tokens):
        for text in [text for text in law if len(text) == length and not setting.ends & set(text)]:
            reached = law.pop(text)
            logits = target.next_logits([*prompt, *text])[:vocab].astype(np.float64).tolist()
            row = naive_logits(logits, prompt, text, setting)
            assert max(row) > -math.inf, f"nothing is left behind {text}"
            probs, nearest = naive_cuts(row, setting.params)
            margin = min(margin, nearest)
            law |= {(*text, token): reached * p for token, p in enumerate(probs) if p > 0}
    return law, margin


def total_variation(one: Law, other: Law) -> float:
    return sum(abs(one.get(text, 0) - other.get(text, 0)) for text in one.keys() | other.keys()) / 2
