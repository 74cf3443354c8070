"""What is known of one request once it is over: for logs and traces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .texts import Texts

__all__ = ["Journal", "RequestRecord"]


@dataclass(slots=True)
class RequestRecord:
    """One request to an endpoint with a body. Prompts and texts are reached through `body` and `texts` alone.

    Attributes:
        endpoint: "chat" or "completions".
        model: the name of what is served.
        client: the client's address, where it is known.
        trace: headers that say which trace this belongs to.
        id: also in the answer's header `x-request-id`.
        started_ns: Unix time in nanoseconds.
        started: of `time.monotonic()`.
        ended: of `time.monotonic()`.
        status: of the answer; 499 where the client went away.
        error: the code of an error, as the client got it.
        stream: whether the answer came in pieces.
        body: the request's body.
        texts: what was written; None where the request did not come so far.
    """

    endpoint: str
    model: str
    client: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(12)}")
    started_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0
    error: str | None = None
    stream: bool = False
    body: bytes = b""
    texts: Texts | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request's arrival to the first token of any of its texts."""
        first = self.texts.first_token if self.texts else None
        return None if first is None else first - self.started

    @property
    def finish_reasons(self) -> list[str | None]:
        """Why each text ended; None where it did not."""
        return [work.finish_reason for work in self.texts.works] if self.texts else []

    def figures(self) -> dict[str, Any]:
        """All figures by their names, without any text of prompts and answers."""
        stats = [work.stats for work in self.texts.works] if self.texts else []
        num_choices = self.texts.num_choices if self.texts else 1
        summed = {
            "completion_tokens": sum(one.new_tokens for one in stats),
            **{name: sum(getattr(one, name) for one in stats) for name in ("accepted", "proposed", "rounds")},
        }
        once = stats[::num_choices]  # the choices of one prompt share it
        return {
            "request_id": self.id,
            "endpoint": self.endpoint,
            "model": self.model,
            "client": self.client,
            "status": self.status,
            "error": self.error,
            "stream": self.stream,
            "texts": len(stats),
            "prompt_tokens": sum(one.prompt_tokens for one in once),
            "cached_tokens": sum(one.cached_tokens for one in once),
            **summed,
            "finish_reasons": self.finish_reasons,
            "first_token_s": _rounded(self.first_token_s),
            "duration_s": _rounded(self.ended - self.started),
        }


# Told of every request once it is over.
Journal: TypeAlias = Callable[[RequestRecord], None]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
