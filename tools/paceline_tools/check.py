"""`paceline check`: a bundle's graphs against the checkpoints they were made from."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline import Bundle

from .arguments import FOLDER
from .tables import percent, table

if TYPE_CHECKING:
    from paceline_export.parity import ModelParity

__all__ = ["command"]


@click.command("check")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as one JSON document.")
@click.pass_context
def command(context: click.Context, folder: Path, as_json: bool) -> None:
    """Compare the bundle DIR, in ONNX Runtime, with torch on the same weights.

    Past the tolerance of its precision the exit code is 1, with the reason.
    """
    bundle = Bundle.open(folder)

    from paceline_export.parity import check_bundle

    report = check_bundle(bundle, on_progress=lambda stage: click.echo(stage, err=True))
    if as_json:
        click.echo(json.dumps({"passed": report.passed, "models": [_dict(model) for model in report.models]}, indent=1))
    else:
        click.echo("\n\n".join(_text(model) for model in report.models))
    if not report.passed:
        for model in report.models:
            if model.reason:
                click.echo(f"Error: {model.reason}.", err=True)
        context.exit(1)


def _dict(model: ModelParity) -> dict[str, Any]:
    phases = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in phase.items()}
        for phase in asdict(model)["phases"]  # JSON has no NaN
    ]
    return {**asdict(model), "phases": phases, "passed": model.passed, "reason": model.reason}


def _text(model: ModelParity) -> str:
    rows = [
        (
            phase.name,
            str(phase.rows),
            f"{phase.max_logit_diff:.2g}",
            f"{phase.kl:.2g}",
            percent(phase.argmax_agreement),
            str(phase.near_ties),
            str(phase.disagreements),
        )
        for phase in model.phases
    ]
    header = ("phase", "rows", "max logit diff", "KL", "same argmax", "near ties", "disagreements")
    return (
        f"{model.which}, weights {model.precision}, arithmetic {model.arithmetic}: "
        f"{'passed' if model.passed else 'FAILED'} (tolerance: logits {model.tolerance_logit:g}, "
        f"KL {model.tolerance_kl:g})\n{table(header, rows)}" + (f"\n{model.note}." if model.note else "")
    )
