"""OpenTelemetry traces, where they are asked for; the extra `otel` brings the packages.

A request is one span with two parts: until its first token, and from there on. It joins the trace that its header
`traceparent` names. The environment's `OTEL_…` variables say where spans go and how many are kept.
"""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING, Any, Self

from paceline.errors import InstallationError, InvalidInputError, shown

from .record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Traces"]

_OPERATIONS = {"chat": "chat", "completions": "text_completion"}
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # the first one that is set counts


class Traces:
    """Makes spans of requests; a `Journal`."""

    def __init__(self, provider: TracerProvider) -> None:
        """Make spans with this provider, which belongs to the traces from now on."""
        self._provider = provider
        self._tracer = provider.get_tracer("paceline")

    @classmethod
    def from_environment(cls) -> Self:
        """Send spans over OTLP and HTTP, as the environment says; by default to http://localhost:4318.

        Nobody needs to listen there yet.

        Raises:
            InstallationError: the packages are missing.
            InvalidInputError: the environment names no URL, or another `OTEL_…` variable is refused.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InstallationError(
                f"Traces need OpenTelemetry, which cannot be imported ({error}): pip install 'paceline[otel]'."
            ) from error
        _check_endpoint()
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        try:
            provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "paceline"}))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        except ValueError as error:
            raise InvalidInputError(
                f"OpenTelemetry refuses one of its OTEL_… environment variables: {str(error).rstrip('.')}."
            ) from error
        return cls(provider)

    def __call__(self, record: RequestRecord) -> None:
        """Make the spans of one request."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(record.trace)
        ended_ns = record.started_ns + _ns(record.ended - record.started)
        span = self._tracer.start_span(
            f"{_OPERATIONS[record.endpoint]} {record.model}",
            context,
            SpanKind.SERVER,
            _attributes(record),
            start_time=record.started_ns,
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.error))
        if record.first_token_s is not None:
            inside = set_span_in_context(span)
            first_ns = record.started_ns + _ns(record.first_token_s)
            for name, begin, end in (
                ("queue and prefill", record.started_ns, first_ns),
                ("decode", first_ns, ended_ns),
            ):
                self._tracer.start_span(name, inside, start_time=begin).end(end)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _check_endpoint() -> None:
    """Refuse what is no address: OpenTelemetry itself would fail at every span, and only the log would tell."""
    name = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if name is None:
        return
    try:
        parts = urllib.parse.urlsplit(os.environ[name])
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidInputError(
            f"{name} must be the URL of a collector that takes OTLP over HTTP, such as http://localhost:4318, got "
            f"{shown(os.environ[name])}."
        )


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """OpenTelemetry's conventions for HTTP servers and generative models, and the server's own figures."""
    figures = record.figures()
    conventional = {
        "http.request.method": "POST",
        "url.path": _PATHS[record.endpoint],
        "http.response.status_code": record.status,
        "client.address": record.client,
        "error.type": record.error,
        "gen_ai.operation.name": _OPERATIONS[record.endpoint],
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": record.model,
        "gen_ai.response.finish_reasons": [reason for reason in record.finish_reasons if reason],
        "gen_ai.usage.input_tokens": figures["prompt_tokens"],
        "gen_ai.usage.output_tokens": figures["completion_tokens"],
    }
    own = {
        f"paceline.{name}": figures[name]
        for name in ("request_id", "stream", "texts", "cached_tokens", "accepted", "proposed", "rounds")
    }
    return {name: value for name, value in (conventional | own).items() if value is not None}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
