"""`paceline batch`: let a bundle's models take several texts in one pass."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from paceline import Bundle
from paceline.bundle import MOST_LANES

from .arguments import FOLDER
from .tables import duration, size

__all__ = ["command"]


@click.command("batch")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--max-batch", metavar="N", type=click.IntRange(2, MOST_LANES), default=4, show_default=True,
    help="Most texts in one pass; each costs a pass of fewer texts a little time.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what was added as one JSON document.")
def command(folder: Path, max_batch: int, as_json: bool) -> None:
    """Add graphs to the bundle DIR that take several texts in one pass, for `paceline serve --max-batch`.

    Its weights are not copied, and nothing else in it changes. DIR must have been exported with --flavor ort; for
    engines see `paceline build --max-batch`.
    """
    from paceline_export.lanes import add_lanes

    report = add_lanes(Bundle.open(folder), max_batch)
    if as_json:
        click.echo(json.dumps(asdict(report), default=str, indent=1))
        return
    graphs = " and ".join(f"{which} ({size(count)})" for which, count in report.graphs.items())
    click.echo(
        f"Added graphs for {report.max_batch} texts in one pass to {report.path} in {duration(report.seconds)}: "
        f"{graphs}. `paceline serve {folder} --max-batch {report.max_batch}` uses them."
    )
