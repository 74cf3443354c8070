"""`paceline chat`: a conversation in the terminal. Answers go to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import paceline
from paceline.errors import ContextLengthError, PacelineError
from paceline.pieces import Piece

from .arguments import (
    DRAFT_TOKENS,
    FOLDER,
    NumberRange,
    check_text,
    engines_option,
    folder_name,
    profile_option,
    provider_option,
    threads_option,
)
from .chat_partner import BundlePartner, ContextFullError, Partner, Settings, without_controls
from .chat_server import ServerPartner

__all__ = ["command"]

_HELP = """\
/reset        forget the conversation
/system TEXT  give the system's message, and begin anew; without TEXT, none
/help         this list
/exit         end; so does Ctrl-D

Ctrl-C stops an answer. A backslash at a line's end goes on in the next line. //… sends a message that begins with /."""
_FOR_BUNDLES = {"provider": "--provider", "engine_folder": "--engines", "threads": "--threads", "profile": "--profile"}


@click.command("chat")
@click.argument("where", metavar="DIR|URL")
@click.option("--model", metavar="NAME", help="With a URL: the model's name.  [default: the server's first one]")
@click.option("--system", metavar="TEXT", help="The system's message.")
@click.option(
    "--temperature", metavar="T", type=NumberRange(0, 2), default=0.7, show_default=True,
    help="0 takes the most probable token.",
)  # fmt: skip
@click.option("--top-p", metavar="P", type=NumberRange(0, 1, min_open=True), help="Keep this much probability.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Makes answers repeatable.")
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(1), default=1024, show_default=True, help="Longest answer."
)
@click.option("--draft-tokens", metavar="K|auto", type=DRAFT_TOKENS, help="Tokens to draft per round.  [default: auto]")
@click.option(
    "--show-accepted", is_flag=True,
    help="Mark what the draft had proposed, in green or ⟦brackets⟧, and count it behind each answer.",
)  # fmt: skip
@provider_option
@engines_option
@threads_option
@profile_option
@click.pass_context
def command(
    context: click.Context,
    /,
    where: str,
    model: str | None,
    system: str | None,
    temperature: float,
    top_p: float | None,
    seed: int | None,
    max_new_tokens: int,
    draft_tokens: int | str | None,
    show_accepted: bool,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
) -> None:
    """Chat with the bundle in DIR, or with a server that speaks OpenAI's API at URL, such as http://127.0.0.1:8000.

    Messages are lines of stdin. A server's key is taken from PACELINE_API_KEY. When stdin is no terminal, the first
    failure ends the chat.
    """
    if sys.stdin is None:
        raise click.UsageError("stdin is closed, and messages are its lines; open it, or give it a file.")
    for option, text in (("DIR|URL", where), ("--system", system or ""), ("--model", model or "")):
        check_text(option, text)
    settings = Settings(temperature, top_p, seed, max_new_tokens, draft_tokens)
    partner: Partner
    if (scheme := re.match(r"([A-Za-z][\w+.-]*)://", where)) and scheme[1].lower() not in ("http", "https"):
        raise click.UsageError(f"{where!r:.200}: a server is spoken with over http:// or https://, not {scheme[1]}://.")
    if scheme:
        for name, option in _FOR_BUNDLES.items():
            if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise click.UsageError(f"{option} is for bundles; a server has its own.")
        partner = ServerPartner(where, model, settings, wants_pieces=show_accepted)
    else:
        if model is not None:
            raise click.UsageError("--model is for servers; a bundle holds one model.")
        folder: Path = FOLDER.convert(where, None, context)
        decoder = paceline.load(
            folder, provider=provider, engines=engine_folder, threads=threads, prefix_cache_bytes=1 << 28,
            profile=None if profile == "none" else profile,
        )  # fmt: skip
        partner = BundlePartner(decoder, folder_name(folder), settings)
    _Talk(partner, system, show_accepted).run()


class _Talk:
    """One conversation: reads messages, prints answers, keeps what was said."""

    def __init__(self, partner: Partner, system: str | None, shows_accepted: bool) -> None:
        self._partner = partner
        self._shows_accepted = shows_accepted
        self._is_terminal = sys.stdin is not None and sys.stdin.isatty()
        self._has_colours = sys.stdout.isatty()
        self._begin(system)

    def run(self) -> None:
        """Talk until stdin ends."""
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() edits lines with it
            click.echo(f"You talk with {self._partner.name}. /help lists commands; Ctrl-D ends.", err=True)
        while True:
            try:
                text = self._read()
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                click.echo("\n(Ctrl-D ends the chat.)", err=True)
                continue
            except UnicodeError as error:
                if not self._is_terminal:
                    raise click.UsageError("stdin is not UTF-8; convert it first.") from error
                click.echo("Error: what was typed is not UTF-8, and was not sent.", err=True)
                continue
            if text is None:
                break
            if text.startswith("/") and not text.startswith("//"):
                if not self._obey(text):
                    break
            elif text.strip():
                self._answer(text.removeprefix("/") if text.startswith("//") else text)
        if self._is_terminal:
            click.echo(err=True)

    def _begin(self, system: str | None) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        self._system = system

    def _read(self) -> str | None:
        """The next message; None at the end of stdin. Raises UnicodeError where it is not UTF-8."""
        lines: list[str] = []
        prompt = "> "
        while True:
            try:
                line = self._line(prompt)
            except EOFError:
                return "\n".join(lines) if lines else None
            lines.append(line)
            if not line.endswith("\\"):
                return "\n".join(lines)
            lines[-1] = line[:-1]
            prompt = "… "

    def _line(self, prompt: str) -> str:
        if self._is_terminal and not self._has_colours:  # input() would write it among the answers
            click.echo(prompt, err=True, nl=False)
        line = input(prompt if self._is_terminal and self._has_colours else "")
        line.encode()
        return line

    def _obey(self, text: str) -> bool:
        """Follow a command; returns whether the chat goes on."""
        name, _, rest = text.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._begin(self._system)
        elif name == "/system":
            self._begin(rest.strip() or None)
        else:
            unknown = "" if name == "/help" else f"There is no command {name}.\n"
            click.echo(unknown + _HELP, err=True)
        return True

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        started = time.monotonic()
        answer: list[str] = []
        try:
            with contextlib.closing(self._partner.answer(self._messages)) as pieces:
                for piece in pieces:
                    answer.append(piece.text)
                    self._write(piece)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            click.echo(" (stopped)", err=True, nl=False)
        except (PacelineError, click.ClickException, OSError) as error:
            self._messages.pop()
            if not self._is_terminal:
                raise
            message = error.message if isinstance(error, click.ClickException) else str(error)
            if isinstance(error, ContextLengthError | ContextFullError):
                message += " /reset forgets the conversation and begins anew."
            click.echo(f"{chr(10) if answer else ''}Error: {message}", err=True)
            return
        click.echo()
        if answer:
            self._messages.append({"role": "assistant", "content": "".join(answer)})
        else:  # chat templates want questions and answers in turns
            self._messages.pop()
        if self._shows_accepted:
            click.echo(self._partner.figures(time.monotonic() - started), err=True)

    def _write(self, piece: Piece) -> None:
        text = without_controls(piece.text) if self._has_colours else piece.text
        if self._shows_accepted and piece.accepted:
            text = click.style(text, fg="green") if self._has_colours else f"⟦{text}⟧"
        sys.stdout.write(text)
        sys.stdout.flush()
