"""Texts of a pair, recorded once, and models that play them again: what a planner decides then costs no model to see.

A recording holds a text of the target and, at each place of it, what the draft model would propose there, how sure both
models were, and how the draft model goes on behind a proposal that falls. Text and proposals are fixed, so every way of
drafting writes the same text. Proposals of a drawn text are drawn once: each stands with the probability that the token
rule gives it behind what was emitted, min(1, draft's ÷ target's).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from paceline import SamplingParams, SpeculativeDecoder
from paceline.costs import CostsByLength
from paceline.kv_cache import KVCache
from paceline.model import CausalLM
from paceline.prefix_cache import GenerationCaches
from paceline.sampling import FloatArray, distribution, softmax_at

from .peers.prompts import Prompt

__all__ = ["RecordedCache", "Recording", "in_words", "record", "recorded_pair"]

# Tokens that the draft model goes on with behind one that falls, or fewer where it is less sure than this: no plan goes
# on there. Behind them it is as sure as it was last.
_ASTRAY = 5
_UNSURE = 0.3
# What a token that the draft model has missed takes, in steps, from the third row of a run on: as the planner has it.
_MISSED_TOKEN = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """One text.

    Attributes:
        prompt: its name.
        category: the prompt's.
        sampling: how its tokens were drawn, in words.
        max_new_tokens: that it might have had; a shorter text ends with its last token.
        prompt_ids: the prompt.
        token_ids: the text behind it, `[n]`.
        sure: the target's largest probability at temperature 1 at each place of the text, `[n]`.
        proposed: what the draft model proposes at each place, `[n]`.
        draft_sure: the largest probability of what it was drawn from, `[n]`; at temperature 1 of a greedy text.
        astray: by place, what the draft model goes on with behind a proposal that falls, and how sure it is.
    """

    prompt: str
    category: str
    sampling: str
    max_new_tokens: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sure: tuple[float, ...]
    proposed: tuple[int, ...]
    draft_sure: tuple[float, ...]
    astray: dict[int, tuple[tuple[int, float], ...]]

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """From a line of JSON."""
        found: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        found["astray"] = {int(place): tuple(map(tuple, more)) for place, more in fields["astray"].items()}
        return cls(**found)


class _Law:
    """What a token is drawn from: the ids that it may be, and their probabilities."""

    def __init__(self, logits: FloatArray, ids: NDArray[np.int64], sampling: SamplingParams) -> None:
        if sampling.greedy:
            best = int(logits.argmax())
            self.ids, self.probs, self.largest = ids[[best]], np.ones(1), softmax_at(logits, best)
        else:
            probs = distribution(logits, sampling)
            kept = np.flatnonzero(probs)
            self.ids, self.probs, self.largest = ids[kept], probs[kept].astype(float), float(probs.max())

    def __call__(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.probs[places], 0.0)

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.choice(self.ids, p=self.probs / self.probs.sum()))

    def proposal(self, target: _Law, emitted: int, rng: np.random.Generator) -> int:
        """A token of this law, given that `target` emitted that one by the token rule."""
        one = np.array([emitted])
        if rng.random() * target(one)[0] < self(one)[0]:
            return emitted
        beyond = np.maximum(self.probs - target(self.ids), 0.0)
        if not beyond.any():  # two tokens were nearly equal, and one row or many rows told
            return int(self.ids[self.probs.argmax()])
        return int(rng.choice(self.ids, p=beyond / beyond.sum()))


def record(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    max_new_tokens: int,
    rng: np.random.Generator,
) -> Recording:
    """Write a text, then run both models along it."""
    draft = decoder.draft
    assert draft is not None
    seeded = dataclasses.replace(sampling, seed=None if sampling.greedy else int(rng.integers(1 << 62)))
    generation = decoder.generate(prompt_ids, seeded, max_new_tokens=max_new_tokens)
    for _ in generation:
        pass
    begin, end = len(prompt_ids), len(prompt_ids) + max_new_tokens
    text = [*prompt_ids, *generation.token_ids]
    caches = GenerationCaches(text, end + _ASTRAY, decoder.prefixes)

    def along(model: CausalLM) -> tuple[FloatArray, KVCache]:
        """The model's rows for every place of the text, `[n, vocab]`, and its cache."""
        cache = caches.new(model)
        cache.rollback(min(cache.length, begin - 1))
        return model.forward(text[cache.length : -1], cache, len(text) - begin), cache

    rows = along(decoder.target)[0][:, : decoder.vocab_size]
    all_ids = np.arange(decoder.vocab_size)
    sure = [round(softmax_at(row, int(row.argmax())), 4) for row in rows]
    laws = [_Law(row, all_ids, sampling) for row in rows]

    ids = all_ids[: draft.vocab_size] if draft.logit_ids is None else draft.logit_ids
    rows, cache = along(draft)
    drafts = [_Law(row[: len(ids)], ids, sampling) for row in rows]
    proposed = [one.proposal(law, token, rng) for one, law, token in zip(drafts, laws, text[begin:], strict=True)]
    astray: dict[int, tuple[tuple[int, float], ...]] = {}
    for place in reversed(range(len(laws))):  # what is overwritten is needed no more
        token = proposed[place]
        more: list[tuple[int, float]] = []
        if token == text[begin + place]:
            continue
        cache.rollback(begin + place)
        while len(more) < _ASTRAY and token not in decoder.eos_token_ids and not (more and more[-1][1] < _UNSURE):
            law = _Law(draft.forward([token], cache, 1)[0, : len(ids)], ids, sampling)
            token = law.draw(rng)
            more.append((token, round(law.largest, 4)))
        astray[place] = tuple(more)
    return Recording(
        prompt.name,
        prompt.category,
        in_words(sampling),
        max_new_tokens,
        tuple(prompt_ids),
        tuple(text[begin:]),
        tuple(sure),
        tuple(proposed),
        tuple(round(one.largest, 4) for one in drafts),
        astray,
    )


def in_words(sampling: SamplingParams) -> str:
    """How tokens are drawn."""
    return "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


class RecordedCache(KVCache):
    """A KV cache of a recorded model, with a clock of its own.

    Attributes:
        agreed: tokens at its beginning that are the recorded text's.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.agreed = 0

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions."""
        super().rollback(length)
        self.agreed = min(self.agreed, length)


class _RecordedModel:
    """One model of a recording: its rows have the recorded token as the largest, as sure as it was.

    Attributes:
        seconds: of all its runs.
    """

    logit_ids: NDArray[np.int64] | None = None
    max_length = 1 << 20

    def __init__(
        self,
        recording: Recording,
        costs: CostsByLength,
        small: dict[int, int],
        *,
        is_draft: bool,
        noise: float,
        rng: np.random.Generator,
    ) -> None:
        self._recording, self._costs, self._small, self._is_draft = recording, costs, small, is_draft
        self._text = [small[token] for token in (*recording.prompt_ids, *recording.token_ids)]
        self._noise, self._rng = noise, rng
        self.seconds = 0.0

    @property
    def vocab_size(self) -> int:
        return len(self._small) + 1

    def new_cache(self, max_length: int) -> RecordedCache:
        return RecordedCache(max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        cache = cast(RecordedCache, cache)
        costs, count = self._costs.at(cache.length), len(tokens)
        seconds = costs.draft_step * (1 + _MISSED_TOKEN * max(count - 2, 0)) if self._is_draft else costs.target(count)
        seconds *= math.exp(self._noise * self._rng.standard_normal())
        cache.seconds += seconds
        self.seconds += seconds
        rows = []
        for index, token in enumerate(tokens, 1):
            if cache.agreed == cache.length and self._text[cache.length : cache.length + 1] == [token]:
                cache.agreed += 1
            cache.advance(1)
            if index > count - num_logits:
                rows.append(self._row(cache))
        return np.stack(rows)

    def _row(self, cache: RecordedCache) -> NDArray[np.float32]:
        one, place = self._recording, cache.agreed - len(self._recording.prompt_ids)
        token, sure = -1, 0.1
        if cache.agreed < cache.length:  # behind a proposal that falls
            behind = one.astray.get(place, ()) if self._is_draft else ()
            if behind:
                astray = cache.length - cache.agreed - 1
                token, sure = behind[astray] if astray < len(behind) else (-1, behind[-1][1])
        elif 0 <= place < len(one.token_ids):
            token = one.proposed[place] if self._is_draft else one.token_ids[place]
            sure = one.draft_sure[place] if self._is_draft else one.sure[place]
        return self._spike(self._small.get(token, len(self._small)), sure)

    def _spike(self, token: int, sure: float) -> NDArray[np.float32]:
        """Logits whose largest is that of `token`, with that probability."""
        row = np.zeros(self.vocab_size, np.float32)
        others = self.vocab_size - 1
        row[token] = max(math.log(max(sure, 1e-3) * others / max(1 - sure, 1e-5)), 0.01)
        return row


def recorded_pair(
    recording: Recording, costs: CostsByLength, *, noise: float = 0.0, told: bool = True
) -> tuple[SpeculativeDecoder, list[int], Callable[[], float]]:
    """A decoder that writes the recorded text, the prompt for it, both in ids of their own, and its models' seconds.

    Args:
        recording: of the text.
        costs: what runs take.
        noise: of the clock: standard deviation of the logarithm.
        told: whether plans are told the costs; else they measure.
    """
    known = dict.fromkeys((*recording.prompt_ids, *recording.token_ids, *recording.proposed))
    known |= dict.fromkeys(token for more in recording.astray.values() for token, _ in more)
    small = {token: index for index, token in enumerate(known)}
    rng = np.random.default_rng(0)
    target, draft = (
        _RecordedModel(recording, costs, small, is_draft=is_draft, noise=noise, rng=rng) for is_draft in (False, True)
    )
    ended = len(recording.token_ids) < recording.max_new_tokens
    ends = (small[recording.token_ids[-1]],) if ended else ()
    decoder = SpeculativeDecoder(target, draft, None, target.vocab_size, ends, costs=costs if told else None)
    return decoder, [small[token] for token in recording.prompt_ids], lambda: target.seconds + draft.seconds
