"""Damaged and random requests: every answer is one that the description promises, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import random
import string
import subprocess
import sys
from collections import Counter
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import SpeculativeDecoder
from paceline_server import Limits
from paceline_server.bodies import ChatBody, CompletionBody
from paceline_server.keys import ApiKeys

from .conftest import MODEL, Running, plain_client, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": MODEL,
        "messages": [{"role": "system", "content": "é"}, {"role": "user", "content": "Hi 😀"}],
        "max_tokens": 1,
        "stop": ["a"],
        "n": 1,
        "temperature": 0.5,
        "logit_bias": {"65": -1.5},
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    TEXT: {"model": MODEL, "prompt": ["Hi 😀", "é"], "max_tokens": 1, "echo": True, "logprobs": 2, "seed": 1},
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 1e-320, "", "x", "\0",
    "\u202e", "😀" * 100, [], [[]], [None], [0] * 1000, {}, {"": {}}, {"a": [{}]}, [[[[[[0]]]]]],
]  # fmt: skip


def text_of(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def truncated(rng: random.Random, body: dict[str, Any]) -> bytes:
    data = text_of(body)
    return data[: rng.randrange(len(data))]


def spoiled(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A few bytes dropped, repeated or replaced, not always by ones of UTF-8."""
    data = bytearray(text_of(body))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        new = rng.choice((rng.randbytes(rng.randint(0, 3)), rng.choice(string.printable).encode()))
        data[place : place + rng.randint(0, 3)] = new
    return bytes(data)


def wrong_type(rng: random.Random, body: dict[str, Any]) -> bytes:
    """An odd value somewhere: in a field, or deeper in."""
    body = json.loads(text_of(body))
    names = [*body, *CompletionBody.model_fields, *ChatBody.model_fields, "what"]
    name, place = rng.choice(names), body
    while isinstance(place.get(name), dict | list) and place[name] and rng.random() < 0.6:
        inner = place[name]
        if isinstance(inner, list):
            index = rng.randrange(len(inner))
            if not isinstance(inner[index], dict):
                inner[index] = rng.choice(ODD)
                return text_of(body)
            place, name = inner[index], rng.choice([*inner[index], "what"])
        else:
            place, name = inner, rng.choice([*inner, "what"])
    place[name] = rng.choice(ODD)
    return text_of(body)


def huge(rng: random.Random, body: dict[str, Any]) -> bytes:
    long: Any = rng.choice(
        ("x" * 100_000, [1] * 20_000, {str(one): 1 for one in range(5000)}, int("9" * 4000), [{}] * 9000)
    )
    data = json.dumps(body | {rng.choice([*body, "user", "what"]): "LONG"})
    text = str(long) if isinstance(long, int) else json.dumps(long)
    return data.replace('"LONG"', text).encode()


def deep(rng: random.Random, body: dict[str, Any]) -> bytes:
    depth = rng.choice((10, 100, 190, 250, 3000, 50_000))
    begin, end = rng.choice((("[", "]"), ('{"a":', "}")))
    data = json.dumps(body | {rng.choice([*body, "metadata", "what"]): "DEEP"})
    return data.replace('"DEEP"', begin * depth + "1" + end * depth).encode()


def no_text(rng: random.Random, body: dict[str, Any]) -> bytes:
    bad = rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80", b"\\ud800", b"\\udc00x"))
    return text_of(body).replace(rng.choice((b"Hi", "é".encode(), b"model", MODEL.encode())), bad)


def no_number(rng: random.Random, body: dict[str, Any]) -> bytes:
    word = rng.choice((b"NaN", b"Infinity", b"-Infinity", b"nan", b"1e999", b"-1e999", b"0x1", b"01", b"1.", b"+1"))
    return (
        json.dumps(body | {rng.choice(("temperature", "top_p", "seed", "n", "max_tokens")): "WORD"})
        .encode()
        .replace(b'"WORD"', word)
    )


def twice(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A key that stands in an object twice."""
    name = rng.choice([*body])
    return text_of(body)[:-1] + b", " + text_of({name: rng.choice([body[name], *ODD])})[1:]


DAMAGES = (truncated, spoiled, wrong_type, huge, deep, no_text, no_number, twice)
ALLOWED = {200, 400, 404}


def damage(server: Running, count: int) -> Counter[int]:
    """Send `count` damaged bodies; returns the statuses of the answers."""
    rng = random.Random(0)
    statuses: Counter[int] = Counter()
    with httpx2.Client(timeout=60) as client:
        for number in range(count):
            path = rng.choice((CHAT, TEXT))
            data = DAMAGES[number % len(DAMAGES)](rng, WHOLE[path])
            answer = client.post(f"{server.url}{path}", content=data)
            is_late = answer.status_code == 408 and b"timeout" in data  # one of 1e-320 s, for instance
            assert answer.status_code in ALLOWED or is_late, data[:2000]
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert len(answer.content) < 2000, data[:2000]
                assert error["param"] or error["code"] in ("invalid_json", "deadline_passed"), (error, data[:2000])
            statuses[answer.status_code] += 1
    return statuses


def test_damaged_bodies_never_fail_the_server(server: Running) -> None:
    statuses = damage(server, 800)
    assert statuses[400] > 400
    assert server.post(TEXT, WHOLE[TEXT]).status_code == 200


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_thousand_damaged_bodies_leave_nothing_behind(decoder: SpeculativeDecoder) -> None:
    with running(decoder, kv_budget=1 << 24) as server:
        damage(server, 2000)  # so that caches and pools are as large as they become
        gc.collect()
        before, files = resident(), len(os.listdir("/proc/self/fd"))
        statuses = damage(server, 10_000)
        server.wait_until_idle()
        gc.collect()
        assert sum(statuses.values()) == 10_000
        assert resident() < 1.05 * before
        assert len(os.listdir("/proc/self/fd")) <= files
        assert server.served.engine.stats.kv_bytes == 0
        assert server.post(TEXT, WHOLE[TEXT]).status_code == 200


@pytest.mark.slow
def test_schemathesis_finds_nothing(decoder: SpeculativeDecoder) -> None:
    """Over the server's own description. PACELINE_FUZZ_S says for how long, a minute unless it is set."""
    pytest.importorskip("schemathesis", reason="pip install schemathesis")
    checks = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
        "negative_data_rejection",
    )  # fmt: skip
    seconds = os.environ.get("PACELINE_FUZZ_S", "60")
    with running(decoder, limits=Limits(new_tokens=8), kv_budget=1 << 24) as server:
        done = subprocess.run(
            [
                *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
                *("--no-color", "run", f"{server.url}/openapi.json", "--checks", ",".join(checks)),
                *("--max-time", seconds, "--continue-on-failure", "--suppress-health-check", "all"),
            ],
            capture_output=True, text=True,
        )  # fmt: skip
        print(done.stdout[-4000:])
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
        server.wait_until_idle()
        assert server.served.engine.stats.kv_bytes == 0
        assert server.post(TEXT, WHOLE[TEXT]).status_code == 200


def fields_of(kind: type[CompletionBody] | type[ChatBody]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are nearly right: fields that exist, with values that may fit or not."""
    anything = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
    small = st.sampled_from([0, 1, 2, 0.5, True, False, None, "a", ["a"], {}, "auto", {"type": "text"}, {"5": 1}])
    names = sorted(set(kind.model_fields) - {"model", "max_tokens", "max_completion_tokens", "messages", "prompt"})
    return st.dictionaries(st.sampled_from(names), small | anything, max_size=4)


def test_random_fields_are_answered_or_named(server: Running) -> None:
    fields_for = {is_chat: fields_of(ChatBody if is_chat else CompletionBody) for is_chat in (False, True)}
    with plain_client() as client:

        @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(data=st.data(), is_chat=st.booleans())
        def check(data: st.DataObject, is_chat: bool) -> None:
            fields = data.draw(fields_for[is_chat])
            prompt = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Hi"}
            body = text_of({"model": MODEL, "max_tokens": 1, **prompt, **fields})
            answer = client.post(f"{server.url}{CHAT if is_chat else TEXT}", content=body)
            assert answer.status_code in (200, 400), fields
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["message"]
                assert error["param"] in fields, error

        check()


def test_the_description_has_every_field_and_path(server: Running, decoder: SpeculativeDecoder) -> None:
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    for kind in (ChatBody, CompletionBody):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
    references = json.dumps(document).split('"$ref": "#/components/schemas/')[1:]
    assert {reference.split('"')[0] for reference in references} <= set(schemas)
    for path, operations in document["paths"].items():
        if "get" in operations:
            answer = server.get(path)
            assert answer.status_code == 200
            schema = operations["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            assert set(schema["required"]) <= set(answer.json())
    assert "securitySchemes" not in document["components"]
    with running(decoder, ApiKeys(["key"])) as locked:
        document = locked.get("/openapi.json").json()
        assert document["components"]["securitySchemes"]
        assert "401" in document["paths"][CHAT]["post"]["responses"]
