"""A draft model with a tokenizer of its own that goes on with the text, which the target's tokenizer then splits.

Known as universal assisted decoding. The draft's tokens are its most probable ones, so the proposal follows from the
text alone: the target accepts with its own probability, which keeps its law.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from paceline.planner import Planner
from paceline.retokenizer import split_characters
from paceline.sampling import softmax_at
from paceline.streams import Chance
from paceline.translated import TranslatedCache, TranslatedModel
from paceline.verify import NO_DRAFT, Draft

__all__ = ["TextDrafter"]


class TextDrafter:
    """Drafts text greedily in the draft model's own tokens.

    It can propose what the vocabularies do not share, and several of the target's tokens for one of its own. Nothing is
    proposed where the text of the draft cannot be split by the target's tokenizer behind what it has split already.
    """

    def __init__(self, model: TranslatedModel, cache: TranslatedCache, planner: Planner | None = None) -> None:
        """Draft with the inner model of `model`.

        Args:
            model: it reads the target's ids.
            cache: the model's; it holds nothing, or a beginning of the prompt.
            planner: asked before each step and each of the draft's tokens; None drafts as many of them as are asked
                for of the target's.
        """
        self._cache = cache
        self._inner = model.inner
        self._by = model.retokenizer
        self._planner = planner
        # What a prefix cache brought counts as missed until the model runs: a seed's text must not depend on it.
        repeatable = planner is not None and planner.repeatable
        self._restored, self._restored_own = (cache.length, cache.inner.length) if repeatable else (0, 0)
        self.seconds = 0.0  # of the draft model's runs, and of splitting texts

    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed the prompt, if it fits, and if the planner finds it worth its time."""
        started = time.perf_counter()
        feed = tokens[self._cache.length :]
        if self._planner and not self._planner.worth_a_prefill(len(feed) + self._restored):
            return
        if feed and len(feed) <= self._cache.room:
            self._cache.extend(feed)
            if own := self._cache.catch_up():
                self._cache.forward(own)
                self._restored_own = 0
        self.seconds += time.perf_counter() - started

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Go on with the text by up to `num_draft_tokens` of the draft's tokens, to the end of the text at most."""
        started = time.perf_counter()
        feed = tokens[self._cache.length :]
        if len(feed) > self._cache.room:
            return NO_DRAFT
        self._cache.extend(feed)
        own = self._cache.catch_up()
        inner = self._cache.inner
        data, end = b"", None
        starts: list[int] = []  # of each drafted token in the bytes of the draft,
        confidences: list[float] = []  # … and its probability
        while own and len(starts) < num_draft_tokens and len(own) <= inner.room:
            if self._planner and not self._planner.worth_a_step(len(own) + self._restored_own):
                break
            self._restored_own = 0
            row = self._cache.forward(own)
            if self._inner.logit_ids is None:
                row = row[: self._by.draft.vocab_size]
            best = int(row.argmax())
            confidence = softmax_at(row, best)
            if self._planner and not self._planner.worth_drawing(confidence):
                break
            token = best if self._inner.logit_ids is None else int(self._inner.logit_ids[best])
            starts.append(len(data))
            confidences.append(confidence)
            if self._by.draft.is_special(token):
                end = self._by.special_ids.get(token)
                break
            data += self._by.draft.token_bytes(token)
            own = [token]

        ids = self._by.target_ids(self._cache.text.whole, self._cache.text.half, data)
        whole = ids is not None and not split_characters(self._cache.text.half + data)[1]
        ids = [*(ids or ()), *([end] if end is not None and whole else ())][:num_draft_tokens]
        if self._planner:
            self._planner.replan(self._shares(ids, starts, confidences))
        self.seconds += time.perf_counter() - started
        return Draft(tuple(ids), None)

    def rollback(self, length: int) -> None:
        """Keep at most the first `length` positions."""
        if length < self._cache.length:
            self._cache.rollback(length)

    def _shares(self, ids: Sequence[int], starts: Sequence[int], confidences: Sequence[float]) -> list[float]:
        """The probability of each of the target's tokens: of the draft's tokens that begin in it."""
        shares, begin = [], 0
        for token in ids:
            end = begin + max(len(self._by.bytes_of(token)), 1)
            inside = [sure for start, sure in zip(starts, confidences, strict=True) if begin <= start < end]
            shares.append(math.prod(inside))
            begin = end
        return shares
