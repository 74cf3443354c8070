"""Entry point of the `paceline` command and of `python -m paceline_tools`."""

from __future__ import annotations

import io
import os
import signal
import sys

__all__ = ["main"]

TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """Run the command line; without click, say how to install it."""
    try:
        from .cli import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("Error: the paceline command needs click, which is not installed: pip install 'paceline[cpu,tools]'")
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal's encoding lacks
    # Without a handler the process would end at once, and leave what it was writing half-written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    cli(prog_name="paceline")


def _replace_closed_streams() -> None:
    """Keep the numbers of streams that were closed (`<&-`, `2>&-`) from other files; without stdout, end here."""
    if sys.stdin is None:  # stays None, so that whoever needs it can say so
        os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.exit("Error: stdout is closed; redirect it to a file, or to /dev/null.")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
