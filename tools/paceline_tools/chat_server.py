"""A server that speaks OpenAI's API, as a partner of `paceline chat`; Python's own HTTP client is enough."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import urllib.parse
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import click

from paceline.pieces import Piece

from .chat_partner import ContextFullError, Settings, figures_text, without_controls

__all__ = ["KEY_VARIABLE", "ServerPartner"]

KEY_VARIABLE = "PACELINE_API_KEY"
_CONNECT_S = 10.0
_READ_S = 600.0  # an answer may wait in the server's queue
_NOT_SENT = re.compile(r"[\x00-\x20\x7f-\xa0]")  # in no URL
_NOT_IN_KEYS = re.compile(r"[^\x20-\x7e\xa0-\xff]")  # headers are Latin-1
_FIGURES = ("completion_tokens", "proposed", "accepted", "rounds")


class ServerPartner:
    """A model behind a URL."""

    def __init__(self, url: str, model: str | None, settings: Settings, *, wants_pieces: bool) -> None:
        """Ask the server for its models.

        Raises:
            ClickException: it cannot be reached, refuses, or has no such model.
            UsageError: the URL is none, or the key cannot be sent.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            self._port = parts.port
            is_url = bool(parts.hostname) and not parts.query and not parts.fragment and not _NOT_SENT.search(url)
        except ValueError:
            is_url = False
        if not is_url or parts.hostname is None:
            raise click.UsageError(f"{url!r} is no URL of a server; http://127.0.0.1:8000 would be one.")
        self._key = _read_key()
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._url = url
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._settings = settings
        self._wants_pieces = wants_pieces
        self._usage: dict[str, int] = {}
        names = self._models()
        if model is not None and model not in names:
            raise click.ClickException(without_controls(f"{url} has no model {model!r}, only {', '.join(names)}."))
        self._model = model or names[0]
        self.name = without_controls(f"{self._model} at {url}")

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Generator[Piece, None, None]:
        """See `Partner`."""
        asked = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True} | ({"include_pieces": True} if self._wants_pieces else {}),
            "temperature": asked.temperature,
            "max_tokens": asked.max_new_tokens,
        }
        optional = {"top_p": asked.top_p, "seed": asked.seed, "num_draft_tokens": asked.draft_tokens}
        body |= {name: value for name, value in optional.items() if value is not None}
        self._usage = {}
        connection, response = self._send("POST", "/chat/completions", body)
        try:
            for event in self._events(response):
                try:
                    self._usage = _figures(event.get("usage")) or self._usage
                    pieces = _pieces(event.get("choices") or (), self._wants_pieces)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise self._no_answer() from error
                yield from pieces
        finally:
            response.close()  # the connection does not, where a server speaks HTTP/1.0
            connection.close()  # the server stops where the text has not ended

    def figures(self, seconds: float) -> str:
        """See `Partner`."""
        if not self._usage:
            return "[no figures: the answer was stopped, or the server tells none]"
        tokens, proposed, accepted, rounds = (self._usage[name] for name in _FIGURES)
        return figures_text(tokens, proposed, accepted, rounds, seconds)

    def _models(self) -> list[str]:
        connection, response = self._send("GET", "/models", None)
        try:
            names = [str(model["id"]) for model in json.loads(response.read())["data"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise click.ClickException(
                f"{self._url} does not speak OpenAI's API: its list of models is no such list."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            response.close()
            connection.close()
        if not names:
            raise click.ClickException(f"{self._url} serves no model.")
        return names

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask; the answer's head has come by then, and is a good one."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self._connect()
        try:
            connection.connect()
            connection.sock.settimeout(_READ_S)
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(response)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            connection.close()
            raise self._lost(error) from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _connect(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)

    def _lost(self, error: Exception) -> click.ClickException:
        if isinstance(error, ssl.SSLCertVerificationError):
            return click.ClickException(
                f"The certificate of {self._url} is not trusted ({error.verify_message}); SSL_CERT_FILE may name the "
                "one of who signed it."
            )
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = without_controls(str(reason).strip())  # it may quote what the server sent
        return click.ClickException(f"{self._url} cannot be talked to ({reason}); see that the server runs there.")

    def _no_answer(self) -> click.ClickException:
        return click.ClickException(f"{self._url} sent something else than a stream of JSON with an answer's parts.")

    def _refusal(self, response: http.client.HTTPResponse) -> click.ClickException:
        """What the server says instead of an answer."""
        status = response.status
        with response:
            data = response.read(1 << 16)
        code = None
        try:
            error = json.loads(data)["error"]
            message, code = str(error["message"]), error.get("code")
        except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
            if status in (429, 503):
                what = "the server is busy or limits how much one may ask"
            elif status >= 500:
                what = "the server failed; its log may say why"
            else:
                what = "is this the address of an OpenAI API?"
            message = f"{response.reason}; {what}"
        hint = f" Give the key in {KEY_VARIABLE}." if status == 401 else ""
        again = response.getheader("Retry-After")
        wait = f" Try again in {again} s." if status in (429, 503) and again else ""
        text = without_controls(f"{self._url} answers {status}: {message}{hint}{wait}")
        return ContextFullError(text) if code == "context_length_exceeded" else click.ClickException(text)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """The objects of a stream, up to its end mark."""
        try:
            for line in response:
                name, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
                if name != "data":
                    continue
                value = value.removeprefix(" ")
                if value == "[DONE]":
                    return
                event = json.loads(value)
                if not isinstance(event, dict):
                    raise ValueError
                if error := event.get("error"):
                    message = error.get("message") if isinstance(error, dict) else error
                    raise click.ClickException(without_controls(f"{self._url} broke off: {message}"))
                yield event
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        except (ValueError, RecursionError) as error:
            raise self._no_answer() from error
        raise click.ClickException(f"{self._url} ended the connection in the middle of the answer.")


def _read_key() -> str:
    """The user's key, empty where there is none. What it says of a key that cannot be sent does not quote it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if _NOT_IN_KEYS.search(key):
        raise click.UsageError(
            f"{KEY_VARIABLE} holds a control character, or one that a header of HTTP cannot carry; give the key alone."
        )
    return key


def _figures(usage: Any) -> dict[str, int]:
    """The counts of an event's `usage`, 0 where a server does not tell one; empty where there is no usage."""
    return {name: int(usage.get(name) or 0) for name in _FIGURES} if usage else {}


def _pieces(choices: Any, wants_pieces: bool) -> list[Piece]:
    """The text of an event's `choices`. Raises what comes of shapes that no such API sends."""
    found = []
    for choice in choices:
        text = (choice.get("delta") or {}).get("content") or ""
        pieces = choice.get("pieces") if wants_pieces else None
        if pieces is None:
            pieces = [{"text": text, "accepted": False}] if text else []
        found += [Piece(piece["text"], bool(piece["accepted"])) for piece in pieces]
    if not all(isinstance(piece.text, str) for piece in found):
        raise TypeError
    return found
