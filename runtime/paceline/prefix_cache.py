"""Keys and values of earlier texts, so that a prompt that begins like one of them skips that part of its prefill."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError, shown
from .kv_cache import KVCache, SavedKV
from .model import CausalLM

__all__ = ["GenerationCaches", "PrefixCache"]

# Copying fewer positions than this saves less than it takes to manage them.
_SHORTEST = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    model: CausalLM
    tokens: NDArray[np.int64]  # [length]
    saved: SavedKV


class PrefixCache:
    """What the KV caches of finished texts held, up to a number of bytes; the least recently used go first.

    Entries never change: a generation copies the positions that its prompt shares with one of them, which costs
    thousands of times less than computing them. Any number of generations and threads may share one.

    Keys and values that were computed one row at a time may differ in their last bits from those of a prefill. Where
    the two best logits are nearly equal, a text may therefore part from the one that a fresh cache gives, as plain and
    speculative decoding may; and a seed may give another text of the same law, since the draft's probabilities differ
    in their last bits, too.
    """

    def __init__(self, max_bytes: int) -> None:
        """Hold at most `max_bytes` bytes of keys and values.

        Raises:
            InvalidInputError: `max_bytes` is not an integer of at least 1.
        """
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise InvalidInputError(f"max_bytes must be an integer of at least 1, got {shown(max_bytes)}.")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []  # the most recently used last

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values held now."""
        with self._lock:
            return sum(entry.saved.num_bytes for entry in self._entries)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def fill(self, cache: KVCache, model: CausalLM, tokens: Sequence[int]) -> int:
        """Give an empty cache the longest beginning of `tokens` that is known, short of the last token.

        Args:
            cache: made by `model`.
            model: the model whose keys and values are wanted.
            tokens: the prompt. Its last token is left to be fed, since its logits are needed.

        Returns:
            How many positions the cache holds now.
        """
        wanted = np.asarray(tokens[:-1], np.int64)[: cache.max_length]
        with self._lock:
            known = [(_shared(entry.tokens, wanted), entry) for entry in self._entries if entry.model is model]
            length, best = max(known, key=lambda pair: pair[0], default=(0, None))
            if best is None or length < _SHORTEST:
                return 0
            self._entries.remove(best)
            self._entries.append(best)
        cache.restore(best.saved, length)
        return length

    def keep(self, cache: KVCache, model: CausalLM, tokens: Sequence[int]) -> None:
        """Take over what a cache holds; it must not be used any more.

        Args:
            cache: made by `model`, its positions those of `tokens`.
            model: whose keys and values these are.
            tokens: the text, at least as long as the cache.
        """
        length = cache.length
        if length < _SHORTEST:
            return
        saved = cache.save()
        if saved.num_bytes > self.max_bytes:
            return
        new = _Entry(model, np.array(tokens[:length], np.int64), saved)
        with self._lock:
            mine = [entry for entry in self._entries if entry.model is model]
            if any(_shared(entry.tokens, new.tokens) == length for entry in mine):
                return
            covered = [entry for entry in mine if _shared(entry.tokens, new.tokens) == len(entry.tokens)]
            self._entries = [entry for entry in self._entries if entry not in covered]
            self._entries.append(new)
            held = sum(entry.saved.num_bytes for entry in self._entries)
            while held > self.max_bytes:
                held -= self._entries.pop(0).saved.num_bytes


class GenerationCaches:
    """Makes the KV caches of one generation, and hands them to a prefix cache at its end, if there is one."""

    def __init__(self, prompt: Sequence[int], cache_length: int, prefixes: PrefixCache | None = None) -> None:
        self._prompt = prompt
        self._cache_length = cache_length
        self._prefixes = prefixes
        self._made: list[tuple[CausalLM, KVCache]] = []

    def new(self, model: CausalLM) -> KVCache:
        """Make a cache that holds what is known of the prompt.

        Raises:
            InvalidInputError: there is a prefix cache, and this model's caches cannot be saved.
        """
        cache = model.new_cache(min(model.max_length, self._cache_length))
        if self._prefixes:
            if type(cache).save is KVCache.save:
                cache.save()  # raises: it says so before the first token, not behind the last
            self._prefixes.fill(cache, model, self._prompt)
            self._made.append((model, cache))
        return cache

    def num_bytes(self, model: CausalLM) -> int:
        """Bytes that `model`'s cache takes when it is full; 0 for a model that does not tell."""
        length = min(model.max_length, self._cache_length)
        return length * int(getattr(model, "kv_bytes_per_position", 0))

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep what the caches hold of the text `tokens`; they must not be used any more."""
        if self._prefixes:
            for model, cache in self._made:
                self._prefixes.keep(cache, model, tokens)


def _shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(np.argmax(differ)) if differ.any() else length
