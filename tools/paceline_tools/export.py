"""`paceline export`: write a bundle from a target model and a draft model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline import Bundle
from paceline.bundle import MANIFEST_NAME
from paceline_export.quantize import CALIBRATIONS
from paceline_export.recipe import PairRecipe, find_recipe

from .arguments import CACHE_DIR, DRAFT_VOCAB, FOLDER, SIZE, SOURCE, own_layers
from .progress import stages
from .tables import duration, quality_table, size, table

if TYPE_CHECKING:
    from paceline_export.export import ExportReport

__all__ = ["command"]

_CALIBRATIONS = click.Choice(CALIBRATIONS)
_FLAVORS = click.Choice(["ort", "cuda", "trt"])
_PRECISIONS = click.Choice(["fp32", "fp16", "bf16", "fp8", "int8", "int4"])


@click.command("export")
@click.option(
    "--target",
    metavar="SRC",
    type=SOURCE,
    required=True,
    help="The model whose text is wanted, the recipe of a pair, or a bundle, whose target another draft shall serve.",
)
@click.option(
    "--draft",
    metavar="SRC",
    type=SOURCE,
    help="A smaller model, which drafts; self:N takes the first N layers of the target.",
)
@click.option("-o", "--out", metavar="DIR", required=True, type=FOLDER, help="Folder of the new bundle.")
@click.option(
    "--flavor",
    type=_FLAVORS,
    default="ort",
    show_default=True,
    help="What the graphs are for: ort, ONNX Runtime on a processor; cuda, ONNX Runtime on NVIDIA's GPUs; trt, "
    "TensorRT (`paceline build`).",
)
@click.option(
    "--precision",
    type=_PRECISIONS,
    default="int4",
    show_default=True,
    help="How weights are stored: fp32, fp16, int8, int4 for ort; fp16, int8, int4 for cuda; fp16, bf16, fp8, int8, "
    "int4 for trt.",
)
@click.option("--draft-precision", type=_PRECISIONS, help="The draft's.  [default: as --precision]")
@click.option(
    "--draft-vocab",
    metavar="N",
    type=DRAFT_VOCAB,
    help="Ids that the draft can propose, the most useful ones.  [default: full, which is all]",
)
@click.option(
    "--draft-method",
    type=click.Choice(["intersection", "text"]),
    help="How a draft with another tokenizer proposes: tokens that both have, or text.  [default: intersection]",
)
@click.option(
    "--max-length",
    metavar="N",
    type=int,
    help="Largest context, at least 74.  [default: the model's, at most 32768; for trt at most 4096]",
)
@click.option(
    "--block-size", metavar="N", type=int, default=128, show_default=True, help="Quantised values that share a scale."
)
@click.option(
    "--calibration",
    type=_CALIBRATIONS,
    help="How int4 weights of the target are chosen; none rounds to nearest.  [default: gptq where it is possible]",
)
@click.option("--draft-calibration", type=_CALIBRATIONS, help="The draft's.  [default: none]")
@click.option(
    "--quality/--no-quality",
    default=True,
    show_default=True,
    help="Compare the target as stored with the full-precision model on held-out texts.",
)
@click.option("--adapter", metavar="DIR", type=FOLDER, help="A LoRA adapter of the target, merged into its weights.")
@click.option("--draft-adapter", metavar="DIR", type=FOLDER, help="One of the draft.")
@click.option(
    "--max-file-size",
    metavar="SIZE",
    type=SIZE,
    help="Largest file of weights, such as 4GB, for file systems and stores that take no larger one.  [default: any]",
)
@click.option(
    "--long-context",
    is_flag=True,
    help="Let steps behind long texts read each key and value once; those behind short texts are a little slower.",
)
@click.option("--overwrite", is_flag=True, help="Replace the bundle in DIR once the new one is complete.")
@click.option(
    "--cache-dir",
    type=CACHE_DIR,
    help="Where packages are assembled. By default the user's cache folder for paceline.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
def command(
    target: str,
    draft: str | None,
    out: Path,
    flavor: str,
    precision: str,
    draft_precision: str | None,
    draft_vocab: int | None,
    draft_method: str | None,
    max_length: int | None,
    block_size: int,
    calibration: str | None,
    draft_calibration: str | None,
    quality: bool,
    adapter: Path | None,
    draft_adapter: Path | None,
    max_file_size: int | None,
    long_context: bool,
    overwrite: bool,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Export models to the bundle DIR. It appears when it is complete, or not at all.

    The draft may have another tokenizer than the target.

    A source SRC is a recipe's name or .toml file, a folder with config.json and model.safetensors, a .gguf file, or a
    hub id org/name[@revision]. What is not on this machine yet is fetched first.
    """
    if isinstance(pair := find_recipe(target), PairRecipe):
        if draft is not None:
            raise click.UsageError(
                f"--target {target} names a pair, which brings its own draft: leave --draft {draft} out, or give the "
                f"pair's target, --target {pair.target}."
            )
        target, draft = pair.target, pair.draft
    elif draft is not None and isinstance(pair := find_recipe(draft), PairRecipe):
        raise click.UsageError(f"--draft {draft} names a pair; give the pair's draft, --draft {pair.draft}.")

    draft_layers = own_layers(draft)
    if draft_layers is not None:
        draft = None

    from paceline_export.arguments import check_arguments
    from paceline_export.export import export_bundle
    from paceline_export.parity import SHORTEST
    from paceline_export.source import resolve

    if max_length is not None and max_length < SHORTEST:
        raise click.UsageError(
            f"--max-length must be at least {SHORTEST} positions, which `paceline check` needs to compare the bundle "
            f"with torch; got {max_length}."
        )

    options: dict[str, Any] = {
        "flavor": flavor,
        "precision": precision,
        "draft_precision": draft_precision,
        "draft_vocab": draft_vocab,
        "draft_method": draft_method,
        "draft_layers": draft_layers,
        "max_length": max_length,
        "block_size": block_size,
        "calibration": calibration,
        "draft_calibration": draft_calibration,
        "quality": quality,
        "draft_adapter": draft_adapter,
        "max_file_size": max_file_size,
        "long_context": long_context,
        "overwrite": overwrite,
    }
    check_arguments(out, has_draft=draft is not None, **options)
    is_bundle = (Path(target) / MANIFEST_NAME).is_file()
    target_source = Bundle.open(target) if is_bundle else resolve(target, cache_dir=cache_dir, progress=True)
    draft_source = resolve(draft, cache_dir=cache_dir, progress=True) if draft is not None else None
    with stages() as on_progress:
        report = export_bundle(target_source, draft_source, out, adapter=adapter, on_progress=on_progress, **options)
    click.echo(json.dumps(asdict(report), default=str, indent=1) if as_json else _text(report))


def _text(report: ExportReport) -> str:
    rows = [
        (model.which, model.name, model.precision, f"{model.parameters / 1e6:,.0f} M", size(model.bytes))
        for model in report.models
    ]
    more = []
    for model in report.models:
        if model.calibration is not None:
            more.append(f"{model.which}: calibrated by {model.calibration} in {duration(model.layers_seconds)}.")
        more += [f"{model.which}: {note}" for note in model.notes]
        if model.quality is not None:
            more.append(f"{model.which} as stored against full precision, on held-out text:")
            more.append(quality_table(model.quality))
    return (
        f"{table(('model', 'source', 'precision', 'parameters', 'on disk'), rows)}\n\n"
        + "".join(f"{line}\n\n" for line in more)
        + f"Wrote {size(report.bytes_written)} to {report.path} in {duration(report.seconds)}; "
        f"peak memory {size(report.peak_memory)}."
    )
