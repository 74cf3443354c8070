"""What is told of requests: the header with their id, JSON lines, and OpenTelemetry spans."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import openai
import pytest

from paceline import SpeculativeDecoder
from paceline.testing import TableModel
from paceline_server.keys import ApiKeys
from paceline_server.logs import JsonFormatter, RequestLog
from paceline_server.record import Journal

from .conftest import MODEL, Running, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SECRET = "my secret"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    formatter = JsonFormatter()
    return [
        json.loads(formatter.format(record)) for record in caplog.records if record.name.startswith("paceline_server")
    ]


def ask_everything(server: Running) -> list[str]:
    """A good chat, a stream, a refusal and a wrong key; the ids of the answers."""
    messages = [{"role": "user", "content": SECRET}]
    key = {"Authorization": "Bearer key"}
    answers = [
        server.post(CHAT, {"messages": messages, "max_tokens": 5, "min_tokens": 5, "n": 2}, headers=key),
        server.post(TEXT, {"prompt": SECRET, "max_tokens": 3, "min_tokens": 3, "stream": True}, headers=key),
        server.post(TEXT, {"prompt": SECRET, "suffix": SECRET}, headers=key),
        server.post(TEXT, {"prompt": SECRET}),
    ]
    server.wait_until_idle()
    return [answer.headers["x-request-id"] for answer in answers]


@pytest.mark.parametrize("with_text", [False, True])
def test_a_line_for_each_request(
    decoder: SpeculativeDecoder, caplog: pytest.LogCaptureFixture, with_text: bool
) -> None:
    caplog.set_level(logging.INFO, logger="paceline_server")
    with running(decoder, ApiKeys(["key"]), journals=[RequestLog(with_text=with_text)]) as server:
        ids = ask_everything(server)
        # A record is written behind the answer: the client may be faster.
        server.wait_for(lambda: len(lines_of(caplog)) == 4)
    lines = {line["request_id"]: line for line in lines_of(caplog)}
    assert set(lines) == set(ids)
    chat, text, refused, locked = (lines[one] for one in ids)
    assert (chat["status"], chat["endpoint"], chat["model"], chat["level"]) == (200, "chat", MODEL, "info")
    assert (chat["texts"], chat["completion_tokens"], chat["stream"]) == (2, 10, False)
    assert (text["status"], text["endpoint"], text["completion_tokens"], text["stream"]) == (
        200,
        "completions",
        3,
        True,
    )
    assert text["prompt_tokens"] == len(SECRET)
    assert text["finish_reasons"] in (["length"], ["stop"])
    assert 0 < text["first_token_s"] <= text["duration_s"]
    assert (refused["status"], refused["error"]) == (400, "unsupported_value")
    assert (locked["status"], locked["error"]) == (401, "invalid_api_key")
    whole = json.dumps(list(lines.values()))
    assert (SECRET in whole) == with_text
    if with_text:
        assert SECRET in chat["request"]
        assert len(chat["answers"]) == 2


def test_a_fault_is_one_line_with_its_request(decoder: SpeculativeDecoder, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TableModel):
        def forward(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("it broke")

    size = decoder.vocab_size
    broken = SpeculativeDecoder(Broken(np.zeros((size, size))), None, decoder.tokenizer, size, decoder.eos_token_ids)
    with running(broken) as server:
        answer = server.post(TEXT, {"prompt": "x"})
        assert answer.status_code == 500
        (line,) = lines_of(caplog)
        assert answer.headers["x-request-id"] in line["message"]
        assert "it broke" in line["exception"]


def test_openais_client_knows_the_id(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert (answer._request_id or "").startswith("req_")


def test_spans(decoder: SpeculativeDecoder) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'paceline[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from paceline_server.traces import Traces

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traces = Traces(provider)
    journals: list[Journal] = [traces]
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running(decoder, journals=journals) as server:
        headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
        server.post(TEXT, {"prompt": "xy", "max_tokens": 4, "min_tokens": 4}, headers=headers)
        server.wait_for(lambda: len(spans.get_finished_spans()) == 3)
    traces.close()
    prefill, decode, whole = spans.get_finished_spans()
    assert [span.name for span in (prefill, decode, whole)] == [
        "queue and prefill", "decode", f"text_completion {MODEL}",
    ]  # fmt: skip
    assert f"{whole.context.trace_id:032x}" == trace_id
    assert f"{whole.parent.span_id:016x}" == parent_id
    for part in (prefill, decode):
        assert part.parent.span_id == whole.context.span_id
    assert whole.start_time == prefill.start_time <= prefill.end_time == decode.start_time <= decode.end_time
    assert decode.end_time == whole.end_time
    attributes = dict(whole.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["http.response.status_code"] == 200
    assert list(attributes["gen_ai.response.finish_reasons"]) in (["length"], ["stop"])
