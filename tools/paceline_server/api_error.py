"""Errors in the shape that clients of OpenAI's API expect."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from paceline.errors import (
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    InstallationError,
    InvalidInputError,
    MemoryBudgetError,
    OverloadError,
    PacelineError,
)

__all__ = ["ApiError", "api_error"]

# The status and the code of what the library raises; the first row that fits counts.
_STATUS: tuple[tuple[type[PacelineError], int, str], ...] = (
    (ContextLengthError, 400, "context_length_exceeded"),
    (MemoryBudgetError, 400, "kv_memory_exceeded"),
    (InvalidInputError, 400, "invalid_value"),
    (InstallationError, 400, "not_installed"),
    (OverloadError, 429, "queue_full"),
    (EngineClosedError, 503, "shutting_down"),
    (DeadlineError, 408, "deadline_passed"),
)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.as_dict(), self.status, self.headers)


def api_error(error: Exception) -> ApiError | None:
    """The answer to an error that the library raised on purpose; None for any other."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            headers = None
            if isinstance(error, OverloadError):
                headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            elif isinstance(error, EngineClosedError):
                headers = {"Retry-After": "5"}
            return ApiError(status, str(error), code=code, headers=headers)
    return None
