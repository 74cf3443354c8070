"""Drafts by copying: what followed the same words earlier in the text may follow them again."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.streams import Chance
from paceline.verify import NO_DRAFT, Draft

__all__ = ["PromptLookupDrafter"]

# Tokens that must have occurred before, and the most that are compared.
_SHORTEST, _LONGEST = 2, 32
# Earlier occurrences that are looked at, the latest first: common words occur too often to look at all.
_CANDIDATES = 16


class PromptLookupDrafter:
    """Proposes what followed the longest end of the text that occurs earlier in it, prompt included.

    There is no model: an index of pairs of tokens finds the occurrences. The proposal is deterministic, so the text is
    that of plain decoding with the same seed.

    Attributes:
        match_length: tokens that the last proposal's occurrence shares with the end of the text, at most 32; 0 when
            nothing was found.
    """

    def __init__(self) -> None:
        self.match_length = 0
        self._text: list[int] = []
        # Where each pair of tokens has occurred: index of what follows it, in the order of the text.
        self._behind: dict[tuple[int, int], list[int]] = {}

    @property
    def seconds(self) -> float:
        """There is no model whose runs would take time."""
        return 0.0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Index the prompt."""
        self._index(tokens)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Propose up to `num_draft_tokens` tokens behind `tokens`, or none when its end never occurred before."""
        self._index(tokens)
        start = self._longest_match()
        if not self.match_length:
            return NO_DRAFT
        drafted: list[int] = []
        for place in range(start, start + num_draft_tokens):
            # A text that repeats itself runs into its own continuation.
            drafted.append(self._text[place] if place < len(self._text) else drafted[place - len(self._text)])
        return Draft(tuple(drafted), None)

    def rollback(self, length: int) -> None:
        """Nothing to forget: only what was emitted is indexed."""

    def _index(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that are new."""
        for token in tokens[len(self._text) :]:
            self._text.append(token)
            if len(self._text) >= _SHORTEST:
                self._behind.setdefault((self._text[-2], self._text[-1]), []).append(len(self._text))

    def _longest_match(self) -> int:
        """Index of what follows the longest earlier occurrence of the text's end; the latest among equals."""
        best, self.match_length = 0, 0
        text = self._text
        if len(text) < _SHORTEST:
            return best
        occurrences = self._behind[text[-2], text[-1]]  # the last one is the text's own end
        for start in reversed(occurrences[-1 - _CANDIDATES : -1]):
            most = min(start, _LONGEST)
            length = _SHORTEST
            while length < most and text[start - 1 - length] == text[-1 - length]:
                length += 1
            if length > self.match_length:
                best, self.match_length = start, length
                if length == _LONGEST:
                    break
        return best
