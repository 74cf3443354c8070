"""One endpoint that takes a body: keys, limits of size and time, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_error import ApiError, api_error
from .keys import ApiKeys
from .metrics import Metrics
from .record import Journal, RequestRecord
from .served import Served

__all__ = ["Endpoint", "Handler", "prepared"]

_log = logging.getLogger(__name__)

# Takes the body, and the record to write into; what it returns is sent. Leaving it early, by an error or a
# cancellation, ends all that it began.
Handler: TypeAlias = Callable[[bytes, RequestRecord], Awaitable[ASGIApp]]

_T = TypeVar("_T")
# Bytes of a body that are parsed and tokenized in about a millisecond, less than a change of threads may take.
_QUICK = 4096
_WITH_GRAMMARS = (b"response_format", b"tools")
_TRACE_HEADERS = ("traceparent", "tracestate")


class Endpoint:
    """An ASGI application around a handler: the handler is cancelled once the client has gone."""

    def __init__(
        self,
        name: str,
        handler: Handler,
        served: Served,
        keys: ApiKeys,
        metrics: Metrics,
        journals: Sequence[Journal] = (),
    ) -> None:
        self._name = name
        self._handler = handler
        self._served = served
        self._keys = keys
        self._metrics = metrics
        self._journals = journals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        trace = {name: value for name in _TRACE_HEADERS if (value := request.headers.get(name))}
        client = request.client.host if request.client else None
        record = RequestRecord(self._name, self._served.name, client, trace)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        work = asyncio.create_task(self._answer(request, record, scope, receive, send_named))
        try:
            await work
        except (asyncio.CancelledError, ClientDisconnect):  # the client has gone, or the server gives up
            record.status = 499
        finally:
            record.ended = time.monotonic()
            self._metrics.count_request(self._name, record.status or 500)
            for journal in self._journals:
                journal(record)

    async def _answer(
        self, request: Request, record: RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            self._keys.check(request.headers.get("authorization"))
            record.body = await self._read(request)
        except ApiError as error:
            record.status, record.error = error.status, error.code
            await error.response()(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None  # this is one
        watch = asyncio.create_task(_cancel_when_gone(receive, task))
        try:
            response = await self._respond(record)
            await response(scope, receive, send)
        finally:
            watch.cancel()

    async def _respond(self, record: RequestRecord) -> ASGIApp:
        try:
            response = await self._handler(record.body, record)
            record.status = 200
            return response
        except Exception as error:
            return self._failed(error, record)

    def _failed(self, error: Exception, record: RequestRecord) -> ASGIApp:
        """The answer to an error. It is made in a frame that the error does not hold, so that both go at once."""
        answer = api_error(error)
        if answer is None:
            _log.error("Request %s failed.", record.id, exc_info=error)
            answer = ApiError(500, "The server failed on this request; its log says why.", code="internal_error")
        record.status, record.error = answer.status, answer.code
        return answer.response()

    async def _read(self, request: Request) -> bytes:
        """The body, as far as limits allow."""
        most = self._served.limits.body_bytes
        too_large = ApiError(
            413, f"The body is larger than this server's limit of {most:,} bytes.", code="body_too_large"
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self._served.limits.client_s):
                async for piece in request.stream():
                    data += piece
                    if len(data) > most:
                        raise too_large
        except TimeoutError as error:
            seconds = self._served.limits.client_s
            raise ApiError(408, f"The body did not arrive within {seconds:g} s.", code="body_timeout") from error
        return bytes(data)


async def _cancel_when_gone(receive: Receive, task: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def prepared(prepare: Callable[[bytes], _T], data: bytes) -> _T:
    """What `prepare` makes of a body. Long texts and grammars take up to seconds: the event loop goes on meanwhile."""
    if len(data) <= _QUICK and not any(name in data for name in _WITH_GRAMMARS):
        return prepare(data)
    return await asyncio.to_thread(prepare, data)
