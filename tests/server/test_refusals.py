"""What the server refuses: each case with its status, and the parameter that the answer names."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from .conftest import MODEL, Running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


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
        (TEXT, {"prompt": "x", "whatever": 1}, "whatever"),
        (TEXT, {"prompt": "x", "messages": HELLO}, "messages"),
        (TEXT, {"prompt": "x", "tools": []}, "tools"),
        (TEXT, {"prompt": "x", "model": 5}, "model"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hello"}, "messages"),
        (CHAT, {"messages": [5]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}, None]}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 101}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
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
    ("path", "body", "words"),
    [
        (TEXT, {"prompt": ""}, "prompt is empty"),
        (TEXT, {"prompt": [271]}, "outside the vocabulary"),
        (TEXT, {"prompt": [1] * 256}, "context holds 256"),
        (TEXT, {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "min_tokens": 50}, "min_new_tokens"),
        (TEXT, {"prompt": "x", "drafter": "hybrid", "num_draft_tokens": 3}, "hybrid"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "JSON schema",
        ),
    ],
)
def test_what_the_library_refuses(server: Running, path: str, body: dict[str, Any], words: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


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
        answer = httpx2.post(f"{server.url}{path}", content=BROKEN[index], timeout=30)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_models_paths_and_methods(server: Running) -> None:
    answer = server.post(TEXT, {"model": "gpt-9", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert server.get("/v1/models/gpt-9").status_code == 404
    assert server.get("/v1/whatever").json()["error"]["type"] == "not_found_error"
    assert server.get(TEXT).status_code == 405
    assert server.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == [MODEL]
