"""`paceline chat`: with a server and with a bundle, as people and as pipes use it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline import SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME, Bundle, FileEntry, file_sha256
from paceline_server.keys import ApiKeys
from paceline_tools.cli import cli

from .conftest import MODEL, TEMPLATE, Running, running
from .test_chat import library
from .writer import Writer, writing

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "export", "tools"))
SHORT = ("--max-new-tokens", 20)


def talk(lines: str, *args: object, **options: Any) -> Result:
    return CliRunner().invoke(cli, ["chat", *map(str, args)], prog_name="paceline", input=lines, **options)


@pytest.fixture(scope="module")
def chat_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_bundle, folder)
    template = folder / "chat_template.jinja"
    template.write_text(TEMPLATE)
    manifest = Bundle.open(folder).manifest
    files = {**manifest.files, template.name: FileEntry(template.stat().st_size, file_sha256(template))}
    (folder / MANIFEST_NAME).write_text(dataclasses.replace(manifest, files=files).to_json())
    return folder


def answers(decoder: SpeculativeDecoder, questions: list[str], system: str | None = None) -> list[str]:
    """What a chat with seed 4 brings, by the library alone."""
    from paceline import SamplingParams

    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        sampling = SamplingParams(temperature=0.7, seed=4)
        found.append(library(decoder, sampling, messages=list(messages), max_new_tokens=20).text)
        messages.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.mark.parametrize("kind", ["server", "bundle"])
def test_a_chat_goes_on_from_what_was_said(
    server: Running, decoder: SpeculativeDecoder, chat_bundle: Path, kind: str
) -> None:
    where = server.url if kind == "server" else chat_bundle
    result = talk("Hello\nAnd now?\n", where, "--seed", 4, "--system", "Be kind.", *SHORT)
    wanted = answers(decoder, ["Hello", "And now?"], "Be kind.")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes.decode() == "".join(f"{text}\n" for text in wanted)


def test_commands(server: Running, decoder: SpeculativeDecoder) -> None:
    lines = "Hello\n/reset\nHello\n/system Be kind.\nHello\n\n/what\n/help\n/exit\nnever asked\n"
    result = talk(lines, f"{server.url}/v1/", "--model", MODEL, "--seed", 4, *SHORT)
    (plain,), (kind,) = answers(decoder, ["Hello"]), answers(decoder, ["Hello"], "Be kind.")
    assert result.exit_code == 0
    assert result.stdout_bytes.decode() == f"{plain}\n{plain}\n{kind}\n"
    assert "no command /what" in result.stderr
    assert result.stderr.count("/reset  ") == 2


def test_lines_that_go_on_and_messages_that_begin_with_a_slash(server: Running, decoder: SpeculativeDecoder) -> None:
    result = talk("One\\\ntwo\n", server.url, "--seed", 4, *SHORT)
    assert result.stdout_bytes.decode() == f"{answers(decoder, ['One' + chr(10) + 'two'])[0]}\n"
    result = talk("//etc\n", server.url, "--seed", 4, *SHORT)
    assert result.stdout_bytes.decode() == f"{answers(decoder, ['/etc'])[0]}\n"


@pytest.mark.parametrize("kind", ["server", "bundle"])
def test_accepted_tokens_are_shown(server: Running, decoder: SpeculativeDecoder, chat_bundle: Path, kind: str) -> None:
    from paceline import SamplingParams

    where = server.url if kind == "server" else chat_bundle
    result = talk("Hello\n", where, "--seed", 4, "--draft-tokens", 3, "--show-accepted", *SHORT)
    wanted = library(
        decoder,
        SamplingParams(temperature=0.7, seed=4),
        messages=[{"role": "user", "content": "Hello"}],
        max_new_tokens=20,
        num_draft_tokens=3,
    )
    text = result.stdout_bytes.decode()
    assert re.sub("[⟦⟧]", "", text) == f"{wanted.text}\n"
    assert wanted.stats.accepted > 0
    assert "⟦" in text
    for figure in (wanted.stats.new_tokens, wanted.stats.proposed, wanted.stats.accepted):
        assert f"{figure} " in result.stderr


def test_all_that_a_right_draft_proposes_is_shown(decoder: SpeculativeDecoder) -> None:
    with running(writing(decoder, TEMPLATE, "abcdefghijkl", draft="abcdefghijkl")) as server:
        result = talk("Hello\n", server.url, "--draft-tokens", 3, "--show-accepted")
    # The first token comes from the prefill; then three drafted ones and one of the target's in each round.
    assert result.stdout_bytes.decode() == "a⟦bcd⟧e⟦fgh⟧i⟦jkl⟧\n"


class _Answers(http.server.BaseHTTPRequestHandler):
    """Says it has a model, and answers with the events that the server was given."""

    server: _Odd

    def do_GET(self) -> None:
        self._send(self.server.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send("".join(f"data: {event}\n\n" for event in (*self.server.events, "[DONE]")))

    def log_message(self, *args: object) -> None: ...

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


class _Odd(http.server.ThreadingHTTPServer):
    models = '{"data": [{"id": "m"}]}'
    events: tuple[str, ...] = ()


@contextlib.contextmanager
def odd(*events: str, models: str = _Odd.models) -> Iterator[str]:
    with _Odd(("127.0.0.1", 0), _Answers) as server:
        server.events, server.models = events, models
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


GOOD = '{"choices": [{"delta": {"content": "hi"}}]}'


@pytest.mark.parametrize(
    "event",
    [
        '{"choices": 5}',
        '{"choices": [5]}',
        '{"choices": [{"delta": 5}]}',
        '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [{"delta": {"content": "x"}, "pieces": [5]}]}',
        '{"choices": [{"pieces": [{"text": 5, "accepted": true}]}]}',
        '{"choices": [], "usage": 5}',
        '{"choices": [], "usage": {"completion_tokens": "many"}}',
        "[" * 100_000,
        "[]",
    ],
    ids=lambda event: event[:50],
)
def test_an_answer_of_another_shape_is_said_to_be_one(event: str) -> None:
    with odd(GOOD, event) as url:
        result = talk("Hello\n", url, "--show-accepted")
    assert (result.exit_code, result.stdout) == (1, "hi")
    assert "something else than a stream of JSON" in result.stderr
    assert "Traceback" not in result.output


def test_models_of_another_shape_and_answers_without_figures() -> None:
    with odd(models='{"data": ' + "[" * 100_000) as url:
        result = talk("Hello\n", url)
        assert (result.exit_code, "its list of models is no such list" in result.stderr) == (1, True)
    with odd(GOOD) as url:
        result = talk("Hello\n", url, "--show-accepted")
        assert (result.exit_code, result.stdout) == (0, "hi\n")
        assert "the server tells none" in result.stderr


@contextlib.contextmanager
def says(answer_bytes: bytes) -> Iterator[str]:
    """A server that says this to the one who comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer_bytes)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def test_servers_that_do_not_serve(server: Running, decoder: SpeculativeDecoder, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    with running(decoder, ApiKeys(["sesame"])) as locked, says(b"220 mail.example ESMTP\r\n") as mail:
        for args, words in (
            ((f"http://127.0.0.1:{free}",), "refused"),
            ((locked.url,), "PACELINE_API_KEY"),
            ((server.url, "--model", "gpt-9"), "has no model 'gpt-9', only tiny"),
            ((f"{server.url}/elsewhere",), "answers 404"),
            ((mail,), "cannot be talked to"),
        ):
            result = talk("Hello\n", *args)
            assert (result.exit_code, result.stdout) == (1, ""), result.stderr
            assert words in result.stderr
            assert "Traceback" not in result.stderr
        monkeypatch.setenv("PACELINE_API_KEY", "sesame")
        assert talk("Hello\n", locked.url, *SHORT).exit_code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["http://"], "no URL"),
        (["http://x:port"], "no URL"),
        (["http://[::1"], "no URL"),
        (["http://ex ample"], "no URL"),
        (["http://127.0.0.1:1/a\x1b[2J"], "no URL"),
        (["ftp://127.0.0.1"], "spoken with over http:// or https://, not ftp://"),
        (["HTTP://127.0.0.1:1", "--threads", "2"], "--threads is for bundles"),
        (["http://127.0.0.1:1", "--threads", "2"], "--threads is for bundles"),
        (["http://127.0.0.1:1", "--temperature", "3"], "--temperature"),
        (["BUNDLE", "--model", "x"], "--model is for servers"),
        (["BUNDLE", "--top-p", "0"], "--top-p"),
    ],
)
def test_arguments_that_cannot_be_honoured(chat_bundle: Path, args: list[str], words: str) -> None:
    result = talk("Hello\n", *(str(chat_bundle) if arg == "BUNDLE" else arg for arg in args))
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bundle_that_was_not_made_for_chats(tiny_bundle: Path) -> None:
    result = talk("Hello\n", tiny_bundle)
    assert result.exit_code == 1
    assert "no chat template" in result.stderr


@pytest.mark.parametrize("key", ["sesa\nme", "sesa\x00me", "sesame€", "sesa\x9bme"])
def test_a_key_that_cannot_be_sent_is_not_printed(server: Running, monkeypatch: Any, key: str) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "PACELINE_API_KEY": key})
    result = talk("Hello\n", server.url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "PACELINE_API_KEY" in result.stderr
    assert "sesa" not in result.output


def test_space_around_a_key_and_capitals_of_http_do_no_harm(decoder: SpeculativeDecoder, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", " sesame\r\n")
    with running(decoder, ApiKeys(["sesame"])) as locked:
        assert talk("Hello\n", locked.url.replace("http", "HTTP"), *SHORT).exit_code == 0


def test_stdin_that_is_closed(chat_bundle: Path) -> None:
    command = [sys.executable, "-m", "paceline_tools", "chat", str(chat_bundle)]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command],
        env={**os.environ, "PYTHONPATH": PATHS}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "stdin is closed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, "the server is busy"),
        (503, "the server is busy"),
        (500, "the server failed"),
        (403, "is this the address"),
    ],
)
def test_what_another_server_answers_is_told_by_its_status(status: int, words: str) -> None:
    with says(f"HTTP/1.1 {status} So\x1b[2J\r\nContent-Length: 0\r\n\r\n".encode()) as url:
        result = talk("Hello\n", url)
    assert result.exit_code == 1
    assert f"answers {status}: So\N{REPLACEMENT CHARACTER}[2J; {words}" in result.stderr
    assert ("OpenAI" in result.stderr) == (status == 403)


def test_control_characters_of_what_is_no_server_are_not_printed() -> None:
    with says(b"220 mail \x1b]0;title\x07\r\n") as url:
        result = talk("Hello\n", url)
    assert result.exit_code == 1
    assert "cannot be talked to (220 mail \N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER})" in result.stderr


def type_in(where: object, typed: list[bytes], *args: object) -> tuple[bytes, bytes]:
    """What a chat in a terminal prints, on stdout and stderr, where one types these lines."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, b"".join(line + b"\n" for line in typed) + b"\x04")
        done = subprocess.run(
            [sys.executable, "-m", "paceline_tools", "chat", *map(str, (where, *args))],
            stdin=theirs, capture_output=True, env={**os.environ, "PYTHONPATH": PATHS, "PYTHONUTF8": "1"}, timeout=120,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_a_line_that_is_not_utf8_is_refused_and_the_next_one_answered(
    server: Running, decoder: SpeculativeDecoder
) -> None:
    out, err = type_in(server.url, [b"a\x01\xff\xfe", b"\xed\xa0\x80", b"Hello"], "--seed", 4, *SHORT)
    assert err.count(b"not UTF-8, and was not sent") == 2
    assert err.count(b"> ") == 4  # the prompts, for stdout is no terminal
    assert out.decode() == f"{answers(decoder, ['Hello'])[0]}\n"


@pytest.mark.parametrize("kind", ["server", "bundle"])
def test_of_a_full_context_one_is_told_of_reset(server: Running, chat_bundle: Path, kind: str) -> None:
    where = server.url if kind == "server" else chat_bundle
    _, err = type_in(where, [b"x y z " * 500, b"/reset", b"Hello"], *SHORT)
    assert err.count(b"Error") == 1
    assert b"/reset forgets the conversation" in err


def test_what_the_server_refuses_ends_a_pipe(server: Running) -> None:
    result = talk("Hello\nAgain\n", server.url, "--max-new-tokens", 5000)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "answers 400" in result.stderr
    assert "at most 100" in result.stderr


class Halting(Writer):
    """Writes a hundred letters, and waits in the middle until it may go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = threading.Event()
        self.num_forwards = 0

    def forward(self, *args: Any, **options: Any) -> Any:
        self.num_forwards += 1
        if self.num_forwards > 20:
            assert self.gate.wait(60)
        return super().forward(*args, **options)


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(decoder: SpeculativeDecoder) -> None:
    assert decoder.tokenizer is not None
    model = Halting(decoder.tokenizer, decoder.vocab_size, "x" * 100)
    halting = SpeculativeDecoder(model, None, decoder.tokenizer, decoder.vocab_size, decoder.eos_token_ids)
    ours, theirs = pty.openpty()
    with running(halting) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline_tools", "chat", server.url],
            stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": PATHS},
        )  # fmt: skip
        assert process.stdout is not None
        try:
            os.write(ours, b"Hello\n")
            said = b""
            while not said.endswith(b"x"):
                said += os.read(process.stdout.fileno(), 100)
            process.send_signal(signal.SIGINT)
            os.write(ours, b"/help\n\x04")
            out, err = process.communicate(timeout=60)
        finally:
            model.gate.set()
            process.kill()
            os.close(ours)
            os.close(theirs)
        assert process.returncode == 0, err
        assert b"(stopped)" in err
        assert b"/reset" in err
        assert b"Traceback" not in err
        assert (said + out).count(b"x") < 100
        server.wait_until_idle()
        assert server.served.engine.stats.ended["cancelled"] == 1
