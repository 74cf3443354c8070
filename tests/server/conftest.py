"""A server on a real port, over a pair of tiny random models."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

import paceline
from paceline import AsyncEngine, SpeculativeDecoder
from paceline_server import Limits, Served
from paceline_server.keys import ApiKeys
from paceline_server.record import Journal
from paceline_server.server import Address, configuration

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at `url`."""

    url: str
    served: Served
    num_connections: Callable[[], int]

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with httpx2.Client(timeout=30) as client:
            return client.post(f"{self.url}{path}", json={"model": MODEL} | body, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        with httpx2.Client(timeout=30) as client:
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
    address: Address = Address(port=0, drain_s=5),  # noqa: B008 - frozen
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
