"""What the penalties must know of a text, kept up to date token by token and taken back as cheaply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["History", "TokenCounts"]


class TokenCounts:
    """How often each id occurs, as arrays over the ids that have occurred."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # id → its place in the arrays
        self._ids = np.zeros(64, np.intp)
        self._counts = np.zeros(64, np.int64)

    def add(self, token: int, count: int) -> None:
        """Count `token` `count` times more; less when negative."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += count

    def arrays(self) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Ids that occur and how often, two arrays of the same length, in no particular order."""
        ids, counts = self._ids[: len(self._slots)], self._counts[: len(self._slots)]
        occur = counts > 0
        return ids[occur], counts[occur]


class History:
    """Counts and n-grams of a text whose end changes: drafted tokens come and go, emitted ones stay."""

    def __init__(self, num_prompt_tokens: int, ngram_size: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._ngram_size = ngram_size
        self._tokens: list[int] = []
        self._num_emitted = 0
        self._followers: dict[tuple[int, ...], Counter[int]] = {}
        self.seen = TokenCounts()  # in prompt and new text
        self.new = TokenCounts()  # in the new text

    def move(self, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        """Go to the text `tokens + drafted`. From call to call `tokens` only grows; `drafted` may change."""
        keep = 0
        if self._num_emitted == len(tokens):
            tentative = self._tokens[self._num_emitted :]
            while keep < min(len(tentative), len(drafted)) and tentative[keep] == drafted[keep]:
                keep += 1
        while len(self._tokens) > self._num_emitted + keep:
            self._count(-1)
            self._tokens.pop()
        self._push(tokens[self._num_emitted :])
        self._num_emitted = len(tokens)
        self._push(drafted[keep:])

    def ngram_completions(self) -> list[int]:
        """Ids that would complete an n-gram which the text already holds."""
        size = self._ngram_size - 1
        if len(self._tokens) < size:
            return []
        followers = self._followers.get(tuple(self._tokens[len(self._tokens) - size :]), Counter())
        return [token for token, count in followers.items() if count > 0]

    def _push(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            self._count(1)

    def _count(self, step: int) -> None:
        """Count the last token in (1) or out (-1)."""
        token = self._tokens[-1]
        self.seen.add(token, step)
        if len(self._tokens) > self._num_prompt_tokens:
            self.new.add(token, step)
        if 0 < self._ngram_size <= len(self._tokens):
            before = tuple(self._tokens[len(self._tokens) - self._ngram_size : -1])
            self._followers.setdefault(before, Counter())[token] += step
