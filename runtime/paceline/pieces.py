"""Which parts of a text its draft had proposed: to show it while it comes."""

from __future__ import annotations

from typing import NamedTuple

from .generation import Step
from .tokenizer import Tokenizer

__all__ = ["Piece", "TextPieces"]


class Piece(NamedTuple):
    """A part of a text; `accepted` is whether the draft had proposed it and the target let it stand."""

    text: str
    accepted: bool


class TextPieces:
    """Splits the text of one generation's steps where accepted tokens begin and end.

    A step's text may lag behind its tokens, by half a character or the beginning of a stop string, so what each token
    brought is remembered until the text arrives. A character of several tokens counts as the last one's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = tokenizer.stream()
        self._awaited: list[tuple[int, bool]] = []  # numbers of characters, in the order of the text

    def split(self, step: Step) -> tuple[Piece, ...]:
        """The pieces of a step's text; joined, they are that text."""
        first = step.num_forced
        for place, token_id in enumerate(step.token_ids):
            self._await(len(self._stream.push(token_id)), first <= place < first + step.num_accepted)
        if step.finish_reason is not None:
            self._await(len(self._stream.flush()), False)
        pieces: list[Piece] = []
        rest = step.text
        while rest:
            length, accepted = self._awaited.pop(0) if self._awaited else (len(rest), False)
            if length > len(rest):
                self._awaited.insert(0, (length - len(rest), accepted))
            pieces.append(Piece(rest[:length], accepted))
            rest = rest[length:]
        return tuple(pieces)

    def _await(self, length: int, accepted: bool) -> None:
        if not length:
            return
        if self._awaited and self._awaited[-1][1] == accepted:
            length += self._awaited.pop()[0]
        self._awaited.append((length, accepted))
