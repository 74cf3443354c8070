"""Whom `paceline chat` talks with: what every partner does, and a bundle in this process."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import click

from paceline import Generation, SamplingParams, SpeculativeDecoder
from paceline.pieces import Piece, TextPieces

from .tables import number, percent

__all__ = ["BundlePartner", "ContextFullError", "Partner", "Settings", "figures_text", "without_controls"]

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ContextFullError(click.ClickException):
    """A server says that a conversation does not fit the model's context."""


def without_controls(text: str) -> str:
    """A text for a terminal, which obeys control characters; models and servers may write any."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are made; None leaves a setting to the model's side."""

    temperature: float
    top_p: float | None
    seed: int | None
    max_new_tokens: int
    draft_tokens: int | str | None


class Partner(Protocol):
    """Answers messages."""

    @property
    def name(self) -> str:
        """What the user is told."""

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Generator[Piece, None, None]:
        """The answer, as it comes; closing the generator stops it."""

    def figures(self, seconds: float) -> str:
        """A line about the last answer, which took so long."""


def figures_text(tokens: int, proposed: int, accepted: int, rounds: int, seconds: float) -> str:
    """Tokens and drafts of an answer, for people."""
    rate = percent(accepted / proposed if proposed else None)
    return (
        f"[{tokens} tokens in {number(seconds, 1)} s, {rounds} rounds; {proposed} tokens drafted, {accepted} accepted "
        f"({rate})]"
    )


class BundlePartner:
    """A pair in this process."""

    def __init__(self, decoder: SpeculativeDecoder, name: str, settings: Settings) -> None:
        """Talk with `decoder`.

        Raises:
            ClickException: its model was not made for chats.
        """
        if decoder.tokenizer is None or decoder.tokenizer.chat_template is None:
            raise click.ClickException(
                f"The bundle {name} has no chat template, so its model was probably not made for chats; "
                "use paceline generate."
            )
        self.name = name
        self._tokenizer = decoder.tokenizer
        self._decoder = decoder
        self._settings = settings
        self._last: Generation | None = None

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Generator[Piece, None, None]:
        """See `Partner`."""
        asked = self._settings
        sampling = SamplingParams(temperature=asked.temperature, top_p=asked.top_p or 1.0, seed=asked.seed)
        prompt = self._tokenizer.encode_chat(messages)
        pieces = TextPieces(self._tokenizer)
        self._last = self._decoder.generate(
            prompt,
            sampling,
            max_new_tokens=asked.max_new_tokens,
            num_draft_tokens="auto" if asked.draft_tokens is None else asked.draft_tokens,
        )
        with self._last as generation:
            for step in generation:
                yield from pieces.split(step)

    def figures(self, seconds: float) -> str:
        """See `Partner`."""
        assert self._last is not None  # asked behind an answer
        stats = self._last.stats
        return figures_text(stats.new_tokens, stats.proposed, stats.accepted, stats.rounds, seconds)
