"""Logprobs in OpenAI's two shapes: one for chats, one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline import Step
from paceline.logprobs import TokenLogprobs
from paceline.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "entries_of"]

# JSON has no infinity.
_LEAST = -9999.0


def entries_of(step: Step, end_token_ids: frozenset[int]) -> tuple[TokenLogprobs, ...]:
    """The entries of a step's tokens, without the one that ends the text."""
    entries = step.logprobs or ()
    ended = step.finish_reason == "stop" and step.token_ids[-1:] and step.token_ids[-1] in end_token_ids
    return entries[:-1] if ended else entries


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""

    def shape(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": _shown(data), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    content = [
        {
            **shape(entry.token_id, entry.logprob),
            "top_logprobs": [shape(token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of completions; a streamed text's pieces go on where the one before ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def shape(self, entries: Sequence[TokenLogprobs], first_token_id: int | None = None) -> dict[str, Any]:
        """These entries, behind a text's first token where it is given: nothing says how likely that was."""
        tokens: list[str] = []
        offsets: list[int] = []
        known = [(entry.token_id, entry) for entry in entries]
        unknown: list[tuple[int, TokenLogprobs | None]] = [] if first_token_id is None else [(first_token_id, None)]
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in (*unknown, *known):
            text = _shown(self._tokenizer.token_bytes(token_id))
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            logprobs.append(None if entry is None else max(entry.logprob, _LEAST))
            tops.append(None if entry is None else self._top(entry, text))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        top = {_shown(self._tokenizer.token_bytes(token_id)): max(value, _LEAST) for token_id, value in entry.top}
        # The token itself is always among them, as in OpenAI's API.
        return {**top, text: max(entry.logprob, _LEAST)} if entry.top else top


def _shown(data: bytes) -> str:
    """A token's text; the bytes in OpenAI's notation where they are no whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
