"""A smaller model that drafts: the classic drafter of speculative sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.errors import InvalidInputError, NoTokenLeftError
from paceline.kv_cache import KVCache
from paceline.model import CausalLM
from paceline.planner import Planner
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, softmax_at
from paceline.streams import Chance, Purpose
from paceline.verify import NO_DRAFT, Draft, DraftProbs

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter:
    """Drafts with a causal language model.

    Its cache may be shorter than the target's: when the text has outgrown it, it proposes nothing any more and plain
    decoding goes on. The same once the text holds an id that the draft model does not know.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        sampler: RowSampler,
        vocab_size: int,
        planner: Planner | None = None,
    ) -> None:
        """Draft with `model` over the ids `0 … vocab_size - 1`.

        Args:
            model: the draft model. Ids it has no logit for are never drafted.
            cache: the draft model's; it holds nothing, or a beginning of the prompt.
            sampler: how draft tokens are drawn; it may differ from the target's without touching the law.
            vocab_size: size of the common vocabulary.
            planner: asked before each step and each draw whether it is worth its cost; None drafts what is asked for.

        Raises:
            InvalidInputError: the model's `logit_ids` are not one id of the common vocabulary for every logit.
        """
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._vocab_size = vocab_size
        logit_ids = model.logit_ids
        self._width = min(model.vocab_size, vocab_size) if logit_ids is None else len(logit_ids)
        if logit_ids is not None and (
            logit_ids.shape != (model.vocab_size,)
            or len(np.unique(logit_ids)) < len(logit_ids)
            or not 0 <= int(logit_ids.min()) <= int(logit_ids.max()) < vocab_size
        ):
            raise InvalidInputError(
                f"logit_ids must hold {model.vocab_size} different ids below {vocab_size}, one for each logit of the "
                "draft model."
            )
        self._ids = np.arange(self._width) if logit_ids is None else logit_ids  # that there are logits for
        # Where nothing asks for a row by its ids, it need not be spread before a token is found.
        self._is_narrow = self._width < vocab_size and sampler.leaves_logits_alone
        self._spread_row = np.empty(0, np.float32)
        self._num_input_ids = model.vocab_size if logit_ids is None else vocab_size
        self._unknown_id = False
        self._planner = planner
        # What a prefix cache brought counts as missed until the model runs: a seed's text must not depend on it.
        self._restored = cache.length if planner and planner.repeatable else 0

    @property
    def seconds(self) -> float:
        """Wall time that the draft model's runs have taken."""
        return self._cache.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed the prompt, if it fits, and if the planner finds it worth its time."""
        feed = tokens[self._cache.length :]  # the cache may hold a beginning of the prompt already
        if self._planner and not self._planner.worth_a_prefill(len(feed) + self._restored):
            return
        if len(feed) <= self._cache.room and self._knows(tokens):
            self._restored = 0
            self._model.forward(feed, self._cache, 1)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Draw up to `num_draft_tokens` tokens behind `tokens`, none behind an end token."""
        # Whatever the cache lacks: the last token, and after full acceptance the one before it.
        feed = list(tokens[self._cache.length :])
        count = min(num_draft_tokens, self._cache.room - len(feed) + 1)  # the last one drawn is not fed
        if count < 1 or not self._knows(feed):
            return NO_DRAFT

        drafted: list[int] = []
        probs: list[DraftProbs] = []
        while len(drafted) < count and self._sampler.end_token_ids.isdisjoint(drafted[-1:]):
            if not self._sampler.has_mask(tokens, drafted):
                break
            token = self._sampler.forced(tokens, drafted)
            row: DraftProbs = None
            if token is None:
                if self._planner and not self._planner.worth_a_step(len(feed) + self._restored):
                    break
                self._restored = 0
                logits = self._model.forward(feed, self._cache, 1)[0, : self._width]
                if not self._is_narrow:
                    logits = self._spread(logits)
                feed = []
                try:
                    if self._sampler.greedy:
                        token = self._sampler.greedy_token(logits, tokens, drafted, "draft")
                        if self._planner and not self._planner.worth_drawing(softmax_at(logits, token)):
                            break
                        if self._is_narrow:
                            token = int(self._ids[token])
                    else:
                        row = self._sampler.distribution(logits, tokens, drafted, "draft")
                        # Asked before the draw: a token that is drawn must be submitted.
                        if self._planner and not self._planner.worth_drawing(float(row.max())):
                            break
                        if self._is_narrow:
                            narrow, row = row, np.zeros(self._vocab_size, row.dtype)
                            row[self._ids] = narrow
                        position = len(tokens) + len(drafted)
                        token = chance.draw(row, position, Purpose.DRAFT, round_start=len(tokens))
                except NoTokenLeftError:  # whatever the target may still emit, this model has no logit for it
                    break
            drafted.append(token)
            probs.append(row)
            feed.append(token)
            if token >= self._num_input_ids:  # forced, and nothing that this model could go on from
                break
        return Draft(tuple(drafted), None if self._sampler.greedy else probs)

    def rollback(self, length: int) -> None:
        """Keep at most the first `length` positions."""
        if length < self._cache.length:
            self._cache.rollback(length)

    def _spread(self, logits: FloatArray) -> FloatArray:
        """Logits over the common vocabulary; minus infinity for the ids that the draft model has no logit for."""
        if self._width == self._vocab_size and self._model.logit_ids is None:
            return logits
        if not len(self._spread_row):  # the rest of it stays as it is from step to step
            self._spread_row = np.full(self._vocab_size, -math.inf, logits.dtype)
        self._spread_row[self._ids] = logits
        return self._spread_row

    def _knows(self, tokens: Sequence[int]) -> bool:
        if self._num_input_ids < self._vocab_size and not self._unknown_id:
            self._unknown_id = any(token >= self._num_input_ids for token in tokens)
        return not self._unknown_id
