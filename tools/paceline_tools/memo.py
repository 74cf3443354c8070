"""A model that runs each text once: thousands of continuations of one prompt share their passes.

What follows a text depends on the text alone, so a row of logits that a real pass has brought serves every later
continuation that gets to the same text. Rounds drawn against it decide by the same rows, whichever pass they ask for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from paceline.kv_cache import KVCache
from paceline.model import CausalLM

__all__ = ["MemoCache", "MemoModel"]

# Rows are float32 and as wide as the vocabulary: 1,700 rows of 152k.
_MEMORY = 2**30


class MemoCache(KVCache):
    """The tokens that a cache would hold; it costs nothing to make one for every continuation."""

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.tokens: list[int] = []

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions."""
        super().rollback(length)
        del self.tokens[length:]


class MemoModel:
    """A `CausalLM` that remembers the rows of another one, which it runs against a single real cache.

    A pass of several rows is a pass of several rows there, too: few-bit kernels round one row in another way.

    Attributes:
        num_passes: of the real model, so far.
    """

    def __init__(self, model: CausalLM, max_length: int, *, memory: int = _MEMORY) -> None:
        """Serve texts of up to `max_length` tokens; the least recently used rows beyond `memory` bytes are dropped."""
        self._model = model
        self._cache = model.new_cache(max_length)
        self._fed: list[int] = []  # the text in the real cache
        self._rows: OrderedDict[tuple[int, ...], NDArray[np.float32]] = OrderedDict()
        self._max_rows = max(memory // (4 * model.vocab_size), 16)
        self.num_passes = 0

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._model.vocab_size

    @property
    def logit_ids(self) -> NDArray[np.int64] | None:
        """The id that each logit stands for."""
        return self._model.logit_ids

    @property
    def max_length(self) -> int:
        """Largest number of positions of a cache."""
        return self._cache.max_length

    def new_cache(self, max_length: int) -> MemoCache:
        """Make an empty cache."""
        return MemoCache(max_length)

    def cache_of(self, tokens: Sequence[int]) -> MemoCache:
        """Make a cache that holds these tokens, without a pass."""
        cache = self.new_cache(self.max_length)
        cache.advance(len(tokens))
        cache.tokens += tokens
        return cache

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Logits `[num_logits, vocab_size]` behind the last `num_logits` tokens, from memory where it has them all."""
        assert isinstance(cache, MemoCache)
        cache.advance(len(tokens))
        cache.tokens += tokens
        text = tuple(cache.tokens)
        ends = range(len(text) - num_logits + 1, len(text) + 1)
        known = sum(1 for _ in takewhile(lambda end: text[:end] in self._rows, ends))
        if known < num_logits:
            self._run(text, known, num_logits)
        rows = [self._rows[text[:end]] for end in ends]
        for end in ends:
            self._rows.move_to_end(text[:end])
        while len(self._rows) > max(self._max_rows, num_logits):
            self._rows.popitem(last=False)
        return np.stack(rows)

    def _run(self, text: tuple[int, ...], known: int, num_logits: int) -> None:
        """Bring the rows behind the first `known` of the last `num_logits` tokens by a pass of the model."""
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._fed, text, strict=False)))
        start = min(shared, len(text) - num_logits + known, len(text) - min(num_logits, 2))
        self._cache.rollback(start)
        count = min(num_logits, len(text) - start)
        logits = self._model.forward(text[start:], self._cache, count)  # [count, vocab]
        self._fed[start:] = text[start:]
        self.num_passes += 1
        for row, end in enumerate(range(len(text) - count + 1, len(text) + 1)):
            # Where a row is known it stays: every continuation shall see the same one.
            self._rows.setdefault(text[:end], logits[row].copy())
