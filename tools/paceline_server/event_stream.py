"""Server-sent events, as OpenAI's streams have them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from paceline.pieces import Piece

from .api_error import ApiError, api_error
from .record import RequestRecord

__all__ = ["EventStream", "pieces_field"]

_log = logging.getLogger(__name__)
_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class EventStream:
    """A response of JSON objects, one an event, and `[DONE]` behind them.

    An error in the middle becomes the last event, for the status has been sent by then. A client that does not read for
    `client_s` seconds is dropped.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        work: AbstractContextManager[object],
        client_s: float,
        record: RequestRecord,
    ) -> None:
        """Send `chunks`, inside of `work`, which ends what makes them; `record` is told of an error in the middle."""
        self._chunks = chunks
        self._work = work
        self._client_s = client_s
        self._record = record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            ClientDisconnect: the client does not read.
        """

        async def event(data: str) -> None:
            async with asyncio.timeout(self._client_s):
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        with self._work:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            async with aclosing(self._chunks) as chunks:
                try:
                    async for chunk in chunks:
                        await event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
                    await event("[DONE]")
                except TimeoutError as error:
                    raise ClientDisconnect from error
                except Exception as error:
                    await event(json.dumps(self._failed(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _failed(self, error: Exception) -> dict[str, Any]:
        """The last event. It is made in a frame that the error does not hold, so that both go at once."""
        answer = api_error(error)
        if answer is None:
            _log.error("A stream failed.", exc_info=error)
            answer = ApiError(500, "The server failed on this request.", code="internal_error")
        self._record.error = answer.code
        return answer.as_dict()


def pieces_field(pieces: Sequence[Piece] | None) -> dict[str, Any]:
    """What a choice of a stream says more where pieces are wanted: which text the draft had proposed."""
    return {} if pieces is None else {"pieces": [piece._asdict() for piece in pieces]}
