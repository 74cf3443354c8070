"""Every limit is driven, and clients come and go."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

from paceline import Generation, SpeculativeDecoder
from paceline_server import Limits, Served
from paceline_server.api_error import ApiError
from paceline_server.keys import ApiKeys

from .conftest import TEXT, Running, gate, open_stream, running, wait_for

CHAT = "/v1/chat/completions"


def wait_for_requests(server: Running, wanted: int) -> None:
    """Until so many run or wait: how many of them run is a matter of when they came."""
    server.wait_for(lambda: (stats := server.served.engine.stats).running + stats.waiting == wanted)


def test_a_full_queue_is_429_with_a_time_to_come_again(slow: SpeculativeDecoder) -> None:
    with running(slow, max_running=1, max_waiting=1) as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.post, TEXT, {"prompt": "x", "max_tokens": 4}) for _ in range(2)]
        wait_for(server, running=1, waiting=1)
        answer = server.post(TEXT, {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        gate(slow).gate.set()
        assert [one.result().status_code for one in asked] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_text(slow: SpeculativeDecoder, stream: bool) -> None:
    with running(slow, max_running=1) as server:
        gate(slow).gate.set()
        if stream:
            with open_stream(server) as connection:
                assert b"200 OK" in connection.recv(1000)
        else:
            with open_stream(server, stream=False):
                wait_for(server, running=1)
        server.wait_until_idle()
        assert server.served.engine.stats.ended["cancelled"] == 1
        assert gate(slow).num_forwards < 2900
        assert 'endpoint="completions",status="499"} 1.0' in server.get("/metrics").text


def test_clients_that_vanish_leave_nothing_behind(slow: SpeculativeDecoder) -> None:
    with running(slow, max_running=4, max_waiting=100) as server:
        with ExitStack() as connections:
            for _ in range(40):
                connections.enter_context(open_stream(server))
            wait_for_requests(server, 40)
        gate(slow).gate.set()
        server.wait_until_idle()
        assert server.served.engine.stats.ended["cancelled"] == 40
        assert server.post(TEXT, {"prompt": "x", "max_tokens": 3}).status_code == 200


def test_a_body_that_is_too_large(decoder: SpeculativeDecoder) -> None:
    with running(decoder, limits=Limits(body_bytes=1000)) as server:
        answer = server.post(TEXT, {"prompt": "x" * 2000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        pieces = (b"x" * 300 for _ in range(20))
        with httpx2.Client() as client:
            assert client.post(f"{server.url}{TEXT}", content=pieces).status_code == 413


def test_a_prompt_or_a_text_that_is_too_long(decoder: SpeculativeDecoder) -> None:
    limits = Limits(prompt_tokens=10, new_tokens=5, choices=2)
    with running(decoder, limits=limits) as server:
        answer = server.post(TEXT, {"prompt": [90] * 11})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "at most 5 tokens" in server.post(TEXT, {"prompt": "x", "max_tokens": 6}).json()["error"]["message"]
        assert "at most 2" in server.post(TEXT, {"prompt": "x", "n": 3}).json()["error"]["message"]
        # What a request leaves open is within the limit.
        assert server.post(TEXT, {"prompt": "x", "min_tokens": 5}).json()["usage"]["completion_tokens"] == 5
    with running(decoder, limits=Limits(prompt_tokens=30, new_tokens=5)) as server:
        hello = [{"role": "user", "content": "Hi"}]
        answer = server.post(CHAT, {"messages": [*hello, *hello, *hello]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert server.post(CHAT, {"messages": hello, "min_tokens": 5}).json()["usage"]["completion_tokens"] == 5
        assert server.post(CHAT, {"messages": hello, "max_tokens": 6}).status_code == 400


def test_memory_that_cannot_suffice_is_refused_with_the_numbers(slow: SpeculativeDecoder) -> None:
    with running(slow, kv_budget=50) as server:
        answer = server.post(TEXT, {"prompt": "x", "max_tokens": 60})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "kv_memory_exceeded")
        assert "61 bytes" in error["message"]
        assert "is 50" in error["message"]


@pytest.mark.parametrize("asked", [{"timeout": 0.1}, {}, {"timeout": 1000}], ids=["client", "server", "least"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(slow: SpeculativeDecoder, stream: bool, asked: dict[str, float]) -> None:
    """Of the request or of the server, whichever comes first; 3,000 tokens take a millisecond each, at least."""
    with running(slow, limits=Limits(timeout_s=600 if asked.get("timeout") == 0.1 else 0.1)) as server:
        gate(slow).gate.set()
        answer = server.post(TEXT, {"prompt": "x", "max_tokens": 3000, "stream": stream} | asked)
        if stream:  # the status was sent before the text began
            assert answer.status_code == 200
            last = answer.text.strip().split("\n\n")[-1]  # behind what was written until then
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_passed"
            assert "[DONE]" not in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_passed")


def test_no_more_texts_run_at_once_than_may(slow: SpeculativeDecoder) -> None:
    with running(slow, max_running=2, max_waiting=8) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.post, TEXT, {"prompt": "x", "max_tokens": 4}) for _ in range(6)]
        wait_for_requests(server, 6)
        gate(slow).gate.set()
        assert [one.result().status_code for one in asked] == [200] * 6
        assert gate(slow).most_caches == 2


def test_a_fault_of_the_server_tells_nothing(slow: SpeculativeDecoder, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("secret")

    gate(slow).forward = fail  # type: ignore[method-assign]
    with running(slow) as server:
        answer = server.post(TEXT, {"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "secret" not in answer.text
        streamed = server.post(TEXT, {"prompt": "x", "stream": True})
        assert "internal_error" in streamed.text
        assert "secret" not in streamed.text
        assert server.get("/health").status_code == 200
    assert "secret" in caplog.text


def test_keys(decoder: SpeculativeDecoder) -> None:
    with running(decoder, ApiKeys(["one", "two"])) as server:
        body = {"prompt": "x", "max_tokens": 1}
        answers = [
            server.post(TEXT, body, headers=headers)
            for headers in (
                {},
                {"Authorization": "Bearer three"},
                {"Authorization": "Basic one"},
                {"Authorization": "one"},
            )
        ]
        assert [answer.status_code for answer in answers] == [401] * 4
        assert len({answer.text for answer in answers}) == 1
        assert server.get("/v1/models").status_code == 401
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert server.post(TEXT, body, headers=headers).status_code == 200
            assert server.get("/v1/models", headers=headers).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert server.get(path).status_code == 200


def test_keys_from_a_file_and_the_environment(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\n\nfirst\n  second  \n")
    keys = ApiKeys.read(file, "third, fourth")
    for key in ("first", "second", "third", "fourth"):
        keys.check(f"Bearer {key}")
    with pytest.raises(ApiError):
        keys.check("Bearer # a comment")
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys.read(file, None)
    with pytest.raises(ValueError, match="holds no key"):
        ApiKeys.read(None, " , ")
    ApiKeys.read(None, None).check(None)


def test_metrics_and_readiness(slow: SpeculativeDecoder) -> None:
    gate(slow).gate.set()
    with running(slow, kv_budget=1000) as server:
        server.post(TEXT, {"prompt": "xy", "max_tokens": 6})
        server.post(CHAT, {"messages": []})
        text = server.get("/metrics").text
        for line in (
            "paceline_new_tokens_total 6.0",
            "paceline_prompt_tokens_total 2.0",
            "paceline_rounds_total 5.0",
            'paceline_texts_total{outcome="finished"} 1.0',
            'paceline_requests_total{endpoint="completions",status="200"} 1.0',
            'paceline_requests_total{endpoint="chat",status="400"} 1.0',
            "paceline_time_to_first_token_seconds_count 1.0",
            "paceline_inter_token_seconds_count 5.0",
            "paceline_kv_budget_bytes 1000.0",
            "paceline_kv_bytes 0.0",
        ):
            assert f"{line}\n" in text
        assert server.get("/ready").status_code == 200
        server.served.draining = True
        assert server.get("/ready").status_code == 503


def test_what_has_ended_or_was_refused_waits_for_no_garbage_collector(server: Running) -> None:
    """It would keep caches in memory until then, and the models of a bundle that was loaded anew."""

    def alive() -> int:
        return sum(isinstance(one, Generation | Served) for one in gc.get_objects())

    server.post(TEXT, {"prompt": "x"})
    server.wait_until_idle()
    gc.freeze()  # what there was before is not counted
    gc.disable()
    try:
        for status, body in (
            (200, {}),
            (200, {"stream": True}),
            (200, {"n": 3, "seed": 1}),
            (200, {"echo": True, "logprobs": 1}),
            (400, {"prompt": [9999]}),
            (400, {"temperature": 9}),
            (400, {"n": 16, "max_tokens": 100, "prompt": ["x"] * 16}),
            (408, {"timeout": 1e-6}),
            (200, {"timeout": 1e-6, "stream": True}),
        ):
            assert server.post(TEXT, {"prompt": "x", "max_tokens": 4} | body).status_code == status, body
        server.wait_for(lambda: not alive())
    finally:
        gc.enable()
        gc.unfreeze()
