"""What the decoder asks of a model, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .device_array import AnyArray
from .errors import InvalidInputError
from .kv_cache import KVCache

__all__ = ["BatchedLM", "CausalLM", "Feed", "ResidentLM", "checked_ids"]


class CausalLM(Protocol):
    """A causal language model with an explicit KV cache.

    One model may serve any number of caches, from several threads at once. It may also have `prefill_rows`, an integer:
    longer prompts are then fed in pieces of so many tokens, between which other texts may have their turns; and
    `kv_bytes_per_position`, what an engine's budget of memory counts by.
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


class ResidentLM(CausalLM, Protocol):
    """A model whose logits can stay where it runs, for graphs that read them there."""

    def forward_resident(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward`, with logits that stay where the model runs."""

    def forward_in_place(self, ids: AnyArray, cache: KVCache, num_logits: int) -> AnyArray:
        """As `forward_resident`, with ids `[count]` that other graphs have written: they are not looked at."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """What one text gives to a pass over several: the arguments of `CausalLM.forward`."""

    tokens: Sequence[int]
    cache: KVCache
    num_logits: int


class BatchedLM(CausalLM, Protocol):
    """A model that can feed several caches in one pass, each with tokens of its own number."""

    @property
    def max_batch(self) -> int:
        """Most texts in one pass."""

    def forward_all(self, feeds: Sequence[Feed]) -> list[NDArray[np.float32]]:
        """Do what `forward` does with each of them, in one pass.

        Its seconds are shared out among the caches' `seconds`. Each array is valid until the next forward with its own
        cache. Logits may differ from those of a forward alone in their last bits.

        Args:
            feeds: 1 to `max_batch` of them, each with another cache.

        Raises:
            InvalidInputError: a feed that `forward` would refuse. Whatever is raised, no cache has grown.
        """


def checked_ids(tokens: Sequence[int], cache: KVCache, num_logits: int, num_input_ids: int) -> NDArray[np.int64]:
    """The tokens of a forward as an array, once its arguments are what `CausalLM.forward` asks for.

    Raises:
        InvalidInputError: they are not.
    """
    count = len(tokens)
    if not 1 <= count <= cache.room:
        raise InvalidInputError(
            f"Cannot feed {count} tokens: at least 1 is needed and the KV cache has room for {cache.room}."
        )
    if not 1 <= num_logits <= count:
        raise InvalidInputError(f"num_logits must be between 1 and the {count} tokens fed, got {num_logits}.")
    ids = np.array(tokens, np.int64)
    if ids.min() < 0 or ids.max() >= num_input_ids:
        bad = next(int(token) for token in tokens if not 0 <= token < num_input_ids)
        raise InvalidInputError(f"Token id {bad} is outside the model's {num_input_ids} ids.")
    return ids
