"""Copies where the text repeats itself, and drafts with a model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner import Planner
from paceline.streams import Chance
from paceline.verify import Draft

from .draft_model import DraftModelDrafter
from .prompt_lookup import PromptLookupDrafter
from .text_draft import TextDrafter

__all__ = ["HybridDrafter"]


class HybridDrafter:
    """Prompt lookup where the planner expects more tokens per second of it, else the draft model.

    The choice is made before anything is drawn: a copy draws nothing, so not proposing it withholds nothing.
    """

    def __init__(self, model: DraftModelDrafter | TextDrafter, planner: Planner) -> None:
        """Draft with `model`, which should ask the same planner."""
        self._model = model
        self._lookup = PromptLookupDrafter()
        self._planner = planner

    @property
    def seconds(self) -> float:
        """Wall time that the draft model's runs have taken."""
        return self._model.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take in the prompt."""
        self._lookup.prefill(tokens)
        self._model.prefill(tokens)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Copy, or draw from the draft model."""
        copy = self._lookup.propose(tokens, num_draft_tokens, chance)
        if copy.tokens and (count := self._planner.worth_copying(self._lookup.match_length)):
            return Draft(copy.tokens[:count], None)
        return self._model.propose(tokens, num_draft_tokens, chance)

    def rollback(self, length: int) -> None:
        """Forget whatever lies behind the first `length` tokens of the text."""
        self._model.rollback(length)
