"""`paceline export`: write a bundle from a target model and a draft model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline_export.recipe import PairRecipe, find_recipe

from .progress import stages
from .tables import duration, size, table

if TYPE_CHECKING:
    from paceline_export.export import ExportReport

__all__ = ["command"]

_PRECISIONS = click.Choice(["fp32", "fp16", "int8", "int4"])


@click.command("export")
@click.option("--target", metavar="SRC", required=True, help="The model whose text is wanted, or the recipe of a pair.")
@click.option("--draft", metavar="SRC", help="A smaller model with the same tokenizer, which drafts.")
@click.option(
    "-o", "--out", metavar="DIR", required=True, type=click.Path(path_type=Path), help="Folder of the new bundle."
)
@click.option("--precision", type=_PRECISIONS, default="int4", show_default=True, help="How weights are stored.")
@click.option("--draft-precision", type=_PRECISIONS, help="The draft's.  [default: as --precision]")
@click.option("--max-length", metavar="N", type=int, help="Largest context.  [default: the model's, at most 32768]")
@click.option(
    "--block-size", metavar="N", type=int, default=128, show_default=True, help="Quantised values that share a scale."
)
@click.option("--overwrite", is_flag=True, help="Replace the bundle in DIR once the new one is complete.")
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where packages are assembled. By default the user's cache folder for paceline.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
def command(
    target: str,
    draft: str | None,
    out: Path,
    precision: str,
    draft_precision: str | None,
    max_length: int | None,
    block_size: int,
    overwrite: bool,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Export models to the bundle DIR. It appears when it is complete, or not at all.

    A source SRC is a recipe's name or .toml file, a folder with config.json and model.safetensors, a .gguf file, or a
    hub id org/name[@revision]. What is not on this machine yet is fetched first.
    """
    if draft is None and isinstance(recipe := find_recipe(target), PairRecipe):
        target, draft = recipe.target, recipe.draft

    from paceline_export.export import check_arguments, export_bundle
    from paceline_export.source import resolve

    check_arguments(
        out,
        has_draft=draft is not None,
        precision=precision,
        draft_precision=draft_precision,
        max_length=max_length,
        block_size=block_size,
        overwrite=overwrite,
    )
    sources = [resolve(text, cache_dir=cache_dir, progress=True) if text else None for text in (target, draft)]
    assert sources[0] is not None
    with stages() as on_progress:
        report = export_bundle(
            sources[0],
            sources[1],
            out,
            precision=precision,
            draft_precision=draft_precision,
            max_length=max_length,
            block_size=block_size,
            overwrite=overwrite,
            on_progress=on_progress,
        )
    click.echo(json.dumps(asdict(report), default=str, indent=1) if as_json else _text(report))


def _text(report: ExportReport) -> str:
    rows = [
        (model.which, model.name, model.precision, f"{model.parameters / 1e6:,.0f} M", size(model.bytes))
        for model in report.models
    ]
    return (
        f"{table(('model', 'source', 'precision', 'parameters', 'on disk'), rows)}\n\n"
        f"Wrote {size(report.bytes_written)} to {report.path} in {duration(report.seconds)}; "
        f"peak memory {size(report.peak_memory)}."
    )
