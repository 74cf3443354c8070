"""A server on a real port, over a pair of tiny random models."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn

import paceline
from paceline import AsyncEngine, SpeculativeDecoder
from paceline.testing import TableModel
from paceline_server import Limits, Served
from paceline_server.keys import ApiKeys
from paceline_server.record import Journal
from paceline_server.server import Address, configuration

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MODEL = "tiny"
TEXT = "/v1/completions"
ADDRESS = Address(port=0, drain_s=5)


def plain_client() -> httpx2.Client:
    """A client without TLS, which would read the certificates of all authorities first: 50 ms each time."""
    return httpx2.Client(timeout=30, verify=False)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at `url`."""

    url: str
    served: Served
    num_connections: Callable[[], int]

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with plain_client() as client:
            return client.post(f"{self.url}{path}", json={"model": MODEL} | body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        with plain_client() as client:
            return client.get(f"{self.url}{path}", **options)

    def wait_until_idle(self) -> None:
        self.wait_for(lambda: not ((stats := self.served.engine.stats).running or stats.waiting))

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < until, self.served.engine.stats
            time.sleep(0.01)


@contextmanager
def running(
    decoder: SpeculativeDecoder,
    keys: ApiKeys | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    journals: Sequence[Journal] = (),
    send_buffer: int | None = None,
    address: Address = ADDRESS,
    **engine: Any,
) -> Iterator[Running]:
    served = Served(decoder, AsyncEngine(**engine), MODEL, limits)
    server = uvicorn.Server(configuration(served, address, keys, journals))
    with address.bind(limits.client_s) as listening:
        if send_buffer is not None:  # of every connection, in bytes
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield Running(
                f"http://127.0.0.1:{listening.getsockname()[1]}", served, lambda: len(server.server_state.connections)
            )
        finally:
            server.should_exit = True
            thread.join()
            asyncio.run(served.engine.aclose())


@pytest.fixture(scope="session")
def decoder(tiny_bundle: Path) -> SpeculativeDecoder:
    """The pair, with a chat template and a small prefix cache."""
    decoder = paceline.load(tiny_bundle, prefix_cache_bytes=1 << 20)
    assert decoder.tokenizer is not None
    decoder.tokenizer.chat_template = TEMPLATE
    return decoder


@pytest.fixture(scope="session")
def server(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server with usual limits."""
    with running(decoder, limits=Limits(new_tokens=100), kv_budget=1 << 24) as server:
        yield server


class SlowModel(TableModel):
    """A table whose forwards wait until the test lets them go on, and are slow then; it never ends a text."""

    def __init__(self, vocab_size: int) -> None:
        logits = np.random.default_rng(0).standard_normal((vocab_size, vocab_size))
        logits[:, 256:] = -np.inf
        super().__init__(logits, max_length=4096)
        self.gate = threading.Event()
        self.num_forwards = 0
        self.most_caches = 0

    def forward(self, *args: Any, **options: Any) -> Any:
        self.num_forwards += 1
        self.most_caches = max(self.most_caches, len(self.live_caches))
        assert self.gate.wait(60)
        time.sleep(0.001)  # so that thousands of tokens outlast what a busy machine needs to notice that a client left
        return super().forward(*args, **options)


@pytest.fixture
def slow(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A decoder with the tiny pair's tokenizer and a model that waits."""
    model = SlowModel(decoder.vocab_size)
    return SpeculativeDecoder(model, None, decoder.tokenizer, decoder.vocab_size, decoder.eos_token_ids)


def gate(decoder: SpeculativeDecoder) -> SlowModel:
    assert isinstance(decoder.target, SlowModel)
    return decoder.target


def open_stream(server: Running, max_tokens: int = 3000, stream: bool = True, **options: int) -> socket.socket:
    """A client that asks for a text, and reads it or not."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": max_tokens, "stream": stream} | options).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.settimeout(20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that what is not read is soon noticed
    connection.connect((host, int(port)))
    connection.sendall(head + body)
    return connection


def wait_for(server: Running, **wanted: int) -> None:
    """Until the engine's figures are these."""
    server.wait_for(lambda: all(getattr(server.served.engine.stats, name) == value for name, value in wanted.items()))
