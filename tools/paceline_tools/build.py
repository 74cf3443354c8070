"""`paceline build`: TensorRT engines of a bundle's graphs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline import Bundle

from .arguments import CAPABILITIES, FOLDER, OUTPUT_FILE, PROFILE, SIZE
from .progress import stages
from .tables import duration, size, table

if TYPE_CHECKING:
    from paceline_export.engine.bundle import BuildReport

__all__ = ["command"]


@click.command("build")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--backend",
    type=click.Choice(["tensorrt-rtx", "tensorrt"]),
    default="tensorrt-rtx",
    show_default=True,
    help="What builds: tensorrt-rtx needs no GPU; tensorrt builds for the one at hand.",
)
@click.option(
    "--sm",
    "sms",
    metavar="LIST",
    type=CAPABILITIES,
    help="Compute capabilities of the GPUs to build for, such as 8.6,8.9; tensorrt-rtx must be told. An engine serves "
    "these and no others.",
)
@click.option("--max-length", metavar="N", type=int, help="Positions of the caches.  [default: the graphs']")
@click.option(
    "--max-draft-tokens", metavar="K", type=int, default=8, show_default=True, help="Most drafted tokens of a round."
)
@click.option("--max-batch", metavar="N", type=int, default=1, show_default=True, help="Most texts at once.")
@click.option(
    "--profile",
    "profiles",
    metavar="SPEC",
    type=PROFILE,
    multiple=True,
    help="A range of rows to build for, instead of the profile of its name or beside all: MODEL:NAME=LEAST,USUAL,MOST, "
    "such as target:verify=1,5,9. May be given several times.",
)
@click.option(
    "--workspace", metavar="SIZE", type=SIZE, help="Scratch memory of a kernel, at most, such as 512MB.  [default: all]"
)
@click.option(
    "--timing-cache", metavar="FILE", type=OUTPUT_FILE, help="Timings of kernels, where the backend takes some."
)
@click.option(
    "--strict/--no-strict",
    default=True,
    show_default=True,
    help="Refuse an engine in which something is dropped, unused, inconsistent or not fused.",
)
@click.option(
    "--engine-per-gpu",
    is_flag=True,
    help="An engine for each compute capability, where tensorrt-rtx would make one for several.",
)
@click.option("-o", "--out", metavar="DIR", type=FOLDER, help="Folder for the engines.  [default: into the bundle]")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as one JSON document.")
def command(
    folder: Path,
    backend: str,
    sms: tuple[str, ...] | None,
    max_length: int | None,
    max_draft_tokens: int,
    max_batch: int,
    profiles: tuple[tuple[str, str, tuple[int, int, int]], ...],
    workspace: int | None,
    timing_cache: Path | None,
    strict: bool,
    engine_per_gpu: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Build engines of the graphs in the bundle DIR, which was exported with --flavor trt.

    The target's engine has a profile for verifying 1 to K + 1 rows, the draft's one for its steps, and both have one
    for pieces of a prompt. Engines appear in the bundle when all of them are complete, or not at all.
    """
    from paceline_export.engine.bundle import build_engines
    from paceline_export.engine.profiles import ProfileRows

    rows = tuple(ProfileRows(*profile) for profile in profiles)
    if len({(profile.model, profile.name) for profile in rows}) < len(rows):
        raise click.UsageError("--profile names a profile twice; give each its rows once.")
    bundle = Bundle.open(folder, verify_hashes=True)  # an engine says which graph it is of
    with stages() as on_progress:
        report = build_engines(
            bundle,
            sms,
            backend=backend,
            max_length=max_length,
            max_draft_tokens=max_draft_tokens,
            max_batch=max_batch,
            profile_rows=rows,
            workspace=workspace,
            timing_cache=timing_cache,
            strict=strict,
            engine_per_gpu=engine_per_gpu,
            out=out,
            on_progress=on_progress,
        )
    if as_json:
        click.echo(json.dumps(asdict(report), default=str, indent=1))
        return
    click.echo(_text(report))
    if out is not None:
        click.echo(f"They are loaded with --engines {out}, as in `paceline generate {folder} --engines {out}`.")


def _text(report: BuildReport) -> str:
    engines = [
        (
            f"{engine.entry.model}, {engine.entry.precision}, SM {', '.join(engine.sms)}",
            duration(engine.seconds),
            size(engine.bytes),
            "–" if engine.entry.weight_bytes is None else size(engine.entry.weight_bytes),
        )
        for engine in report.engines
    ]
    profiles = []
    for engine in report.engines:
        for profile, said in zip(engine.entry.profiles, engine.profiles, strict=True):
            least, usual, most = (shape[1] for shape in profile.shapes["input_ids"])
            profiles.append(
                (
                    f"{engine.entry.model}, SM {', '.join(engine.sms)}, {profile.name}",
                    f"{least} … {most}, tuned at {usual}",
                    "–" if said.activation_bytes is None else size(said.activation_bytes),
                    f"{said.fused_attention} of {engine.attention}",
                )
            )
    first = report.engines[0].entry
    findings = [f"{e.entry.model}, SM {', '.join(e.sms)}: {text}" for e in report.engines for text in e.findings]
    return "\n".join(
        (
            table(("engine", "time", "on disk", "weights"), engines),
            "",
            table(("profile", "rows", "activations", "fused attention"), profiles),
            "",
            *(f"Warning: {finding}." for finding in findings),
            f"Built by {first.backend} {first.backend_version} for caches of {first.max_length} positions, at most "
            f"{first.max_draft_tokens} drafted tokens and {first.max_batch} texts at once; not run on a GPU.",
            f"Wrote {size(sum(engine.bytes for engine in report.engines))} to {report.path} in "
            f"{duration(report.seconds)}; peak memory {size(report.peak_memory)}.",
        )
    )
