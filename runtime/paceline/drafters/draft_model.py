"""A smaller model that drafts: the classic drafter of speculative sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.kv_cache import KVCache
from paceline.model import CausalLM
from paceline.sampling import FloatArray, SamplingParams, distribution, greedy_token
from paceline.streams import Chance, Purpose
from paceline.verify import NO_DRAFT, Draft

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter:
    """Drafts with a causal language model.

    Its cache may be shorter than the target's: when the text has outgrown it, it proposes nothing any more and plain
    decoding goes on. The same once the text holds an id that the draft model does not know.
    """

    def __init__(self, model: CausalLM, cache: KVCache, sampling: SamplingParams, vocab_size: int) -> None:
        """Draft with `model`, whose `cache` is empty, over the ids `0 … vocab_size - 1`.

        `sampling` is how draft tokens are drawn; it may differ from the target's without touching the law.
        """
        self._model = model
        self._cache = cache
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._width = min(model.vocab_size, vocab_size)
        self._unknown_id = False

    @property
    def seconds(self) -> float:
        """Wall time that the draft model's runs have taken."""
        return self._cache.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed the prompt, if it fits."""
        if len(tokens) <= self._cache.room and self._knows(tokens):
            self._model.forward(tokens, self._cache, 1)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Draw up to `num_draft_tokens` tokens behind `tokens`."""
        # Whatever the cache lacks: the last token, and after full acceptance the one before it.
        feed = tokens[self._cache.length :]
        count = min(num_draft_tokens, self._cache.room - len(feed) + 1)  # the last one drawn is not fed
        if count < 1 or not self._knows(feed):
            return NO_DRAFT

        drafted: list[int] = []
        probs: list[FloatArray] = []
        for position in range(len(tokens), len(tokens) + count):
            logits = self._model.forward(feed, self._cache, 1)[0, : self._width]  # [width]
            where = f"The draft model's logits for position {position}"
            if self._sampling.greedy:
                token = greedy_token(logits, where)
            else:
                row = self._padded(distribution(logits, self._sampling, where))  # [vocab]
                token = chance.draw(row, position, Purpose.DRAFT, round_start=len(tokens))
                probs.append(row)
            drafted.append(token)
            feed = (token,)
        return Draft(tuple(drafted), None if self._sampling.greedy else probs)

    def rollback(self, length: int) -> None:
        """Keep at most the first `length` positions."""
        if length < self._cache.length:
            self._cache.rollback(length)

    def _padded(self, probs: FloatArray) -> FloatArray:
        """Probability 0 for the ids that the draft model has no logit for."""
        missing = self._vocab_size - len(probs)
        return np.pad(probs, (0, missing)) if missing else probs

    def _knows(self, tokens: Sequence[int]) -> bool:
        if self._model.vocab_size < self._vocab_size and not self._unknown_id:
            self._unknown_id = any(token >= self._model.vocab_size for token in tokens)
        return not self._unknown_id
