"""What the server refuses: each case with its status, and the parameter that the answer names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx2
import pytest
from pydantic import BaseModel, Discriminator

from paceline import SpeculativeDecoder
from paceline_server import Limits
from paceline_server.bodies import ChatBody, CompletionBody

from .conftest import MODEL, Running, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"json_schema": {"schema": {"type": "object"}}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def call() -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def narrow(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server with little room."""
    limits: dict[str, Any] = {
        "max_running": 4,
        "max_waiting": 8,
        "kv_budget": decoder.generate("x", max_new_tokens=150).kv_bytes,
    }
    with running(decoder, limits=Limits(new_tokens=200), **limits) as server:
        yield server


def schema(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": content}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [1.5]}, "prompt"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
        (TEXT, {"prompt": "x", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 101}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (TEXT, {"prompt": "x", "temperature": -0.1}, "temperature"),
        (TEXT, {"prompt": "x", "temperature": 2.1}, "temperature"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "x", "top_p": 1.01}, "top_p"),
        (TEXT, {"prompt": "x", "n": 0}, "n"),
        (TEXT, {"prompt": "x", "n": 17}, "n"),
        (TEXT, {"prompt": ["x"] * 9, "n": 2}, "n"),
        (TEXT, {"prompt": "x", "n": True}, "n"),
        (TEXT, {"prompt": "x", "seed": -1}, "seed"),
        (TEXT, {"prompt": "x", "seed": 2**64}, "seed"),
        (TEXT, {"prompt": "x", "stop": ""}, "stop"),
        (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (TEXT, {"prompt": "x", "stop": [5]}, "stop"),
        (TEXT, {"prompt": "x", "stop": "a" * 1001}, "stop"),
        (TEXT, {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "logit_bias": {str(one): 1 for one in range(1025)}}, "logit_bias"),
        (TEXT, {"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        (TEXT, {"prompt": "x", "frequency_penalty": -3}, "frequency_penalty"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": [1]}, "logit_bias"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "x", "top_k": -1}, "top_k"),
        (TEXT, {"prompt": "x", "min_p": 2}, "min_p"),
        (TEXT, {"prompt": "x", "timeout": 0}, "timeout"),
        (TEXT, {"prompt": "x", "drafter": "magic"}, "drafter"),
        (TEXT, {"prompt": "x", "verification": "none"}, "verification"),
        (TEXT, {"prompt": "x", "num_draft_tokens": -1}, "num_draft_tokens"),
        (TEXT, {"prompt": "x", "stream": "yes"}, "stream"),
        (TEXT, {"prompt": "x", "stream_options": {"what": 1}}, "stream_options"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        (TEXT, {"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        (TEXT, {"prompt": "x", "whatever": 1}, "whatever"),
        (TEXT, {"prompt": "x", "messages": HELLO}, "messages"),
        (TEXT, {"prompt": "x", "tools": []}, "tools"),
        (TEXT, {"prompt": "x", "model": 5}, "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": HELLO * 4097}, "messages"),
        (CHAT, {"messages": [5]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}, None]}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages"),
        (CHAT, {"messages": [*HELLO, {"role": "tool", "content": "wet"}]}, "messages"),
        (CHAT, {"messages": [*HELLO, {"role": "tool", "content": "wet", "tool_call_id": ""}]}, "messages"),
        (CHAT, {"messages": [*HELLO, {"role": "tool", "tool_call_id": "1"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "Hello", "tool_call_id": "1"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 101}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"messages": HELLO, "tools": [tool("f" * 65)]}, "tools"),
        (CHAT, {"messages": HELLO, "tools": [tool(f"f{one}") for one in range(129)]}, "tools"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [call()] * 129}]}, "messages"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "functions": [{}]}, "functions"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
        (CHAT, {"messages": HELLO, "store": True}, "store"),
        (CHAT, {"messages": HELLO, "service_tier": "flex"}, "service_tier"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "text"} | SCHEMA}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"} | SCHEMA}, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "text", "what": 1}}, "response_format"),
        (CHAT, {"messages": HELLO, "suffix": "x"}, "suffix"),
        (CHAT, {"messages": HELLO, "prompt": "x"}, "prompt"),
        (CHAT, {"messages": HELLO, "echo": True}, "echo"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_named(
    server: Running, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (TEXT, {"prompt": ""}, "prompt", "prompt is empty"),
        (TEXT, {"prompt": ["x", ""]}, "prompt", "prompt is empty"),
        (TEXT, {"prompt": [271]}, "prompt", "outside the vocabulary"),
        (TEXT, {"prompt": [271], "echo": True, "logprobs": 1}, "prompt", "outside the vocabulary"),
        (TEXT, {"prompt": [1] * 256}, "prompt", "context holds 256"),
        (TEXT, {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias", "holds id 99999"),
        (TEXT, {"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids", "holds id 99999"),
        (TEXT, {"prompt": "x", "min_tokens": 50}, "min_tokens", "asks for 50 new tokens, but max_tokens is 16"),
        (TEXT, {"prompt": "x", "drafter": "hybrid", "num_draft_tokens": 3}, "drafter", "leave num_draft_tokens"),
        (TEXT, {"prompt": "x", "num_draft_tokens": 1000}, "num_draft_tokens", "at most 255"),
        (TEXT, {"prompt": "x", "repetition_penalty": 1e-45}, "repetition_penalty", "by penalties"),
        (TEXT, {"prompt": "x", "n": 16, "max_tokens": 1}, "n", "only 12 may run and wait"),
        (TEXT, {"prompt": "x", "max_tokens": 200}, "max_tokens", "KV caches"),
        (CHAT, {"messages": HELLO * 60}, "messages", "context holds 256"),
        (CHAT, {"messages": HELLO, "min_tokens": 50, "max_tokens": 9}, "min_tokens", "but max_tokens is 9"),
        (
            CHAT,
            {"messages": HELLO, "min_tokens": 50, "max_completion_tokens": 9},
            "min_tokens",
            "but max_completion_tokens is 9",
        ),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 200}, "max_completion_tokens", "KV caches"),
        (CHAT, {"messages": HELLO, "response_format": schema({"not": {}})}, "response_format", "JSON schema"),
        (CHAT, {"messages": HELLO, "response_format": schema({"type": "x"})}, "response_format", "JSON schema"),
        (CHAT, {"messages": HELLO, "response_format": schema({"$ref": "#/a"})}, "response_format", "JSON schema"),
        (CHAT, {"messages": HELLO, "response_format": schema({"pattern": "(?=x)"})}, "response_format", "look-around"),
        (
            CHAT,
            {"messages": HELLO, "response_format": schema({"a": "b" * 65530})},
            "response_format",
            "65,536 characters",
        ),
    ],
)
def test_what_the_library_refuses_is_named_in_the_words_of_the_request(
    narrow: Running, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    answer = narrow.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert param in error["message"]
    assert not re.search(r"max_new_tokens|min_new_tokens", error["message"])


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            TEXT,
            {"prompt": 5},
            "prompt: Input should be a text, a list of texts, a list of token ids, or a list of such",
        ),
        (TEXT, {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer, got 'a'."),
        (TEXT, {"prompt": ["a", 1]}, "prompt.1: Input should be a valid string, got 1."),
        (TEXT, {"prompt": [[1], ["a"]]}, "prompt.1.0: Input should be a valid integer, got 'a'."),
        (TEXT, {"prompt": [None]}, "prompt: Input should be a text, a list of texts, a list of token ids"),
        (TEXT, {"prompt": []}, "prompt: List should have at least 1 item"),
        (TEXT, {"prompt": "x", "logit_bias": [1]}, "logit_bias: Input should be an object, got [1]."),
        (
            TEXT,
            {"prompt": "x", "stream": True, "stream_options": 5},
            "stream_options: Input should be an object, got 5.",
        ),
        (TEXT, {"prompt": "x", "stop": {"a": 1}}, "stop: Input should be a text, or a list of texts, got {'a': 1}."),
        (TEXT, {"prompt": "x", "stop": ["a", 1]}, "stop.1: Input should be a valid string, got 1."),
        (
            TEXT,
            {"prompt": "x", "num_draft_tokens": "many"},
            "num_draft_tokens: Input should be 'auto', or a whole number",
        ),
        (
            TEXT,
            {"prompt": "x", "num_draft_tokens": 1024},
            "num_draft_tokens: Input should be less than 1024, got 1024.",
        ),
        (
            TEXT,
            {"prompt": "x", "num_draft_tokens": True},
            "num_draft_tokens: Input should be 'auto', or a whole number",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: Input should be a text, or a list of",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: Input should be 'text', got 'image_url'.",
        ),
        (CHAT, {"messages": HELLO, "tool_choice": 5}, "tool_choice: Input should be 'none', 'auto', 'required', or an"),
        (
            CHAT,
            {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": 5}}},
            "tool_choice.function.name: Input should be a valid string, got 5.",
        ),
    ],
)
def test_a_value_of_a_wrong_kind_is_told_of_under_the_names_that_were_sent(
    server: Running, path: str, body: dict[str, Any], message: str
) -> None:
    assert server.post(path, body).json()["error"]["message"].startswith(message)


def test_no_field_is_a_union_whose_members_are_tried_one_by_one() -> None:
    """What pydantic reports of such a union has names in its path that nobody sent."""
    seen: set[str] = set()

    def check(kind: Any, where: str, metadata: Sequence[Any] = ()) -> None:
        seen.add(where)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                check(field.annotation, f"{where}.{name}", field.metadata)
        elif get_origin(kind) is Annotated:
            check(get_args(kind)[0], where, kind.__metadata__)
        elif get_origin(kind) is not Literal:
            members = [one for one in get_args(kind) if one is not type(None)]
            if get_origin(kind) in (Union, UnionType):
                assert len(members) == 1 or any(isinstance(one, Discriminator) for one in metadata), where
            for member in members:
                check(member, where)

    check(ChatBody, "chat")
    check(CompletionBody, "completion")
    assert {"completion.prompt", "chat.messages.content", "chat.tools.function.name"} <= seen


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"model": "tiny", "prompt": "x", "prompt": "y"}', "prompt"),
        (b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": 1, "6": 1, "5": 2}}', "logit_bias"),
        (b'{"model": "tiny", "prompt": "x", "metadata": {"a": "1", "\\u0061": "2"}}', "metadata"),
    ],
)
def test_a_key_that_stands_twice_in_an_object_is_refused(server: Running, data: bytes, param: str) -> None:
    answer = httpx2.post(f"{server.url}{TEXT}", content=data, timeout=30, verify=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "stands twice in one object" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "suffix": None, "best_of": 1, "user": "me", "metadata": {"a": "b"}},
        {"prompt": "x", "temperature": None, "stop": None, "n": None, "logit_bias": None, "stream": None},
        {"prompt": "x", "logit_bias": {}, "seed": 2**64 - 1, "stop": ["a", "b"]},
    ],
)
def test_values_that_ask_for_nothing_are_taken(server: Running, body: dict[str, Any]) -> None:
    assert server.post(TEXT, body).status_code == 200


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"nan",
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5_000 + b"}",
    b'{"model": "tiny", "prompt": "x"} trailing',
    b"\x00" * 100,
    "{'model': 'tiny'}".encode("utf-16"),
]


@pytest.mark.parametrize("index", range(len(BROKEN)))
def test_what_is_no_json(server: Running, index: int) -> None:
    for path in (TEXT, CHAT):
        answer = httpx2.post(f"{server.url}{path}", content=BROKEN[index], timeout=30, verify=False)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_paths_and_methods(server: Running) -> None:
    answer = server.post(TEXT, {"model": "gpt-9", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert server.get("/v1/models/gpt-9").status_code == 404
    assert server.get("/v1/whatever").json()["error"]["type"] == "not_found_error"
    assert server.get(TEXT).status_code == 405
    assert server.post(f"{TEXT}/", {"prompt": "x"}).status_code == 404
    assert server.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [MODEL]
