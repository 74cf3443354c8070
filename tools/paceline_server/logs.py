"""Logs as JSON lines: what modules log, and a line for each request."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any

from .record import RequestRecord

__all__ = ["JsonFormatter", "RequestLog"]

_log = logging.getLogger("paceline_server.requests")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time`, `level`, `logger`, `message`, an exception's text, and a record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class RequestLog:
    """Logs each request; a `Journal`."""

    def __init__(self, *, with_text: bool = False) -> None:
        """Log figures alone, or, `with_text`, what was asked and answered, too."""
        self._with_text = with_text

    def __call__(self, record: RequestRecord) -> None:
        """Log one request."""
        fields = record.figures()
        if self._with_text:
            fields["request"] = record.body.decode("utf-8", "replace")
            fields["answers"] = [work.text for work in record.texts.works] if record.texts else []
        _log.info("%s %d", record.endpoint, record.status, extra={"fields": fields})
