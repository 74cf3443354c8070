"""The OpenAPI description of the server, made from the bodies that it reads."""

from __future__ import annotations

from typing import Any

import paceline

from .bodies import ChatBody, CompletionBody, SamplingBody
from .served import Served

__all__ = ["description"]

_SCHEMAS = "#/components/schemas/"
# What each endpoint with a body may answer besides 200.
_ERRORS = {
    400: "The body is no JSON, a field cannot be honoured, or the request could never fit; the error names it.",
    404: "The body names another model.",
    408: "The body came too slowly, or the deadline passed.",
    413: "The body is too large.",
    429: "The queue is full; the header Retry-After says when to come again.",
    500: "The server failed; its log says why.",
    503: "The server is about to stop, or has too many connections.",
}
_UNAUTHORIZED = {401: "The key is missing or wrong."}


def description(served: Served, *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Error": _error()}
    paths = {
        "/v1/completions": {"post": _post(CompletionBody, "text_completion", schemas, served, needs_key)},
        "/v1/chat/completions": {"post": _post(ChatBody, "chat.completion", schemas, served, needs_key)},
        "/v1/models": {"get": _get("The model.", {"required": ["object", "data"]}, needs_key)},
        f"/v1/models/{served.name}": {"get": _get("The model.", {"required": ["id", "object"]}, needs_key)},
        "/health": {"get": _get("Whether the server can work.", {"required": ["status"]}, False, {503: "It cannot."})},
        "/ready": {"get": _get("Whether to send requests.", {"required": ["status"]}, False, {503: "It drains."})},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"paceline: {served.name}", "version": paceline.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _post(
    body: type[SamplingBody], kind: str, schemas: dict[str, Any], served: Served, needs_key: bool
) -> dict[str, Any]:
    schema = body.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    schemas |= schema.pop("$defs", {})
    schema["properties"]["model"] = {"type": "string", "enum": [served.name]}
    schemas[body.__name__] = schema
    answer = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {"object": {"const": kind}, "choices": {"type": "array"}, "usage": {"type": "object"}},
    }
    event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
    content = {"application/json": {"schema": answer}, "text/event-stream": {"schema": event}}
    return _operation(f"{body.__doc__}", content, needs_key, _ERRORS) | {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{body.__name__}"}}},
        }
    }


def _get(summary: str, schema: dict[str, Any], needs_key: bool, more: dict[int, str] | None = None) -> dict[str, Any]:
    answer = {"application/json": {"schema": {"type": "object", **schema}}}
    operation = _operation(summary, answer, needs_key, {})
    for status, text in (more or {}).items():
        operation["responses"][str(status)] = {"description": text, "content": answer}
    return operation


def _operation(summary: str, content: dict[str, Any], needs_key: bool, errors: dict[int, str]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status, text in (errors | (_UNAUTHORIZED if needs_key else {})).items():
        responses[str(status)] = {"description": text, "content": error}
    security: dict[str, Any] = {"security": [{"key": []}]} if needs_key else {}
    return {"summary": summary, "responses": responses, **security}


def _error() -> dict[str, Any]:
    text_or_null = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": text_or_null,
                    "code": text_or_null,
                },
            }
        },
    }
