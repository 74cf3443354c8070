"""Where a text ends: stop tokens, stop strings, and the limit, cut out of the blocks that rounds emit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .tokenizer import TextStream

__all__ = ["Cut", "Cutter", "FinishReason"]

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Cut:
    """What remains of a block: its ids, the text that became readable, and the reason if the generation ends here."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class Cutter:
    """Cuts blocks of tokens, one by one in the order of the text.

    A stop token ends the text and belongs to its ids but not to its text. A stop string ends the ids with the token
    that completes it, and the text just before it; text that may be the beginning of one is held back until decided.
    Text of the first `min_tokens - 1` tokens is no part of a stop string; that they hold no stop token is up to the
    sampler.
    """

    def __init__(
        self,
        *,
        limit: int,
        stop_token_ids: frozenset[int],
        stop: tuple[str, ...],
        stream: TextStream | None,
        min_tokens: int = 0,
    ) -> None:
        self._limit = limit
        self._min_tokens = min_tokens
        self._stop_token_ids = stop_token_ids
        self._stop = stop
        self._stream = stream
        self._num_tokens = 0
        self._held = ""

    @property
    def remaining(self) -> int:
        """How many more tokens the limit allows."""
        return self._limit - self._num_tokens

    def cut(self, block: Iterable[int]) -> Cut:
        """Cut one block at the first stop, or at the limit. A stop at the limit is a stop."""
        token_ids: list[int] = []
        text = ""
        for token_id in block:
            token_ids.append(token_id)
            self._num_tokens += 1
            if token_id in self._stop_token_ids:
                return Cut(tuple(token_ids), text + self._release_all()[0], "stop")
            piece, stopped = self._release(self._stream.push(token_id) if self._stream else "")
            text += piece
            if stopped:
                return Cut(tuple(token_ids), text, "stop")
            if self.remaining == 0:
                piece, stopped = self._release_all()
                return Cut(tuple(token_ids), text + piece, "stop" if stopped else "length")
        return Cut(tuple(token_ids), text, None)

    def _release_all(self) -> tuple[str, bool]:
        text, stopped = self._release(self._stream.flush() if self._stream else "")
        return text if stopped else text + self._held, stopped

    def _release(self, piece: str) -> tuple[str, bool]:
        """Take in readable text; return what no stop string can claim any more, and whether one is complete."""
        held = self._held + piece
        if self._num_tokens < self._min_tokens:
            return held, False
        starts = [start for stop in self._stop if (start := held.find(stop)) >= 0]
        if starts:
            return held[: min(starts)], True
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
