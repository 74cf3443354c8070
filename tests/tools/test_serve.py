"""`paceline serve` as a process: it tells where, drains, loads anew, and refuses what it cannot serve."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from .conftest import Invoke, environment, run_paceline


@contextmanager
def serving(*args: object, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of `paceline serve`, and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline_tools", "serve", *map(str, args), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | variables,
    )
    try:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if found := re.search(r"is served at (http\S*)/v1", line):
                url = found[1]
                break
        assert url is not None
        yield process, url
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def test_it_drains_on_sigterm(tiny_bundle: Path) -> None:
    """A text that has begun is sent to its end, then the process ends with 0."""
    with serving(tiny_bundle, "--model-name", "m", "--max-new-tokens", 200) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        body = {"model": "m", "prompt": "x", "max_tokens": 200, "stream": True, "min_tokens": 200, "n": 8, "seed": 1}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            chunks = [first, *lines]
        assert chunks[-2] == "data: [DONE]"
        reasons = [
            json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] for line in chunks[:-2] if line
        ]
        assert sum(reason == "length" for reason in reasons) == 8
        assert process.wait(20) == 0


def test_an_idle_server_ends_at_once(tiny_bundle: Path) -> None:
    with serving(tiny_bundle) as (process, url):
        assert httpx2.get(f"{url}/ready").status_code == 200
        assert [model["id"] for model in httpx2.get(f"{url}/v1/models").json()["data"]] == [tiny_bundle.name]
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert time.monotonic() - started < 5


def test_it_loads_anew_without_dropping_requests(damaged: Path) -> None:
    with serving(damaged, "--model-name", "m", "--api-keys", _keys(damaged.parent)) as (process, url):
        headers = {"Authorization": "Bearer key"}
        body = {"model": "m", "prompt": "x", "max_tokens": 20, "seed": 2}

        def ask() -> str:
            answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)
            assert answer.status_code == 200
            return str(answer.json()["choices"][0]["text"])

        assert process.stderr is not None
        before = ask()
        for path in damaged.glob("*/*.data"):  # the same bytes in another file, so that it can be told who is mapped
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        assert _mapped(process, damaged, " (deleted)")
        process.send_signal(signal.SIGHUP)
        texts: list[str] = []
        asking = threading.Thread(target=lambda: texts.extend(ask() for _ in range(10)))
        asking.start()
        assert "loaded anew" in process.stderr.readline()
        asking.join()
        assert [*texts, ask()] == [before] * 11
        until = time.monotonic() + 30
        while _mapped(process, damaged, " (deleted)"):
            assert time.monotonic() < until, "the old models are still in memory"
            time.sleep(0.05)
        assert _mapped(process, damaged, ".data")
        _flip_last_byte(damaged)
        process.send_signal(signal.SIGHUP)
        said = process.stderr.readline()
        assert "not loaded anew" in said
        assert "SHA-256" in said
        assert ask() == before
        (damaged / "tokenizer.json").unlink()
        process.send_signal(signal.SIGHUP)
        assert "not loaded anew" in process.stderr.readline()
        assert ask() == before


def test_every_limit_of_a_request_is_an_option(tiny_bundle: Path) -> None:
    options = {
        "--max-body": 0.001, "--max-prompt-tokens": 20, "--max-new-tokens": 7, "--max-choices": 2,
        "--kv-memory": 1e-9, "--max-running": 1, "--max-waiting": 0,
    }  # fmt: skip

    def error(url: str, **body: object) -> tuple[int, str]:
        answer = httpx2.post(f"{url}/v1/completions", json={"model": "m", "prompt": "x", **body}, timeout=30)
        found = answer.json()["error"]
        return answer.status_code, f"{found['code']}: {found['message']}"

    with serving(tiny_bundle, "--model-name", "m", *(part for pair in options.items() for part in pair)) as (_, url):
        for body, status, words in (
            ({"prompt": "x" * 1100}, 413, "body_too_large: The body is larger than this server's limit of 1,048 bytes"),
            ({"prompt": [5] * 21}, 400, "context_length_exceeded: The prompt has 21 tokens, but this server reads at"),
            ({"max_tokens": 8}, 400, "invalid_value: max_tokens is 8, but this server writes at most 7 tokens"),
            ({"n": 3}, 400, "invalid_value: 1 prompts with n = 3 ask for 3 texts, but this server writes at most 2"),
            ({"n": 2}, 400, "invalid_value: n: 2 texts were asked for at once, but only 1 may run and wait"),
            ({}, 400, "kv_memory_exceeded: "),
        ):
            found = error(url, **body)
            assert found[0] == status
            assert found[1].startswith(words)


def test_every_limit_of_time_is_an_option(tiny_bundle: Path) -> None:
    options = ("--model-name", "m", "--timeout", 0.001, "--client-timeout", 0.5)
    with serving(tiny_bundle, *options) as (_, url):
        body = {"model": "m", "prompt": "x", "max_tokens": 200, "min_tokens": 200}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=30)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_passed")
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET ")
            assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


# A server over a model that writes for minutes.
_ENDLESS = """
import pathlib, sys, time
from paceline import AsyncEngine, SpeculativeDecoder, load
from paceline.testing import TableModel
from paceline_server import Served
from paceline_server.keys import ApiKeys
from paceline_server.server import Address, serve

class Slow(TableModel):
    def forward(self, *args, **kwargs):
        time.sleep(0.05)
        return super().forward(*args, **kwargs)

pair = load(sys.argv[1])
model = Slow.random(pair.vocab_size, seed=1, order=1, max_length=4096)
decoder = SpeculativeDecoder(model, None, pair.tokenizer, pair.vocab_size, ())
served = Served(decoder, AsyncEngine(), "m")
address = Address(port=0, drain_s=int(sys.argv[2]))
serve(served, address, ApiKeys(), load=lambda: decoder, on_start=lambda url: print(url, flush=True))
"""


def test_texts_that_outlast_the_drain_are_ended_and_their_clients_told(tiny_bundle: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, tiny_bundle, "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        body = {"model": "m", "prompt": "x", "max_tokens": 4000}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=30)
            with httpx2.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                time.sleep(0.5)  # the other one has come by then
                process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-1]  # the stream has a proper end, or this raises
            refused = waiting.result()
        assert process.wait(60) == 0  # 4,000 tokens would have taken 200 s at least
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        said = process.stderr.read()
        assert "2 texts are not complete after 1 s and are ended." in said
        assert "Cancel" not in said
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()


def test_a_connection_too_many_is_503(tiny_bundle: Path) -> None:
    with serving(tiny_bundle, "--max-connections", 2) as (_, url):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))):
            until = time.monotonic() + 30
            while httpx2.get(f"{url}/health").status_code != 503:  # the server may not have seen both of them yet
                assert time.monotonic() < until
        while httpx2.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < until


def test_logs_as_json_lines(tiny_bundle: Path) -> None:
    options = ("--model-name", "m", "--log-format", "json", "--log-prompts")
    with serving(tiny_bundle, *options) as (process, url):
        assert process.stderr is not None
        for prompt in ("a secret", 5):
            httpx2.post(f"{url}/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 2}, timeout=30)
        good, bad = (json.loads(process.stderr.readline()) for _ in range(2))
        assert (good["status"], good["completion_tokens"], good["logger"]) == (200, 2, "paceline_server.requests")
        assert "a secret" in good["request"]
        assert (bad["status"], bad["error"]) == (400, "invalid_value")
        process.send_signal(signal.SIGHUP)
        assert "loaded anew" in json.loads(process.stderr.readline())["message"]


def _mapped(process: subprocess.Popen[str], bundle: Path, end: str) -> list[str]:
    """What the process has mapped of a bundle's files, where the line ends like that."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line for line in lines if str(bundle) in line and line.endswith(end)]


def _flip_last_byte(bundle: Path) -> None:
    """Damage the target's largest file; its size stays."""
    path = max((bundle / "target").iterdir(), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    path.unlink()  # whoever has mapped the old file keeps it
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))


def _keys(folder: Path) -> Path:
    (folder / "keys").write_text("key\n")
    return folder / "keys"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--port", "70000"], 2, "70000"),
        (["--kv-memory", "0"], 2, "kv-memory"),
        (["--host", "203.0.113.7"], 1, "203.0.113.7 cannot be taken"),
        (["--host", "300.1.1.1"], 2, "--host '300.1.1.1' is no address"),
        (["--tls-cert", __file__], 2, "certificate and its key"),
        (["--tls-cert", __file__, "--tls-key", __file__], 2, "must be PEM"),
        (["--max-running", "0"], 2, "max-running"),
        (["--log-prompts"], 2, "--log-format json"),
        (["--model-name", ""], 2, "--model-name"),
        (["--model-name", "a\tb"], 2, "'a\\tb'"),
        (["--model-name", "my model"], 2, "'my model'"),
        (["--model-name", "{name}"], 2, "--model-name"),
        (["--model-name", "../a"], 2, "begin with a letter"),
        (["--model-name", "a" * 201], 2, "up to 200"),
    ],
)
def test_what_it_refuses(invoke: Invoke, tiny_bundle: Path, args: list[str], code: int, words: str) -> None:
    done = invoke("serve", tiny_bundle, "--port", 0, *args)
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:99999"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://localhost:4317"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-5"),
    ],
)
def test_traces_to_no_address_are_refused_at_the_start(
    invoke: Invoke, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'paceline[otel]'")
    monkeypatch.setenv(variable, value)
    done = invoke("serve", tiny_bundle, "--port", 0, "--traces")
    assert (done.exit_code, done.stdout) == (2, "")
    if variable.endswith("ENDPOINT"):
        assert f"{variable} must be the URL" in done.stderr
        assert value in done.stderr
    else:
        assert "OTEL_" in done.stderr


def test_a_port_that_is_taken_is_named(tiny_bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_paceline("serve", tiny_bundle, "--port", port, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"Port {port} of 127.0.0.1 cannot be taken" in done.stderr
    assert "--port" in done.stderr


def test_a_bundle_that_is_damaged_is_never_served(damaged: Path) -> None:
    (damaged / "target" / "model.onnx").write_bytes(b"no graph")
    done = run_paceline("serve", damaged, "--port", 0, timeout=60)
    assert done.returncode == 1
    assert "served at" not in done.stderr


def test_a_bundle_with_other_bytes_of_the_same_size_is_never_served(damaged: Path) -> None:
    _flip_last_byte(damaged)
    done = run_paceline("serve", damaged, "--port", 0, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "SHA-256" in done.stderr
    assert "served at" not in done.stderr


def test_a_model_has_the_name_of_the_folder_as_given(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "cur").symlink_to(tiny_bundle)
    with serving(tmp_path / "cur") as (_, url):
        assert [model["id"] for model in httpx2.get(f"{url}/v1/models").json()["data"]] == ["cur"]


def test_an_open_door_is_warned_of(tiny_bundle: Path) -> None:
    def lines_until_it_serves(**variables: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline_tools", "serve", tiny_bundle, "--port", "0", "--host", "0.0.0.0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | variables,
        )
        assert process.stderr is not None
        lines = ""
        while "is served at" not in lines and (line := process.stderr.readline()):
            lines += line
        process.terminate()
        process.stderr.close()
        assert process.wait(20) == 0
        return lines

    assert "--api-keys" in lines_until_it_serves()
    assert "--api-keys" not in lines_until_it_serves(PACELINE_API_KEYS="key")
