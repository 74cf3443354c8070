"""Entry point of the `paceline` command and of `python -m paceline_tools`."""

from __future__ import annotations

import sys

__all__ = ["main"]

INTERRUPTED, TERMINATED = 130, 143  # as a shell tells SIGINT and SIGTERM


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly, also while modules are imported, so they are in here."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run() -> None:
    """Prepare the streams and run the group; without click, say how to install it."""
    import io
    import signal

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
    import os

    if sys.stdin is None:  # stays None, so that whoever needs it can say so
        os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.exit("Error: stdout is closed; redirect it to a file, or to /dev/null.")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


if __name__ == "__main__":
    main()
