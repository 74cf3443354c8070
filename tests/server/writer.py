"""A model that writes the answer that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline import SpeculativeDecoder
from paceline.testing import TableModel
from paceline.tokenizer import Tokenizer

MARK = "<assistant>"


class Writer(TableModel):
    """Behind the last `<assistant>` of a prompt it is sure of one answer, and of its end."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, answer: str) -> None:
        super().__init__(np.zeros((vocab_size, vocab_size)), max_length=4096)
        self._mark = tokenizer.encode(MARK)
        self._end = tokenizer.eos_token_ids[0]
        self._answer = [*tokenizer.encode(answer), self._end]

    def next_logits(self, text: Sequence[int]) -> Any:
        ids, width = list(text), len(self._mark)
        begin = next((at for at in range(len(ids), width - 1, -1) if ids[at - width : at] == self._mark), len(ids))
        behind = len(ids) - begin
        logits = np.zeros(self.vocab_size, np.float32)
        logits[self._answer[behind] if behind < len(self._answer) else self._end] = 100
        return logits


def writing(decoder: SpeculativeDecoder, template: str, answer: str, *, draft: str | None = None) -> SpeculativeDecoder:
    """A decoder with the tiny pair's tokenizer, this template, and a target that writes this answer."""
    assert decoder.tokenizer is not None
    tokenizer = Tokenizer(decoder.tokenizer._backend, decoder.tokenizer._entry, template)
    models = [None if text is None else Writer(tokenizer, decoder.vocab_size, text) for text in (answer, draft)]
    assert models[0] is not None
    return SpeculativeDecoder(models[0], models[1], tokenizer, decoder.vocab_size, decoder.eos_token_ids)
