"""A draft model with a tokenizer of its own, as a model over the target's ids.

Source of the method by intersection: Timor et al. 2025 (arXiv 2502.05202), token-level intersection. The draft's
distribution is that of the ids that both vocabularies have, renormalised; it is the one that tokens are drawn from, so
the target's law is kept by the usual rules of verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError
from .kv_cache import KVCache, SavedKV
from .model import CausalLM, checked_ids
from .retokenizer import RetokenizedText, Retokenizer
from .strand import text_time

__all__ = ["TranslatedCache", "TranslatedModel"]

# Positions of the draft's own cache for each position of the target's, and some more: its tokens may be shorter.
_POSITIONS = 2
_MORE = 64


class TranslatedCache(KVCache):
    """A cache of the target's tokens for a draft that reads them in its own.

    Its length is that of the text in the target's tokens. The draft's own cache holds the text as the draft's tokenizer
    splits it, as far as that is unchanged since it was fed.

    Attributes:
        text: what the cache stands for.
        inner: the draft's own cache.
    """

    def __init__(self, model: TranslatedModel, max_length: int) -> None:
        super().__init__(max_length)
        self.model = model
        self.text = RetokenizedText(model.retokenizer)
        self.inner = model.inner.new_cache(model.num_positions(max_length))
        self._tokens: list[int] = []
        self._fed: list[int] = []  # what the draft's own cache holds
        self._outgrown = False

    @property
    def room(self) -> int:
        """Number of positions that can still be fed; none once the text has outgrown the draft's own cache."""
        return 0 if self._outgrown else super().room

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions; the draft's own cache follows when it is fed again."""
        super().rollback(length)
        self.text.truncate(length)
        del self._tokens[length:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the target to the text; nothing runs."""
        self.advance(len(tokens))
        self.text.extend(tokens)
        self._tokens += tokens

    def catch_up(self) -> list[int]:
        """Take the draft's own cache back to what it shares with the text; the draft's ids that it then lacks.

        At least one, whose logits tell what follows; none where the text is empty, or has outgrown the cache.
        """
        self.text.forget(len(self._fed))
        same, ids = self.text.take()
        known = self._fed[same:]
        shared = _num_shared(known, ids)
        if shared == len(ids) and same + shared:  # all is known, but the last logits are gone
            shared -= 1
        if shared < 0:
            same, ids, shared = same - 1, [self._fed[same - 1]], 0
        self.inner.rollback(same + shared)
        del self._fed[same + shared :]
        feed = ids[shared:]
        if len(feed) > self.inner.room:
            self._outgrown = True
            return []
        return feed

    def forward(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Feed the draft's own ids, as many as there is room for; logits `[width]` of the draft behind the last."""
        row: NDArray[np.float32] = self.model.inner.forward(ids, self.inner, 1)[0]
        self._fed += ids
        return row

    def save(self) -> SavedKV:
        """Give away the draft's own keys and values, the text, and the ids that they are of."""
        saved = self.inner.save()
        return SavedKV((saved, tuple(self._tokens), tuple(self._fed)), saved.num_bytes)

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with the first `length` tokens of another cache's text; see `KVCache.restore`."""
        inner, tokens, fed = saved.state
        self.extend(tokens[:length])
        _, ids = self.text.take()
        shared = min(_num_shared(ids, fed), self.inner.max_length)
        if shared:
            self.inner.restore(inner, shared)
        self._fed = ids[:shared]


class TranslatedModel:
    """A `CausalLM` over the target's ids, run by a draft model that has another tokenizer.

    It has logits for the ids that both vocabularies share. Where a text has outgrown the draft's own cache all of them
    are 0, and its cache has no room any more.

    Attributes:
        inner: the draft model over its own ids.
        retokenizer: from the target's ids to the draft's.
        method: how drafts are made with it; see `paceline.bundle.DraftTokenizerEntry`.
    """

    def __init__(
        self, inner: CausalLM, retokenizer: Retokenizer, method: Literal["intersection", "text"] = "intersection"
    ) -> None:
        """Read and draft with `inner`.

        Raises:
            InvalidInputError: the vocabularies share no id that `inner` has a logit for.
        """
        self.inner = inner
        self.retokenizer = retokenizer
        self.method = method
        own, others = retokenizer.shared_ids
        logit_ids = inner.logit_ids
        known = np.arange(inner.vocab_size) if logit_ids is None else logit_ids
        is_known = np.isin(own, known)
        if not is_known.any():
            raise InvalidInputError(
                "The draft model's tokenizer shares no id with the target's that it has logits for."
            )
        # Where each shared id's logit stands among the draft's own.
        order = np.argsort(known)
        self._columns = order[np.searchsorted(known, own[is_known], sorter=order)]
        self._logit_ids: NDArray[np.int64] = others[is_known].astype(np.int64)

    @property
    def vocab_size(self) -> int:
        """Number of shared ids that there are logits for."""
        return len(self._logit_ids)

    @property
    def logit_ids(self) -> NDArray[np.int64]:
        """The target's id that each logit stands for."""
        return self._logit_ids

    @property
    def max_length(self) -> int:
        """Largest number of positions that a cache can have."""
        return self.inner.max_length

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of keys and values that a cache takes for each of its positions, some more of them being kept free."""
        return _POSITIONS * int(getattr(self.inner, "kv_bytes_per_position", 0))

    def num_positions(self, max_length: int) -> int:
        """Positions of the draft's own cache for a text of so many of the target's tokens."""
        return min(self.inner.max_length, _POSITIONS * max_length + _MORE)

    def new_cache(self, max_length: int) -> TranslatedCache:
        """Make an empty cache for a text of at most so many of the target's tokens."""
        if max_length > self.max_length:
            raise InvalidInputError(f"A cache of {max_length} positions exceeds the model's {self.max_length}.")
        return TranslatedCache(self, max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed tokens of the target; see `paceline.model.CausalLM.forward`.

        Each row but the first takes a run of its own, since one more token may change how the text before it is split.
        """
        started = text_time()
        if not isinstance(cache, TranslatedCache) or cache.model is not self:
            raise InvalidInputError("The KV cache was made by another model; use this model's new_cache().")
        ids = checked_ids(tokens, cache, num_logits, self.retokenizer.target.vocab_size).tolist()
        rows: list[NDArray[np.float32]] = []
        first = len(ids) - num_logits + 1
        for row in range(num_logits):
            cache.extend(ids[:first] if row == 0 else ids[first + row - 1 : first + row])
            feed = cache.catch_up()
            rows.append(cache.forward(feed)[self._columns] if feed else np.zeros(self.vocab_size, np.float32))
        cache.seconds += text_time() - started
        return np.stack(rows)


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared
