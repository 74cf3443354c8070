"""The `paceline` command: a group whose commands are imported when they run or their help is asked for.

Exit codes: 0 done; 1 failed: any other `PacelineError` or an `OSError`; 2 a usage error, click's or
`paceline.errors.InvalidInputError`; 130 ended by Ctrl-C,
143 by SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import click
from click.exceptions import Exit

from .wording import in_options

__all__ = ["COMMANDS", "cli"]

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Row:
    """One command: its line in the group's help, and the extras of the package that it needs."""

    help: str
    extras: str


# A command lives in the module of its name, as `command`.
COMMANDS: Mapping[str, Row] = MappingProxyType(
    {
        "fetch": Row("Fetch the checkpoint of a recipe or a hub id.", "export,tools"),
        "export": Row("Export a target model, and a draft model, to a bundle.", "cpu,export,tools"),
        "build": Row("Build TensorRT engines of a bundle's graphs.", "cpu,export,tools,trt"),
        "batch": Row("Let a bundle's models take several texts in one pass.", "cpu,export,tools"),
        "check": Row("Compare a bundle with the checkpoints it was made from.", "cpu,export,tools"),
        "plan": Row("Say how many tokens to draft, from an acceptance rate and costs.", "tools"),
        "recommend": Row("Say which of several drafts pays for a target, on your prompts.", "cpu,export,tools"),
        "tune": Row("Measure this machine once, for plans of drafts.", "cpu,tools"),
        "generate": Row("Generate text with a bundle.", "cpu,tools"),
        "chat": Row("Chat with a bundle or a server in the terminal.", "cpu,tools"),
        "serve": Row("Serve a bundle over HTTP, as OpenAI's API does.", "cpu,serve"),
        "info": Row("Show what is in a bundle.", "tools"),
        "verify": Row("Test that speculative sampling keeps the target's law.", "cpu,tools"),
        "doctor": Row("Say what this machine can run, and what is missing.", "tools"),
        "bench": Row("Measure plain and speculative decoding on your prompts, and compare runs.", "cpu,tools"),
        "demo": Row("Answer three prompts and measure speculative against plain decoding.", "cpu,tools"),
    }
)


class UsageFailure(click.ClickException):
    """An argument that the library refused."""

    exit_code = 2


class PacelineGroup(click.Group):
    """Imports a command's module only when that command is meant, and turns errors into a sentence and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order in which one comes to need them."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` mean, imported. Until then a stand-in knows its name and its line of help."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            ctx.invoked_subcommand = name
            command = importlib.import_module(f".{name}", __package__).command
        return name, command, rest

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. What the system refuses becomes a sentence; click ends quietly when a reader goes."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            lost = _lost_output()
            what = f"stdout cannot be written to ({lost.strerror or lost})" if lost else _reason(error)
            with contextlib.suppress(OSError):  # stderr may be what failed
                click.echo(f"Error: {what}.", err=True)
            sys.exit(1)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the group's own options. click would end a Ctrl-C here with 1."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            click.echo(err=True)
            sys.exit(INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that `ctx` means."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, Exit, OSError):
            raise  # click prints these; for OSError see main
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal shows ^C at the line's end
            raise Exit(INTERRUPTED) from None
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            row = COMMANDS.get(ctx.invoked_subcommand or "")
            if row is None or not package or package.startswith("paceline"):
                raise
            raise click.ClickException(
                f"`paceline {ctx.invoked_subcommand}` needs the package {package!r}, which is not installed: "
                f"pip install 'paceline[{row.extras}]'"
            ) from error
        except Exception as error:
            # Imported only now: `paceline --help` shall not wait for numpy.
            from paceline.errors import InvalidInputError, PacelineError

            if not isinstance(error, PacelineError):
                raise
            if not isinstance(error, InvalidInputError):
                raise click.ClickException(str(error)) from error
            called = importlib.import_module(f".{ctx.invoked_subcommand}", __package__).command
            raise UsageFailure(in_options(str(error), called.params)) from error


def _lost_output() -> OSError | None:
    """Why stdout cannot be written to, if so. Then what is left for it is dropped, or Python's exit would fail, too."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def _reason(error: OSError) -> str:
    """The system's reason and the files it is about; the whole text where a library gave no number."""
    if error.strerror is None:
        return str(error).rstrip(".") or type(error).__name__
    files = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    if not files:
        return f"a stream cannot be read or written ({error.strerror}); look where stdout goes"
    return f"{' and '.join(files)}: {error.strerror}"


def _print_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from paceline import __version__

        click.echo(f"paceline {__version__}")
        ctx.exit()


@click.group(
    cls=PacelineGroup,
    commands=[click.Command(name, short_help=row.help) for name, row in COMMANDS.items()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def cli() -> None:
    """Export draft and target models to ONNX, and generate with speculative sampling.

    A bundle is the folder that `paceline export` writes. `paceline COMMAND --help` explains a command.

    Exit codes: 0 done; 1 failed, as when a bundle, source or download is missing or damaged, a check finds a
    difference, or the disk is full; 2 wrong usage, or an argument or input that cannot be honoured; 130 Ctrl-C;
    143 SIGTERM.
    """
    # Warnings of paceline are for whoever runs it; those of torch and its exporter are for its developers.
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    for name, level in (
        ("paceline", logging.WARNING),
        ("paceline_export", logging.WARNING),
        ("paceline_server", logging.WARNING),
        ("torch.onnx", logging.ERROR),
    ):
        logging.getLogger(name).setLevel(level)
