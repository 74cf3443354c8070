"""Clients that take their time: with a request's head, its body, an answer, or the end of a connection."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest

from paceline import SpeculativeDecoder
from paceline_server import Limits

from .conftest import MODEL, TEXT, Running, gate, open_stream, running, wait_for


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All that still comes, until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            data += piece
    return data


def trickle(connection: socket.socket, byte: bytes) -> bytes:
    """Send a byte now and then until the server has had enough; returns what it said."""
    data, until = b"", time.monotonic() + 30
    connection.settimeout(0.02)
    while time.monotonic() < until:
        try:
            connection.sendall(byte)
            piece = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionError:
            return data
        if not piece:
            return data
        data += piece
    raise AssertionError("the server takes bytes for as long as they come")


def test_a_connection_that_asks_nothing_is_closed(decoder: SpeculativeDecoder) -> None:
    with running(decoder, limits=Limits(client_s=0.2)) as server, connected(server) as connection:
        assert rest(connection) == b""
        server.wait_for(lambda: not server.num_connections())


@pytest.mark.parametrize("trickles", [False, True])
def test_a_head_that_does_not_end_is_408(decoder: SpeculativeDecoder, trickles: bool) -> None:
    with running(decoder, limits=Limits(client_s=0.2)) as server, connected(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Long: x")
        answer = trickle(connection, b"x") if trickles else rest(connection)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "head_timeout"


def test_a_body_that_goes_on_behind_its_answer_is_cut_off(decoder: SpeculativeDecoder) -> None:
    with running(decoder, limits=Limits(body_bytes=1000, client_s=0.5)) as server, connected(server) as connection:
        connection.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n".encode())
        assert trickle(connection, b"x").startswith(b"HTTP/1.1 4")  # 413, or 408 where this process was held up
        server.wait_for(lambda: not server.num_connections())


def test_a_head_that_is_too_long_is_400(server: Running) -> None:
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 200_000 + b"\r\n\r\n")
        assert rest(connection)[:12] in (b"HTTP/1.1 400", b"")  # a reset may overtake it
    assert server.get("/health", headers={"x-long": "x" * 50_000}).status_code == 200


def test_whoever_waits_for_an_answer_is_not_impatient(slow: SpeculativeDecoder) -> None:
    with running(slow, limits=Limits(client_s=1)) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
        connection.request("POST", TEXT, json.dumps(body))
        wait_for(server, running=1)
        time.sleep(1.5)  # longer than a client may take
        gate(slow).gate.set()
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 2)
        connection.close()


def test_a_connection_serves_many_requests(server: Running) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for _ in range(3):
        connection.request("GET", "/health")
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (200, True)
    connection.close()


@pytest.mark.slow
def test_a_connection_between_two_requests_is_closed_after_5_s(server: Running) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        started = time.monotonic()
        assert rest(connection).startswith(b"HTTP/1.1 200 ")
        assert 4 < time.monotonic() - started < 25


def test_a_body_that_is_too_slow_is_408(decoder: SpeculativeDecoder) -> None:
    with running(decoder, limits=Limits(client_s=0.2)) as server, connected(server) as connection:
        connection.sendall(f'POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{"model"'.encode())
        assert rest(connection).startswith(b"HTTP/1.1 408 ")


def test_a_stream_that_nobody_reads_ends(slow: SpeculativeDecoder) -> None:
    with running(slow, limits=Limits(client_s=0.3), send_buffer=4096) as server:
        gate(slow).gate.set()
        with open_stream(server, max_tokens=4000, logprobs=20):  # soon more than the buffers between hold
            server.wait_for(lambda: 'status="499"} 1.0' in server.get("/metrics").text)
        server.wait_until_idle()


def test_a_whole_answer_that_nobody_reads_is_dropped(slow: SpeculativeDecoder) -> None:
    """More than the buffers between hold: without an end to it, it would stay in the server's memory."""
    with running(slow, limits=Limits(client_s=0.5, new_tokens=4096), send_buffer=4096) as server:
        gate(slow).gate.set()
        with open_stream(server, max_tokens=1000, logprobs=20, stream=False):
            server.wait_for(lambda: 'status="200"} 1.0' in server.get("/metrics").text)
            server.wait_for(lambda: not server.num_connections())


def test_errors_come_whole_through_the_same_connection(server: Running) -> None:
    """A refusal leaves the connection usable."""
    with httpx2.Client(base_url=server.url, timeout=30) as client:
        for _ in range(2):
            assert client.post(TEXT, json={"model": MODEL}).status_code == 400
            assert client.post(TEXT, json={"model": MODEL, "prompt": "x", "max_tokens": 1}).status_code == 200
