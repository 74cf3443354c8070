"""Drafters: whatever proposes tokens for the target to verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from paceline.streams import Chance
from paceline.verify import Draft

from .checked import CheckedDrafter
from .draft_model import DraftModelDrafter
from .hybrid import HybridDrafter
from .prompt_lookup import PromptLookupDrafter
from .text_draft import TextDrafter

__all__ = [
    "DRAFTERS",
    "CheckedDrafter",
    "DraftModelDrafter",
    "Drafter",
    "HybridDrafter",
    "PromptLookupDrafter",
    "TextDrafter",
]


class Drafter(Protocol):
    """Proposes tokens for one generation.

    It may decide how many to propose by anything it knows before they are drawn. A token that has been drawn must be
    submitted: withholding it after a look at it would bend the law of the text.
    """

    @property
    def seconds(self) -> float:
        """Wall time that its model's runs have taken."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take in the prompt; called once, before the first `propose`."""

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Propose what may follow `tokens`, the whole text so far.

        Args:
            tokens: prompt and emitted tokens; the last `rollback` left at most all but the last of them known.
            num_draft_tokens: the most to propose, at least 1. Fewer, also none, may be proposed.
            chance: draws; use `Purpose.DRAFT` with `round_start=len(tokens)`.
        """

    def rollback(self, length: int) -> None:
        """Forget whatever lies behind the first `length` tokens of the text."""


# By name, for command lines and settings. Each row's class documents what its constructor needs.
DRAFTERS: Mapping[str, Callable[..., Drafter]] = MappingProxyType(
    {"draft-model": DraftModelDrafter, "prompt-lookup": PromptLookupDrafter, "hybrid": HybridDrafter}
)
