"""What the decoder asks of a model, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .kv_cache import KVCache

__all__ = ["CausalLM"]


class CausalLM(Protocol):
    """A causal language model with an explicit KV cache.

    One model may serve any number of caches, from several threads at once.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits. May exceed the tokenizer's vocabulary (padding)."""

    @property
    def logit_ids(self) -> NDArray[np.int64] | None:
        """The id that each logit stands for, `[vocab_size]`, each at most once; None where the i-th stands for id i.

        A model that has them has logits for some of the vocabulary's ids, and can be fed all. It may only draft.
        """

    @property
    def max_length(self) -> int:
        """Largest number of positions that a cache of this model can have."""

    def new_cache(self, max_length: int) -> KVCache:
        """Make an empty cache of at most `max_length` positions (at most the model's `max_length`)."""

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens` behind what `cache` holds and return the logits of the last `num_logits` of them.

        Args:
            tokens: token ids, at least one and at most `cache.room`.
            cache: made by this model's `new_cache`; its length grows by `len(tokens)`.
            num_logits: between 1 and `len(tokens)`.

        Returns:
            float32 `[num_logits, vocab_size]`. Row i scores the token that follows
            `tokens[len(tokens) - num_logits + i]`. The array is valid until the next forward with this cache.

        Raises:
            InvalidInputError: no token, too many tokens, an id outside the vocabulary, or a bad `num_logits`.
        """
