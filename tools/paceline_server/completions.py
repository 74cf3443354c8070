"""`POST /v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from paceline import Generation
from paceline.logprobs import TokenLogprobs
from paceline.pieces import TextPieces
from paceline.scoring import Scoring

from .api_error import ApiError
from .bodies import CompletionBody, read_body
from .endpoint import prepared
from .event_stream import EventStream, pieces_field
from .fields import in_fields
from .logprob_shapes import CompletionLogprobs, entries_of
from .metrics import Metrics
from .models import check_model
from .record import RequestRecord
from .served import Served
from .texts import Texts, generations, token_limit

__all__ = ["Completions"]

_DEFAULT_TOKENS = 16


class Completions:
    """Answers completions; one object serves all requests."""

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self._served = served
        self._metrics = metrics

    async def __call__(self, data: bytes, record: RequestRecord) -> ASGIApp:
        """Answer one request; see `Handler`."""
        served = replace(self._served)  # so that another bundle does not come between
        body, prompts, works = await prepared(partial(_prepare, served), data)
        answer = _Answer(served, body, prompts)
        if body.echo and body.logprobs is not None:
            answer.scores = [await _score(served, ids, body) for ids in prompts]
        texts = Texts(served, self._metrics, works, body, record)
        if body.stream:
            return EventStream(answer.chunks(texts), texts, served.limits.client_s, record)
        with texts:
            return JSONResponse(await answer.whole(texts))


def _prepare(served: Served, data: bytes) -> tuple[CompletionBody, list[list[int]], list[Generation]]:
    body = read_body(CompletionBody, data)
    check_model(served, body.model)
    limit = token_limit(served, body.max_tokens, _DEFAULT_TOKENS, "max_tokens")
    if limit == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens is 0, so there is nothing to write; only echo makes sense of it.",
            param="max_tokens", code="invalid_value",
        )  # fmt: skip
    prompts = [served.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in _prompts(body)]
    # With max_tokens 0 the checks are made all the same, by generations that never begin.
    works = generations(served, body, prompts, max_new_tokens=max(limit, 1), logprobs=body.logprobs)
    return body, prompts, works if limit else []


async def _score(served: Served, token_ids: list[int], body: CompletionBody) -> list[TokenLogprobs]:
    most = served.limits.timeout_s
    if len(token_ids) == 1:
        return []
    with in_fields(body):
        scoring = Scoring(served.decoder, token_ids, body.logprobs or 0)
        stream = served.engine.run(scoring, timeout_s=min(body.timeout or most, most))
    async with stream as pieces:
        return [entry async for piece in pieces for entry in piece]


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [[token_id for token_id in body.prompt if isinstance(token_id, int)]]
    return [prompt for prompt in body.prompt if not isinstance(prompt, int)]


class _Answer:
    """The answer to one request, whole or in chunks.

    Attributes:
        scores: the logprobs of the prompts, where they are wanted.
    """

    def __init__(self, served: Served, body: CompletionBody, prompts: list[list[int]]) -> None:
        self.scores: list[list[TokenLogprobs]] = []
        self._body = body
        self._n = body.n or 1
        self._prompts = prompts
        self._tokenizer = served.tokenizer
        self._end_token_ids = frozenset((*served.decoder.eos_token_ids, *(body.stop_token_ids or ())))
        given = _prompts(body)
        self._echoes = [
            prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt) if body.echo else ""
            for prompt in given
        ]
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self, texts: Texts) -> dict[str, Any]:
        """One JSON document."""
        entries: list[list[TokenLogprobs]] = [[] for _ in range(self._num_choices)]
        async for index, step in texts.steps():
            entries[index] += entries_of(step, self._end_token_ids)
        choices = []
        for index in range(self._num_choices):
            work = texts.works[index] if texts.works else None
            echo, before, first = self._echo(index)
            logprobs = None
            if self._body.logprobs is not None:
                logprobs = CompletionLogprobs(self._tokenizer).shape([*before, *entries[index]], first)
            choices.append(
                {
                    "index": index,
                    "text": echo + (work.text if work else ""),
                    "logprobs": logprobs,
                    "finish_reason": work.finish_reason if work else "length",
                }
            )
        return {**self._head, "choices": choices, "usage": self._usage(texts)}

    async def chunks(self, texts: Texts) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream."""
        shapes = [CompletionLogprobs(self._tokenizer) for _ in range(self._num_choices)]
        splitters = [TextPieces(self._tokenizer) for _ in texts.works] if self._body.wants_pieces else None
        wants_logprobs = self._body.logprobs is not None
        if self._body.echo:
            for index, shape in enumerate(shapes):
                echo, before, first = self._echo(index)
                reason = None if texts.works else "length"
                yield self._chunk(index, echo, shape.shape(before, first) if wants_logprobs else None, reason)
        async for index, step in texts.steps():
            entries = entries_of(step, self._end_token_ids)
            pieces = splitters[index].split(step) if splitters else None
            if step.text or entries or step.finish_reason is not None:
                logprobs = shapes[index].shape(entries) if wants_logprobs else None
                yield self._chunk(index, step.text, logprobs, step.finish_reason, **pieces_field(pieces))
        if self._wants_usage:
            yield {**self._head, "choices": [], "usage": self._usage(texts)}

    @property
    def _num_choices(self) -> int:
        return len(self._prompts) * self._n

    @property
    def _wants_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _echo(self, index: int) -> tuple[str, list[TokenLogprobs], int | None]:
        """What stands before a text: the prompt, its logprobs, and its first token, which has none."""
        place = index // self._n
        if not self._body.echo:
            return "", [], None
        scores = self.scores[place] if self.scores else []
        return self._echoes[place], scores, self._prompts[place][0]

    def _usage(self, texts: Texts) -> dict[str, Any]:
        if texts.works:
            return texts.usage()
        prompt_tokens = sum(map(len, self._prompts))
        return {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
        **more_fields: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **more_fields}
        chunk = {**self._head, "choices": [choice]}
        return chunk | {"usage": None} if self._wants_usage else chunk
