"""Progress of long work, on stderr: a bar at a terminal, one line for each stage elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["stages"]

_STEPS = 1000


@contextmanager
def stages() -> Iterator[Callable[[str, float], None]]:
    """Give a function that takes the name of the stage at hand and the fraction of the whole that is done."""
    last_stage = ""
    if not sys.stderr.isatty():

        def line(stage: str, fraction: float) -> None:
            nonlocal last_stage
            if stage != last_stage:
                click.echo(f"{fraction:4.0%}  {stage}", err=True)
                last_stage = stage

        yield line
        return

    with click.progressbar(
        length=_STEPS, item_show_func=lambda stage: stage, file=sys.stderr, show_percent=True, width=30
    ) as bar:

        def draw(stage: str, fraction: float) -> None:
            bar.update(max(round(fraction * _STEPS) - bar.pos, 0), stage)
            bar.render_progress()  # a new stage shows before it has got anywhere

        yield draw
