"""A text in the ids of one tokenizer, kept in those of another while it grows and is taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .tokenizer import Tokenizer

__all__ = ["RetokenizedText", "Retokenizer", "split_characters"]

# Characters before a change that are split anew with what follows them, at least.
_OVERLAP = 64
# … and those at their beginning whose tokens are not believed: there the text before them is missing.
_UNCERTAIN = 16


class Retokenizer:
    """Turns ids of the target into ids of the draft's tokenizer, and text of the draft into ids of the target.

    Attributes:
        target: whose ids come in.
        draft: whose ids go out.
        shared_ids: `[2, shared]`, ids of the draft, and the target's that stand for the same.
        opening_ids: what the draft's tokenizer puts in front of a text.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, shared_ids: NDArray[np.int64]) -> None:
        self.target = target
        self.draft = draft
        self.shared_ids = shared_ids
        self.opening_ids = draft.opening_ids
        named = {token_id: name for name, token_id in draft.added_tokens.items()}
        # The target's name of a special token, in the draft's words; by the draft's special id, the target's.
        self._names: dict[int, bytes] = {}
        self.special_ids: dict[int, int] = {}
        for own, other in shared_ids.T.tolist():
            if own in named and target.is_special(other):
                self._names[other] = named[own].encode()
            if draft.is_special(own):
                self.special_ids[own] = other
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int, *, first: bool = False) -> bytes:
        """What a target's token adds to the text that the draft reads; `first` where it is the first to add anything.

        A special token that the draft has, too, is written by its name there, which the draft's tokenizer reads as
        that token; another one by its own name, but for a first BOS, which the draft has its own of.
        """
        if (data := self._bytes.get(token_id)) is None:
            data = self._names.get(token_id)
            data = self._bytes[token_id] = self.target.token_bytes(token_id) if data is None else data
        if not first:
            return data
        if token_id == self.target.bos_token_id and token_id not in self._names:
            return b""
        # A decoder of SentencePiece's drops the space that a text begins with.
        return data[1:] if data[:1] == b" " and not self.target.decode([token_id]).startswith(" ") else data

    def target_ids(self, before: str, half: bytes, new: bytes) -> list[int] | None:
        """Ids of the target for `new`, which follows a text that the target has split already.

        Args:
            before: the end of the text, in whole characters.
            half: bytes of a character behind it that the text has begun.
            new: bytes that go on from there; what they leave of a last character is not looked at.

        Returns:
            Ids that together add just the whole characters of `new`; None where the target's tokenizer would not split
            the text where `new` begins, nor split `new` alone into such ids.
        """
        text, rest = split_characters(half + new)
        wanted = (half + new)[len(half) : len(half) + len(new) - len(rest)]
        if not wanted:
            return []
        start = _word_start(before, len(before) - _OVERLAP)
        trials = [before[start:] + text]
        if not half:
            trials += [text, f"\n{text}"]
        for trial in trials:
            ids = self.target.encode(trial, add_special_tokens=False)
            left = len(wanted)
            for place in range(len(ids) - 1, -1, -1):
                left -= len(self.bytes_of(ids[place]))
                if left <= 0:
                    if left == 0 and b"".join(map(self.bytes_of, ids[place:])) == wanted:
                        return ids[place:]
                    break
        return None


class RetokenizedText:
    """A text that grows by the target's ids and is taken back by them, in the draft's ids.

    These are what the draft's tokenizer makes of the text: only its end is split again when it changes. A character
    that the target has begun and not ended is written in tokens of single bytes, where the draft has some.
    """

    def __init__(self, retokenizer: Retokenizer) -> None:
        self._by = retokenizer
        self._text = ""
        self._halves: list[bytes] = [b""]  # after each of the target's tokens: bytes of a character that is begun,
        self._ends: list[int] = [0]  # … and the characters that are whole
        # The draft's ids and the characters where each begins (-1 inside of a character), which hold for `_split`.
        self._ids: list[int] = list(retokenizer.opening_ids)
        self._starts: list[int] = [-1] * len(self._ids)
        self._num_opening = len(self._ids)
        self._split = ""
        self._same_text = 0  # characters of `_split` that `_text` still begins with
        self._same_ids = 0  # ids that have not changed since `take`

    @property
    def num_tokens(self) -> int:
        """The target's tokens in the text."""
        return len(self._ends) - 1

    @property
    def whole(self) -> str:
        """The text in whole characters."""
        return self._text

    @property
    def half(self) -> bytes:
        """Bytes of a character behind it that the text has begun."""
        return self._halves[-1]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the target."""
        pieces = []
        length = len(self._text)
        empty = not length and not self._halves[-1]
        for token_id in token_ids:
            data = self._by.bytes_of(token_id, first=empty)
            empty = empty and not data
            piece, half = split_characters(self._halves[-1] + data)
            pieces.append(piece)
            length += len(piece)
            self._ends.append(length)
            self._halves.append(half)
        self._text += "".join(pieces)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the target."""
        del self._ends[num_tokens + 1 :], self._halves[num_tokens + 1 :]
        self._text = self._text[: self._ends[-1]]
        self._same_text = min(self._same_text, len(self._text))

    def take(self) -> tuple[int, list[int]]:
        """How many of the draft's ids are as they were at the last call, and those behind them."""
        if self._text != self._split:
            self._split_again()
        same = min(self._same_ids, len(self._ids))
        half = [self._by.draft.byte_token(byte) for byte in self._halves[-1]]
        self._same_ids = len(self._ids)
        return same, [*self._ids[same:], *(token_id for token_id in half if token_id is not None)]

    def forget(self, num_ids: int) -> None:
        """Take all of the draft's ids behind the first `num_ids` as changed."""
        self._same_ids = min(self._same_ids, num_ids)

    def _split_again(self) -> None:
        """Split the text anew from some characters before the change, and join the two where both split."""
        text, overlap = self._text, _OVERLAP
        while True:
            start = _word_start(text, min(self._same_text, len(text)) - overlap)
            ids, spans = self._by.draft.encode_spans(text[start:])
            starts = _starts(spans, start)
            if start == 0:
                old, new = self._num_opening, 0
                opening = self._ids[: self._num_opening]
                if opening and ids[: len(opening)] == opening:  # the text brings its own, as a chat template's may
                    new = len(opening)
                break
            if (found := self._meet(starts, start + _UNCERTAIN)) is not None:
                old, new = found
                break
            overlap *= 4
        kept = old
        for was, now in zip(self._ids[old:], ids[new:], strict=False):
            if was != now:
                break
            kept += 1
        self._same_ids = min(self._same_ids, kept)
        self._ids[old:], self._starts[old:] = ids[new:], starts[new:]
        self._split, self._same_text = text, len(text)

    def _meet(self, starts: list[int], least: int) -> tuple[int, int] | None:
        """The first character from `least` on, unchanged since, where a token begins in both: its places in both."""
        place = len(self._starts)
        while (place > self._num_opening and self._starts[place - 1] >= least) or self._inside(place - 1):
            place -= 1
        old = {start: at for at, start in enumerate(self._starts[place:], place) if least <= start <= self._same_text}
        for at, start in enumerate(starts):
            if start in old:
                return old[start], at
        return None

    def _inside(self, place: int) -> bool:
        return place >= self._num_opening and self._starts[place] < 0


def split_characters(data: bytes) -> tuple[str, bytes]:
    """The whole characters of UTF-8, and the bytes of a last one that is begun; U+FFFD for what is none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, bytes(decoder.getstate()[0])


def _word_start(text: str, at: int) -> int:
    """Where a word begins, with the space before it, at or before a character; that character in a very long one."""
    if at <= 0:
        return 0
    for place in range(at, max(at - 4 * _OVERLAP, 0), -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return at


def _starts(spans: Sequence[tuple[int, int]], shift: int) -> list[int]:
    """The character where each token begins, -1 where one before it covers that character, too."""
    starts, covered = [], 0
    for begin, end in spans:
        starts.append(begin + shift if begin >= covered else -1)
        covered = max(covered, end)
    return starts
