"""The ASGI application: routes, and what needs no body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .api_error import ApiError
from .chat import Chat
from .completions import Completions
from .endpoint import Endpoint, Handler
from .keys import ApiKeys
from .metrics import Metrics
from .models import check_model, model_shape
from .openapi import description
from .record import Journal
from .served import Served

__all__ = ["create_app"]


def create_app(served: Served, keys: ApiKeys | None = None, journals: Sequence[Journal] = ()) -> Starlette:
    """An application over `served`; its owner closes the engine.

    With keys, all below `/v1` asks for one. `/health`, `/ready`, `/metrics` and `/openapi.json` never do. Journals are
    told of every completion and chat.
    """
    keys = keys or ApiKeys()
    metrics = Metrics(served)

    async def models(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [model_shape(served)]})

    async def model(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        check_model(served, request.path_params["name"])
        return JSONResponse(model_shape(served))

    async def health(request: Request) -> Response:
        alive = served.engine.alive
        return JSONResponse({"status": "ok" if alive else "the worker thread has ended"}, 200 if alive else 503)

    async def ready(request: Request) -> Response:
        is_ready = served.engine.alive and not served.draining
        return JSONResponse({"status": "ready" if is_ready else "draining"}, 200 if is_ready else 503)

    async def metrics_text(request: Request) -> Response:
        return PlainTextResponse(metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(request: Request) -> Response:
        return JSONResponse(description(served, needs_key=bool(keys)))

    def post(path: str, name: str, handler: Handler) -> Route:
        return Route(path, Endpoint(name, handler, served, keys, metrics, journals), methods=["POST"])

    def get(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, answer, methods=["GET"])

    app = Starlette(
        routes=[
            get("/v1/models", models),
            get("/v1/models/{name:path}", model),
            post("/v1/completions", "completions", Completions(served, metrics)),
            post("/v1/chat/completions", "chat", Chat(served, metrics)),
            get("/health", health),
            get("/ready", ready),
            get("/metrics", metrics_text),
            get("/openapi.json", openapi),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _answer},
    )
    app.router.redirect_slashes = False  # a path with a slash too many is none of these
    return app


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # registered for no other
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path or method."""
    assert isinstance(error, HTTPException)  # registered for no other
    message = {404: f"There is no {request.url.path:.200} here.", 405: f"{request.method} is not allowed here."}
    return ApiError(
        error.status_code, message.get(error.status_code, error.detail), headers=dict(error.headers or {})
    ).response()
