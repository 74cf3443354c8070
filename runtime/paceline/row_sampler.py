"""From a row of logits to a distribution, with the history that the row's own position has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .constraint import ConstraintMasks
from .errors import InvalidInputError, NoTokenLeftError, shown
from .history import History
from .sampling import FloatArray, SamplingParams, distribution, greedy_token

__all__ = ["RowSampler"]


class RowSampler:
    """Applies one generation's sampling parameters to rows of logits.

    A row is changed by penalties, bias and masks as plain decoding would at that position: the drafted tokens before
    it count as if they had been emitted. Target and draft model have one each.

    From call to call `tokens`, the text so far with its prompt, may only grow; `drafted`, the tokens behind it that
    may yet fall, is free.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        num_prompt_tokens: int,
        end_token_ids: frozenset[int] = frozenset(),
        masks: ConstraintMasks | None = None,
    ) -> None:
        """Sample over the ids `0 … vocab_size - 1`; `end_token_ids` are what `min_new_tokens` holds back.

        Raises:
            InvalidInputError: the parameters name an id outside the vocabulary.
        """
        self.params = params
        self.end_token_ids = end_token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._masks = masks
        bias = dict(params.logit_bias)
        for name, ids in (
            ("logit_bias", list(bias)),
            ("banned_token_ids", list(params.banned_token_ids)),
            ("forced_token_ids", list(params.forced_token_ids)),
        ):
            for place, token_id in enumerate(ids):
                if token_id >= vocab_size:
                    raise InvalidInputError(
                        f"{name} holds id {shown(token_id)} at position {place}, outside the vocabulary of "
                        f"{vocab_size} ids (0 to {vocab_size - 1}).",
                        name,
                    )
        self._bias_ids = np.array(list(bias), np.intp)
        self._biases = np.array(list(bias.values()))
        self._has_counts = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
        # Kept only where something looks at it.
        self._history = (
            History(num_prompt_tokens, params.no_repeat_ngram_size)
            if self._has_counts or params.no_repeat_ngram_size
            else None
        )
        self._leaves_logits_alone = not (
            self._history
            or params.logit_bias
            or params.banned_token_ids
            or params.forced_token_ids
            or params.min_new_tokens
            or masks
        )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of drawing one."""
        return self.params.greedy

    @property
    def leaves_logits_alone(self) -> bool:
        """Whether no penalty, bias or mask changes any row: then a row of some ids' logits may be given, too."""
        return self._leaves_logits_alone

    def distribution(
        self, logits: FloatArray, tokens: Sequence[int], drafted: Sequence[int], model: str = "target"
    ) -> FloatArray:
        """Probabilities `[vocab]` of the token behind `tokens + drafted`, from its logits `[vocab]`.

        Raises:
            ModelOutputError: NaN, plus infinity, or no finite logit.
            InvalidInputError: penalties or biases make NaN or infinity of the logits, or a mask is bad.
            NoTokenLeftError: the parameters together forbid every token.
        """
        adjusted = self.adjusted(logits, tokens, drafted, model)
        return distribution(adjusted, self.params, self._where(model, tokens, drafted))

    def greedy_token(
        self, logits: FloatArray, tokens: Sequence[int], drafted: Sequence[int], model: str = "target"
    ) -> int:
        """The most probable token behind `tokens + drafted`; raises as `distribution` does."""
        adjusted = self.adjusted(logits, tokens, drafted, model)
        return greedy_token(adjusted, self._where(model, tokens, drafted))

    def has_mask(self, tokens: Sequence[int], drafted: Sequence[int]) -> bool:
        """Whether the constraint has an answer behind `tokens + drafted`.

        A drafter looks ahead of the text, where a constraint may know no way on. That is an error only if the text
        gets there: then the target's rows ask again.
        """
        try:
            self._allowed(tokens, drafted)
        except Exception:  # the caller's own function may raise anything
            return False
        return True

    def forced(self, tokens: Sequence[int], drafted: Sequence[int] = ()) -> int | None:
        """The only token that may follow, where parameters or constraint leave one whatever the logits are."""
        num_new = len(tokens) + len(drafted) - self._num_prompt_tokens
        allowed = self._allowed(tokens, drafted)
        if num_new < len(self.params.forced_token_ids):
            forced = self.params.forced_token_ids[num_new]
        elif allowed is not None and np.count_nonzero(allowed) == 1:
            forced = int(allowed.argmax())
        else:
            return None
        # What contradicts the constraint or another parameter is left to `adjusted`, which says so.
        if allowed is not None and not allowed[forced]:
            return None
        return None if forced in self._forbidden(tokens, drafted) else forced

    def adjusted(
        self, logits: FloatArray, tokens: Sequence[int], drafted: Sequence[int], model: str = "target"
    ) -> FloatArray:
        """Logits `[vocab]` after penalties, bias and masks, before temperature; `logits` itself where nothing applies.

        Raises:
            InvalidInputError, NoTokenLeftError: as `distribution` does.
        """
        # Behind a drafted end token nothing is emitted any more, so nothing may be refused there either.
        if self._leaves_logits_alone or not self.end_token_ids.isdisjoint(drafted):
            return logits
        row = logits.copy()
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # `_check` reports what is left of it
            if self._history and self._has_counts:
                self._history.move(tokens, drafted)
                self._penalise(row, self._history)
            if len(self._bias_ids):
                row[self._bias_ids] += self._biases.astype(row.dtype)
        row[self._forbidden(tokens, drafted)] = -math.inf
        if (allowed := self._allowed(tokens, drafted)) is not None:
            row[~allowed] = -math.inf
        num_new = len(tokens) + len(drafted) - self._num_prompt_tokens
        if num_new < len(self.params.forced_token_ids):
            forced = self.params.forced_token_ids[num_new]
            row[:forced] = row[forced + 1 :] = -math.inf
        self._check(row, logits, tokens, drafted, model)
        return row

    def _penalise(self, row: FloatArray, history: History) -> None:
        params = self.params
        if params.repetition_penalty != 1:
            ids, _ = history.seen.arrays()
            values = row[ids]
            row[ids] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = history.new.arrays()
            row[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(row.dtype)

    def _forbidden(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Ids that may not follow, whatever the constraint says."""
        forbidden = list(self.params.banned_token_ids)
        if len(tokens) + len(drafted) - self._num_prompt_tokens < self.params.min_new_tokens:
            forbidden += self.end_token_ids
        if self._history and self.params.no_repeat_ngram_size:
            self._history.move(tokens, drafted)
            forbidden += self._history.ngram_completions()
        return forbidden

    def _allowed(
        self, tokens: Sequence[int], drafted: Sequence[int]
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        # Behind a drafted end token nothing is emitted any more, so nothing is asked.
        if self._masks is None or not self.end_token_ids.isdisjoint(drafted):
            return None
        return self._masks.allowed((*tokens[self._num_prompt_tokens :], *drafted))

    def _check(
        self, row: FloatArray, logits: FloatArray, tokens: Sequence[int], drafted: Sequence[int], model: str
    ) -> None:
        largest = float(row.max())
        if math.isfinite(largest) or not math.isfinite(float(logits.max())):
            return  # `distribution` reports what was wrong before
        position = len(tokens) + len(drafted)
        if largest == -math.inf:
            new, least = position - self._num_prompt_tokens, self.params.min_new_tokens
            too_few = f" min_new_tokens={least} allows no end yet: the text has {new}." if new < least else ""
            raise NoTokenLeftError(
                f"No token is left at position {position}: banned, forced and end tokens, the n-gram rule and the "
                f"constraint together forbid every token that the model has a logit for.{too_few}",
                "min_new_tokens" if too_few else "constraint" if self._masks else None,
            )
        raise InvalidInputError(
            f"{self._where(model, tokens, drafted)} become {largest} by penalties and logit_bias; use smaller ones.",
            "logit_bias" if self.params.repetition_penalty == 1 else "repetition_penalty",
        )

    @staticmethod
    def _where(model: str, tokens: Sequence[int], drafted: Sequence[int]) -> str:
        return f"The {model} model's logits for position {len(tokens) + len(drafted)}"
