"""Logprobs of a text that is given, rather than generated: what evaluations by likelihood ask for."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Self

from .decoder import SpeculativeDecoder
from .errors import ContextLengthError, InvalidInputError, shown
from .logprobs import TokenLogprobs, token_logprobs

__all__ = ["Scoring"]

# Tokens per target pass: bounds the memory of logits, and the time until other work has its turn.
_ROWS = 64


class Scoring(Iterator[tuple[TokenLogprobs, ...]]):
    """Gives the target model's logprobs of a text, piece by piece: an entry for every token but the first."""

    def __init__(self, decoder: SpeculativeDecoder, token_ids: list[int], num_top: int = 0) -> None:
        """Score `token_ids`, with the `num_top` most probable tokens at each position.

        Nothing runs before the first step.

        Raises:
            ContextLengthError: the text is longer than the target's context.
            InvalidInputError: no token, an id outside the vocabulary, or a bad `num_top`.
        """
        if not token_ids:
            raise InvalidInputError("There is nothing to score: the text has no token.")
        for token_id in token_ids:
            if not isinstance(token_id, int) or not 0 <= token_id < decoder.vocab_size:
                raise InvalidInputError(
                    f"Token id {shown(token_id)} is outside the vocabulary of {decoder.vocab_size} ids."
                )
        if not isinstance(num_top, int) or not 0 <= num_top <= decoder.vocab_size:
            raise InvalidInputError(f"num_top must be from 0 to {decoder.vocab_size}, got {shown(num_top)}.")
        if len(token_ids) > decoder.target.max_length:
            raise ContextLengthError(
                f"The text has {len(token_ids)} tokens, but the target model's context holds "
                f"{decoder.target.max_length}; shorten it or export with a larger --max-length."
            )
        self._decoder = decoder
        self._token_ids = token_ids
        self._num_top = num_top
        self._finished = len(token_ids) == 1
        self._pieces = self._loop()

    @property
    def finished(self) -> bool:
        """Whether the last piece has been given."""
        return self._finished

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values at most; see `Generation.kv_bytes`."""
        return len(self._token_ids) * int(getattr(self._decoder.target, "kv_bytes_per_position", 0))

    def close(self) -> None:
        """End, and free the KV cache."""
        self._pieces.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[TokenLogprobs, ...]:
        return next(self._pieces)

    def advance(self) -> tuple[TokenLogprobs, ...]:
        """The next piece, as `next` gives it."""
        return next(self._pieces)

    def _loop(self) -> Generator[tuple[TokenLogprobs, ...], None, None]:
        feed, wanted = self._token_ids[:-1], self._token_ids[1:]
        cache = self._decoder.target.new_cache(len(self._token_ids))
        for start in range(0, len(feed), _ROWS):
            piece = feed[start : start + _ROWS]
            logits = self._decoder.target.forward(piece, cache, len(piece))[:, : self._decoder.vocab_size]
            self._finished = start + _ROWS >= len(feed)
            yield tuple(
                token_logprobs(row, token_id, self._num_top)
                for row, token_id in zip(logits, wanted[start : start + _ROWS], strict=True)
            )
