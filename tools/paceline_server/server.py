"""Runs the application with uvicorn: binds, tells where, drains on SIGTERM and SIGINT, loads anew on SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from paceline import SpeculativeDecoder
from paceline.errors import InvalidInputError, PacelineError, shown
from paceline.model import CausalLM

from .app import create_app
from .connections import connections
from .keys import ApiKeys
from .record import Journal
from .served import Served

__all__ = ["Address", "configuration", "serve"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_TOLD_S = 5  # seconds that streams have to send their last event in, once the time for them is over


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and how.

    Attributes:
        host: a name or an address; the machine itself unless someone says otherwise.
        port: 0 takes a free one.
        tls_certificate: a file in PEM; with it and its key, the server speaks TLS.
        tls_key: its key.
        max_connections: more of them get 503.
        drain_s: seconds that running texts have to end in, once the server is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_connections: int = 1000
    drain_s: int = 30

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInputError("TLS needs both a certificate and its key; give both, or none of them.")

    def bind(self, client_s: float | None = None) -> socket.socket:
        """Take the port.

        With `client_s`, connections whose client takes nothing of what was sent for so many seconds are closed.

        Raises:
            InvalidInputError: the host is no address.
            PacelineError: the port is taken, or the host is not this machine's.
        """
        try:
            family = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][0]
        except (socket.gaierror, UnicodeError) as error:
            raise InvalidInputError(
                f"--host {shown(self.host)} is no address ({getattr(error, 'strerror', None) or error}); 127.0.0.1 is "
                "this machine alone, 0.0.0.0 whoever can reach it."
            ) from error
        try:
            listening = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise PacelineError(
                f"Port {self.port} of {self.host} cannot be taken ({os.strerror(error.errno or 0)}); end what holds "
                "it, or choose another one with --port, 0 for any that is free."
            ) from error
        # Connections inherit it. asyncio sets it only where a socket's protocol number is known, and 40 ms go by
        # without it, for the head of an answer and its body are written one after the other.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if client_s is not None:  # whether the client has gone without a word, or does not read
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * client_s) or 1)
        return listening

    def check_tls(self) -> None:
        """Read the certificate and its key.

        Raises:
            InvalidInputError: they cannot be used.
        """
        if self.tls_certificate is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_certificate, self.tls_key)
        except ssl.SSLError as error:
            raise InvalidInputError(
                f"The certificate {self.tls_certificate} and the key {self.tls_key} cannot be used "
                f"({error.reason or error}); both must be PEM, and belong to each other."
            ) from error


def configuration(
    served: Served, address: Address, keys: ApiKeys | None = None, journals: Sequence[Journal] = ()
) -> uvicorn.Config:
    """How uvicorn serves `served`; see `serve`."""
    return uvicorn.Config(
        create_app(served, keys, journals),
        loop="asyncio",
        http=connections(served.limits.client_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=address.max_connections,
        timeout_graceful_shutdown=address.drain_s + _TOLD_S,
        ssl_certfile=address.tls_certificate,
        ssl_keyfile=address.tls_key,
    )


def serve(
    served: Served,
    address: Address,
    keys: ApiKeys,
    *,
    load: Callable[[], SpeculativeDecoder],
    on_start: Callable[[str], None],
    journals: Sequence[Journal] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then let running texts end; a second SIGINT does not wait for them.

    Args:
        served: what to serve; its engine is closed at the end.
        address: where.
        keys: whom to serve.
        load: makes a decoder anew, on SIGHUP. What it raises is logged, and the old one goes on.
        on_start: called with the URL once the port answers.
        journals: told of every request.

    Raises:
        InvalidInputError: the certificate cannot be used, or the host is no address.
        PacelineError: the port cannot be taken.
    """
    address.check_tls()
    with contextlib.closing(address.bind(served.limits.client_s)) as listening:
        server = _Server(configuration(served, address, keys, journals), served, load, on_start, address.drain_s)
        asyncio.run(server.run_all([listening]))


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        served: Served,
        load: Callable[[], SpeculativeDecoder],
        on_start: Callable[[str], None],
        drain_s: int,
    ) -> None:
        super().__init__(config)
        self._drain_s = drain_s
        self._served = served
        self._load = load
        self._on_start = on_start
        self._reload: asyncio.Task[None] | None = None
        self._returning: set[asyncio.Task[None]] = set()
        self._end: asyncio.Task[None] | None = None

    async def run_all(self, sockets: list[socket.socket]) -> None:
        try:
            await self.serve(sockets)
        finally:
            if self._end is not None:
                self._end.cancel()
            await self._served.engine.aclose()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:
            host, port = sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._on_start(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside the event loop. uvicorn's own way raises them again at the end: no exit code 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        loop.add_signal_handler(signal.SIGHUP, self._begin_reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._served.draining = True
        if self._end is None:
            self._end = asyncio.get_running_loop().create_task(self._end_texts())
        super().handle_exit(sig, frame)

    async def _end_texts(self) -> None:
        """End what still runs when the time for it is over, so that each client is told."""
        await asyncio.sleep(self._drain_s)
        if left := self._served.engine.stats.running + self._served.engine.stats.waiting:
            _log.warning("%d texts are not complete after %d s and are ended.", left, self._drain_s)
        await self._served.engine.drain(0)

    def _begin_reload(self) -> None:
        if self._reload is None or self._reload.done():
            self._reload = asyncio.create_task(self._reload_decoder())

    async def _reload_decoder(self) -> None:
        before = weakref.ref(self._served.decoder.target)
        try:
            self._served.decoder = await asyncio.to_thread(self._load)
        except (PacelineError, OSError) as error:
            _log.error("The bundle was not loaded anew, the old one goes on: %s", error)
        else:
            _log.warning("The bundle was loaded anew; requests from now on use it.")
            returning = asyncio.create_task(_return_memory(before))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)


async def _return_memory(model: weakref.ref[CausalLM]) -> None:
    """Once no text runs on this model any more: what it held is free then, but the C library would keep it."""
    while model() is not None:
        await asyncio.sleep(_LOOK_S)
    with contextlib.suppress(AttributeError, OSError):  # another library than glibc
        await asyncio.to_thread(ctypes.CDLL(None).malloc_trim, 0)
