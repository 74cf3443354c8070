"""`POST /v1/chat/completions`."""

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
from paceline.grammar import GrammarConstraint
from paceline.logprobs import TokenLogprobs
from paceline.pieces import TextPieces

from .api_error import ApiError
from .bodies import ChatBody, read_body
from .endpoint import prepared
from .event_stream import EventStream, pieces_field
from .fields import in_fields
from .logprob_shapes import chat_logprobs, entries_of
from .metrics import Metrics
from .models import check_model
from .record import RequestRecord
from .schemas import check_schemas
from .served import Served
from .texts import Texts, generations, token_limit
from .tool_bodies import Tool
from .tool_calls import CLOSE, CallReader, callable_tools, chat_prompt, tool_constraint

__all__ = ["Chat"]


class Chat:
    """Answers chats; one object serves all requests."""

    def __init__(self, served: Served, metrics: Metrics) -> None:
        self._served = served
        self._metrics = metrics

    async def __call__(self, data: bytes, record: RequestRecord) -> ASGIApp:
        """Answer one request; see `Handler`."""
        served = replace(self._served)  # so that another bundle does not come between
        body, tools, works = await prepared(partial(_prepare, served), data)
        texts = Texts(served, self._metrics, works, body, record)
        answer = _Answer(served, body, tools, texts)
        if body.stream:
            return EventStream(answer.chunks(), texts, served.limits.client_s, record)
        with texts:
            return JSONResponse(await answer.whole())


def _prepare(served: Served, data: bytes) -> tuple[ChatBody, list[Tool], list[Generation]]:
    body = read_body(ChatBody, data)
    check_model(served, body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs", code="invalid_value")
    tools = callable_tools(body)
    with in_fields(body):
        prompt = served.tokenizer.encode(chat_prompt(served.tokenizer, body, tools), add_special_tokens=False)
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    elif body.max_tokens not in (None, asked):
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ; give one of them.", param=name, code="invalid_value"
        )
    room = max(1, served.decoder.target.max_length - len(prompt))
    with in_fields(body, otherwise=body.field_of["constraint"]):
        constraint = _constraint(served, body, tools)
    works = generations(
        served,
        body,
        [prompt],
        max_new_tokens=token_limit(served, asked, room, name),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        # A copy for each text: what one remembers is of use to the text that it belongs to.
        constraints=[constraint and constraint.copy() for _ in range(min(body.n or 1, served.limits.choices))],
        # Behind a first call there shall be no second one.
        more_stops=(CLOSE,) if tools and body.parallel_tool_calls is False else (),
    )
    return body, tools, works


def _constraint(served: Served, body: ChatBody, tools: Sequence[Tool]) -> GrammarConstraint | None:
    if tools:
        return tool_constraint(served.tokenizer, body, tools)
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return GrammarConstraint.json_object(served.tokenizer)
    assert asked.json_schema is not None  # the body was checked
    check_schemas("response_format", [asked.json_schema.schema_])
    return GrammarConstraint.from_json_schema(served.tokenizer, asked.json_schema.schema_)


class _Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, served: Served, body: ChatBody, tools: Sequence[Tool], texts: Texts) -> None:
        self._body = body
        self._texts = texts
        self._tokenizer = served.tokenizer
        names = frozenset(tool.function.name for tool in tools)
        self._readers = [CallReader(names) for _ in texts.works]
        self._pieces = [TextPieces(self._tokenizer) for _ in texts.works] if body.wants_pieces else None
        self._end_token_ids = frozenset((*served.decoder.eos_token_ids, *(body.stop_token_ids or ())))
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
        }

    async def whole(self) -> dict[str, Any]:
        """One JSON document."""
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self._texts.works]
        async for index, step in self._texts.steps():
            logprobs[index] += entries_of(step, self._end_token_ids)
        choices = [
            {
                "index": index,
                "message": self._message(index, work.text),
                "logprobs": self._logprobs(logprobs[index]),
                "finish_reason": self._finish_reason(index, work.finish_reason),
            }
            for index, work in enumerate(self._texts.works)
        ]
        return self._object("chat.completion", choices) | {"usage": self._texts.usage()}

    def _message(self, index: int, text: str) -> dict[str, Any]:
        reader = self._readers[index]
        content, calls = reader.push(text)
        rest, more = reader.end()
        content, calls = content + rest, calls + more
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [call.as_dict() for call in calls]}
        return message

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream."""
        begun: set[int] = set()
        async for index, step in self._texts.steps():
            if index not in begun:
                begun.add(index)
                yield self._chunk(index, {"role": "assistant", "content": ""})
            entries = entries_of(step, self._end_token_ids)
            pieces = self._pieces[index].split(step) if self._pieces else None
            reader = self._readers[index]
            before = reader.num_calls
            content, calls = reader.push(step.text)
            if step.finish_reason is not None:
                rest, more = reader.end()
                content, calls = content + rest, calls + more
            if content or entries:
                yield self._chunk(index, {"content": content}, self._logprobs(entries), **pieces_field(pieces))
            for number, call in enumerate(calls, before):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call.as_dict()}]})
            if step.finish_reason is not None:
                yield self._chunk(index, {}, finish_reason=self._finish_reason(index, step.finish_reason))
        if self._wants_usage:
            yield self._object("chat.completion.chunk", []) | {"usage": self._texts.usage()}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._readers[index].num_calls else reason

    @property
    def _wants_usage(self) -> bool:
        return bool(self._body.stream_options and self._body.stream_options.include_usage)

    def _logprobs(self, entries: list[TokenLogprobs] | tuple[TokenLogprobs, ...]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, entries) if self._body.logprobs else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        **more_fields: Any,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more_fields}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self._wants_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}
