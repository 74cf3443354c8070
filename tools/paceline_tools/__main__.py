"""Entry point of the `paceline` command and of `python -m paceline_tools`."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; without click, say how to install it."""
    try:
        from .cli import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("Error: the paceline command needs click, which is not installed: pip install 'paceline[cpu,tools]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal's encoding lacks
    cli(prog_name="paceline")


if __name__ == "__main__":
    main()
