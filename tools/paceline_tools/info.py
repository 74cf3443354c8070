"""`paceline info`: what is in a bundle."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from paceline import Bundle
from paceline.bundle import ModelEntry
from paceline.engines import build_command, engine_fault
from paceline.shared_ids import read_shared_ids

from .arguments import FOLDER
from .progress import stages
from .tables import quality_table, size, table

__all__ = ["command"]

_MOST_NAMES = 5


@click.command("info")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--verify", is_flag=True, help="Hash every file, too; the size of each is checked always.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the manifest and the computed figures as one JSON document."
)
def command(folder: Path, verify: bool, as_json: bool) -> None:
    """Show what is in the bundle DIR, after a check of its files."""
    bundle = Bundle.open(folder)
    if verify:
        _verify(bundle)
    if as_json:
        document = {"bundle": str(folder), "verified": verify, "computed": _computed(bundle)}
        document |= {"unlisted": bundle.unlisted()} if verify else {}
        click.echo(json.dumps({**asdict(bundle.manifest), **document}, ensure_ascii=False, indent=1))
        return
    click.echo(_text(bundle))
    if verify:
        click.echo("\nEvery file of the manifest has its size and its SHA-256.")
        if names := bundle.unlisted():
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            click.echo(
                f"Warning: the manifest does not list {', '.join(map(repr, names[:_MOST_NAMES]))}{more}; nothing "
                "vouches for these files, and paceline does not read them."
            )


def _verify(bundle: Bundle) -> None:
    whole = sum(entry.size for entry in bundle.manifest.files.values())
    done = 0
    with stages() as on_progress:

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            on_progress("hash files", done / whole)

        bundle.check_files(verify_hashes=True, on_bytes=on_bytes)


def _models(bundle: Bundle) -> Iterator[tuple[str, ModelEntry]]:
    yield "target", bundle.manifest.target
    if bundle.manifest.draft is not None:
        yield "draft", bundle.manifest.draft


def _bytes_on_disk(bundle: Bundle, model: ModelEntry) -> int:
    """Bytes of all files in the model's own folder."""
    folder = model.path.rpartition("/")[0] + "/"
    return sum(entry.size for name, entry in bundle.manifest.files.items() if name.startswith(folder))


def _computed(bundle: Bundle) -> dict[str, Any]:
    """Figures that follow from the manifest."""
    return {
        "bytes": sum(entry.size for entry in bundle.manifest.files.values()),
        "models": {
            which: {
                "bytes": _bytes_on_disk(bundle, model),
                "kv_bytes_per_token": model.kv_bytes_per_position,
                "kv_bytes_full_context": model.kv_bytes_per_position * model.max_length,
            }
            for which, model in _models(bundle)
        },
    }


def _precision(model: ModelEntry) -> str:
    """How the weights are stored, and whose numbers they are: such as `int4, block 128, 112 projections in 8 bits`."""
    parts: list[str] = [model.precision]
    if model.block_size is not None:
        parts.append(f"block {model.block_size}")
    counts = Counter((model.mixed_bits or {}).values())
    parts += [f"{count} projections in {bits} bits" for bits, count in sorted(counts.items())]
    if model.prequantized:
        parts.append(f"{model.prequantized} of the checkpoint")
    return ", ".join(parts)


def _quality(models: Mapping[str, ModelEntry]) -> Iterator[str]:
    """Measured quality of each model that has some."""
    for which, model in models.items():
        if model.quality is not None:
            yield f"{which} as stored against full precision, on held-out text:"
            yield quality_table(model.quality)
            yield ""


def _engines(bundle: Bundle) -> Iterator[str]:
    """What each engine was built for, and which of their files are lost or damaged."""
    engines = bundle.manifest.engines
    if not engines:
        return
    rows = [
        (
            f"{engine.model}, SM {engine.sm}",
            engine.precision,
            str(engine.max_length),
            str(engine.max_draft_tokens),
            str(engine.max_batch),
            ", ".join(profile.name for profile in engine.profiles),
            f"{engine.backend} {engine.backend_version}",
        )
        for engine in engines
    ]
    yield table(("engine", "precision", "context", "drafted", "batch", "profiles", "built by"), rows)
    yield ""
    for engine in engines:
        if fault := engine_fault(bundle.root, engine.path, bundle.manifest.files[engine.path]):
            yield f"Warning: {fault} {build_command(bundle, engine.backend, engine.sm)} builds it again."
            yield ""


def _draft_tokenizer(bundle: Bundle) -> Iterator[str]:
    """What a draft with a tokenizer of its own shares with the target, and how it drafts."""
    if (own := bundle.manifest.draft_tokenizer) is not None:
        shared = read_shared_ids(bundle, own).shape[1]
        yield (
            f"draft's own tokenizer: {own.tokenizer.vocab_size} ids, {shared} of them shared with the target's; it "
            f"drafts by {own.method}"
        )


def _text(bundle: Bundle) -> str:
    manifest = bundle.manifest
    models = dict(_models(bundle))
    figures: dict[str, Callable[[ModelEntry], str]] = {
        "architecture": lambda model: model.architecture,
        "graph flavour": lambda model: model.flavor,
        "precision": _precision,
        "calibration": lambda model: model.calibration or ("none" if model.block_size else "–"),
        "layers": lambda model: str(model.num_layers),
        "KV heads × size": lambda model: f"{model.num_kv_heads} × {model.head_size}",
        "context": lambda model: f"{model.max_length} tokens" + (", long ones faster" if model.long_context else ""),
        "logits width": lambda model: (
            str(model.vocab_size) + (f" of {model.num_input_ids} ids" if model.logit_ids else "")
        ),
        "KV cache per token": lambda model: f"{size(model.kv_bytes_per_position)} ({model.kv_dtype})",
        "KV cache, full context": lambda model: size(model.kv_bytes_per_position * model.max_length),
        "texts in one pass": lambda model: str(model.lanes.count if model.lanes else 1),
        "on disk": lambda model: size(_bytes_on_disk(bundle, model)),
        "source": lambda model: (
            f"{model.source.kind} {model.source.name}"
            + (f" with the adapter {model.source.adapter.name}" if model.source.adapter else "")
        ),
        "source's SHA-256": lambda model: f"{model.source.sha256[:12]}…",
    }
    rows = [(name, *(figure(model) for model in models.values())) for name, figure in figures.items()]
    tokenizer = manifest.tokenizer
    end_ids = ", ".join(map(str, tokenizer.eos_token_ids)) or "none"
    files = [(name, size(entry.size)) for name, entry in sorted(manifest.files.items())]
    whole = sum(entry.size for entry in manifest.files.values())
    return "\n".join(
        (
            f"{bundle.root}: format {manifest.format_version}, written by paceline {manifest.paceline_version}, "
            f"{size(whole)}",
            "",
            table(("", *models), rows),
            "",
            *_quality(models),
            *_engines(bundle),
            f"tokenizer: {tokenizer.vocab_size} ids, BOS {tokenizer.bos_token_id}, end {end_ids}, "
            f"chat template: {'yes' if bundle.has('chat_template.jinja') else 'no'}",
            *_draft_tokenizer(bundle),
            "",
            table(("file", "size"), files),
        )
    )
