"""HTTP/1.1 connections that end where no request comes: uvicorn alone waits for the head of one as long as it takes."""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .api_error import ApiError

__all__ = ["connections"]


class _Connection(H11Protocol):
    """A connection that is closed where the head of a request is not there after `client_s` seconds.

    The time runs from the connection's beginning, and from the end of each answer. Where a part of a head has come, 408
    is answered.
    """

    client_s: float
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # as uvicorn says it
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Let the time run while no request is being answered."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(self.client_s, self._give_up)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if self.transport.is_closing():
            return
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            message = f"The head of the request did not arrive within {self.client_s:g} s."
            answer = ApiError(408, message, code="head_timeout").response()
            headers = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def connections(client_s: float) -> type[H11Protocol]:
    """The protocol of connections whose clients have so many seconds for the head of a request."""

    class Connection(_Connection):
        pass

    Connection.client_s = client_s
    return Connection
