"""Export a target model, and a draft model for it, into a bundle."""

from __future__ import annotations

import hashlib
import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import paceline
from paceline.bundle import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Bundle,
    FileEntry,
    Manifest,
    ModelEntry,
    QualityEntry,
    file_sha256,
)
from paceline.errors import BundleError, CheckpointError, InvalidInputError

from .arguments import check_arguments, check_ready
from .causal_lm import Trace
from .checkpoint import Checkpoint
from .draft_vocab import useful_ids
from .flavors import find_flavor
from .one_model import SHELF, ModelExport, OnProgress, Weights, export_model, notes_on, run_model_layers
from .other_tokenizer import DEFAULT_METHOD, OtherTokenizer
from .pair import check_widths, token_texts, tokenizer_difference
from .parity import SHORTEST
from .partial_folder import check_room, partial_folder
from .rotation import fixed_positions
from .sampler.build import write_sampler
from .source import Source
from .tokenizer_files import check_templates, tokenizer_entry, write_tokenizer

__all__ = ["ExportReport", "ModelReport", "export_bundle"]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What one model's export wrote: bytes on disk, the number of parameters, how they were stored and what it costs.

    `notes` say what was left out and why; `layers_seconds` is the time for calibration and for the reference of the
    measured quality.
    """

    which: str
    name: str
    precision: str
    bytes: int
    parameters: int
    calibration: str | None = None
    quality: QualityEntry | None = None
    notes: tuple[str, ...] = ()
    layers_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote. `peak_memory` is the largest resident size of the process so far, in bytes."""

    path: Path
    seconds: float
    peak_memory: int
    bytes_written: int
    models: tuple[ModelReport, ...]


def export_bundle(
    target: Source | Bundle,
    draft: Source | None,
    out: Path,
    *,
    flavor: str = "ort",
    precision: str = "int4",
    draft_precision: str | None = None,
    draft_vocab: int | None = None,
    draft_method: str | None = None,
    draft_layers: int | None = None,
    max_length: int | None = None,
    block_size: int = 128,
    calibration: str | None = None,
    draft_calibration: str | None = None,
    quality: bool = True,
    adapter: Path | None = None,
    draft_adapter: Path | None = None,
    max_file_size: int | None = None,
    long_context: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> ExportReport:
    """Write a bundle. It appears under its name when it is complete, or not at all.

    Args:
        target: the model whose text is wanted; or a bundle, whose target is taken as it is stored there.
        draft: a smaller model, or None.
        out: folder of the bundle; it must not exist unless `overwrite`.
        flavor: of the graphs, a key of `paceline_export.flavors.FLAVORS`.
        precision: of the target, one of the flavour's; of the draft where the target is a bundle.
        draft_precision: of the draft; None means the target's.
        draft_vocab: ids that the draft keeps its logits for, the most useful ones. None and 0 keep all, and so does a
            number that is not below that of the vocabulary.
        draft_method: how a draft with another tokenizer proposes, one of `other_tokenizer.METHODS`; None takes what
            that module says is best.
        draft_layers: cut the draft down to so many of its first layers, its norm and its head; without a draft, the
            target itself, with its adapter.
        max_length: largest number of positions; None means the model's own, at most the flavour's
            `default_max_length`.
        block_size: values that share a scale in quantised projections.
        calibration: of the target, one of `quantize.CALIBRATIONS`; None means `gptq` for int4 where the architecture
            permits it, and `none` otherwise. The inputs of fp8 projections are looked at in any case.
        draft_calibration: of the draft; None means `none`.
        quality: compare the target as stored with the full-precision model on held-out texts. This makes the thread
            pool of ONNX Runtime, which a later `paceline.load` in the same process shares.
        adapter: folder of a LoRA adapter that was trained on the target, which is merged into it.
        draft_adapter: one that was trained on the draft.
        max_file_size: bytes of one file of weights, at least 1,000,000; more files are written where a model has more.
            None means one file for each model, of any size.
        long_context: let steps behind long texts read each key and value once for all heads that share it; see
            `passes.folded`. Steps behind short texts become a little slower. For the flavour `ort`.
        overwrite: replace an existing bundle once the new one is complete.
        on_progress: called with what is being done and the share of the whole that is behind, 0 to 1.

    Raises:
        InvalidInputError: an argument of a wrong type or out of its range, or `out` exists or cannot be made.
        BundleError: a target that is a bundle has a damaged file.
        CheckpointError: a model that cannot be exported, with the reason.
        IncompatiblePairError: the draft's tokenizer shares no token with the target's.
        PacelineError: the disk is full.
    """
    started = time.perf_counter()
    ready = target if isinstance(target, Bundle) else None
    if ready is not None:
        check_ready(ready, draft, flavor, calibration, adapter, long_context=long_context)
    check_arguments(
        out,
        has_draft=draft is not None,
        flavor=flavor,
        precision=precision,
        draft_precision=draft_precision,
        draft_vocab=draft_vocab,
        draft_method=draft_method,
        draft_layers=draft_layers,
        max_length=max_length,
        block_size=block_size,
        calibration=calibration,
        draft_calibration=draft_calibration,
        quality=quality,
        draft_adapter=draft_adapter,
        max_file_size=max_file_size,
        long_context=long_context,
        overwrite=overwrite,
    )
    out = Path(out)
    report = on_progress or (lambda stage, done: None)

    report("read configurations and tokenizers", 0.0)
    smaller = Checkpoint.open(draft, draft_adapter) if draft is not None else None
    larger = Checkpoint.of_bundle(target, smaller) if isinstance(target, Bundle) else Checkpoint.open(target, adapter)
    check_widths(larger)
    if draft_layers is not None:
        smaller = (smaller or larger).first_layers(draft_layers)
    difference = tokenizer_difference(larger, smaller) if smaller is not None else None
    if draft_method is not None and difference is None:
        raise InvalidInputError(
            f"draft_method={draft_method!r} is for a draft with another tokenizer than the target's, and this one has "
            "the same; leave it out."
        )
    asked = partial(
        ModelExport,
        flavor=find_flavor(flavor),
        block_size=block_size,
        max_file_size=max_file_size,
        long_context=long_context,
    )
    models: list[ModelExport] = []  # what is exported; a target that is ready is taken over
    if ready is None:
        length = _max_length(larger, max_length, flavor)
        models.append(
            asked("target", larger, precision=precision, max_length=length, calibration=calibration, quality=quality)
        )
    if ready is None:
        check_templates(larger)
    tokenizer = ready.manifest.tokenizer if ready is not None else tokenizer_entry(larger)
    other = logit_ids = None
    if smaller is not None:
        entry = tokenizer_entry(smaller)
        if difference is not None:
            other = OtherTokenizer.between(larger, smaller, (tokenizer, entry), draft_method or DEFAULT_METHOD)
        logit_ids = _logit_ids(smaller, entry.eos_token_ids, draft_vocab, other)
        models.append(
            asked(
                "draft",
                smaller,
                precision=draft_precision or precision,
                max_length=_max_draft_length(smaller, max_length, flavor, other),
                calibration=draft_calibration or "none",
                quality=False,
                logit_ids=logit_ids,
            )
        )
    checked = [(model, model.check_weights()) for model in models]
    taken = _taken_files(ready) if ready is not None else {}
    check_room(
        out,
        sum(
            weights.count * model.least_bits // 8
            for model, weights in checked
            if model.logit_ids is None  # what a cut head saves is left open
        )
        + sum(file.size for file in taken.values()),
    )
    traced: list[tuple[ModelExport, Weights, Trace]] = []
    for model, weights in checked:  # before what takes long
        report(f"{model.which}: trace", 0.02 + 0.02 * len(traced))
        traced.append((model, weights, model.trace()))
    done, whole = 0.06, sum(weights.count for _, weights in checked)
    entries: dict[str, ModelEntry] = {}
    reports: list[ModelReport] = []
    with partial_folder(out, overwrite) as folder:
        if ready is not None:
            _take_over(ready, taken, folder)
            entries["target"] = ready.manifest.target
        for model, weights, trace in traced:
            share = 0.91 * weights.count / whole

            def within(
                stage: str, part: float, which: str = model.which, done: float = done, share: float = share
            ) -> None:
                report(f"{which}: {stage}", done + share * part)

            passed, found, seconds = run_model_layers(model, weights.reader, folder, within)
            entries[model.which], left = export_model(model, weights.reader, trace, passed, folder, within)
            shutil.rmtree(folder / SHELF, ignore_errors=True)
            reports.append(
                ModelReport(
                    model.which,
                    model.checkpoint.source.name,
                    model.precision,
                    0,
                    weights.count,
                    entries[model.which].calibration,
                    entries[model.which].quality,
                    (*_length_notes(model, max_length), *weights.notes, *found, *left, *notes_on(model)),
                    seconds,
                )
            )
            done += share
        report("write tokenizer, sampler and manifest", 0.97)
        if ready is None:
            write_tokenizer(larger, folder)
        kept = None if logit_ids is None else logit_ids.tolist()
        # The sampler's graphs know one vocabulary.
        draft_width = entries["draft"].vocab_size if "draft" in entries and other is None else None
        draft_tokenizer = None
        if other is not None:
            draft_tokenizer = other.write(folder)
            reports[-1] = replace(reports[-1], notes=(*reports[-1].notes, other.note))
        sampler = write_sampler(folder, tokenizer.vocab_size, entries["target"].vocab_size, draft_width, kept)
        files = dict(taken)
        for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()):
            if name not in files:
                files[name] = FileEntry((folder / name).stat().st_size, file_sha256(folder / name))
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            paceline_version=paceline.__version__,
            target=entries["target"],
            draft=entries.get("draft"),
            tokenizer=tokenizer,
            files=files,
            sampler=sampler,
            draft_tokenizer=draft_tokenizer,
            engines=tuple(one for one in ready.manifest.engines if one.model == "target") if ready else (),
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    report("done", 1.0)

    def size(which: str) -> int:
        return sum(file.size for name, file in files.items() if name.startswith(f"{which}/"))

    return ExportReport(
        path=out,
        seconds=time.perf_counter() - started,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bytes_written=sum(file.size for file in files.values()),
        models=tuple(replace(one, bytes=size(one.which)) for one in reports),
    )


def _take_over(bundle: Bundle, files: Mapping[str, FileEntry], folder: Path) -> None:
    """Copy files of a bundle into another folder.

    Links would save the room, but onnx-ir reads no weights from a file with several names.

    Raises:
        BundleError: a file is not the one that the bundle's manifest describes.
    """
    for name, entry in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with (bundle.root / name).open("rb") as source, path.open("wb") as copy:
            while piece := source.read(1 << 22):
                digest.update(piece)
                copy.write(piece)
        if digest.hexdigest() != entry.sha256:
            raise BundleError(
                f"{bundle.root}: {name} is damaged: its bytes are not those that {MANIFEST_NAME} gives the SHA-256 of. "
                "Copy the bundle again in full, or export its target again."
            )


def _taken_files(bundle: Bundle) -> dict[str, FileEntry]:
    """The files that belong to a bundle's target, by their names."""
    of_draft = {engine.path for engine in bundle.manifest.engines if engine.model == "draft"}
    return {
        name: entry
        for name, entry in bundle.manifest.files.items()
        if not name.startswith(("draft/", "sampler/")) and name not in of_draft
    }


def _max_length(checkpoint: Checkpoint, wanted: int | None, flavor: str) -> int:
    """Positions of a target.

    Raises:
        CheckpointError: it has too few.
        InvalidInputError: it has fewer than are wanted.
    """
    own = _own_length(checkpoint, flavor)
    if wanted is not None and wanted > own:
        raise InvalidInputError(f"max_length={wanted} exceeds the {own} positions that {checkpoint.source.name} has.")
    return wanted or min(own, find_flavor(flavor).default_max_length, fixed_positions(checkpoint.config) or own)


def _max_draft_length(checkpoint: Checkpoint, wanted: int | None, flavor: str, other: OtherTokenizer | None) -> int:
    """Positions of a draft. It may have fewer than were asked for: then drafting stops there.

    One with a tokenizer of its own needs more, where its tokens are shorter.

    Raises:
        CheckpointError: it has too few.
    """
    own = _own_length(checkpoint, flavor)
    most = find_flavor(flavor).default_max_length if wanted is None else wanted * (1 if other is None else 2)
    return min(own, most, fixed_positions(checkpoint.config) or own)


def _own_length(checkpoint: Checkpoint, flavor: str) -> int:
    names = ("max_position_embeddings", "max_seq_len", "seq_length")  # as most, MPT and BLOOM call it
    own = next(filter(None, (getattr(checkpoint.config, name, None) for name in names)), None)
    own = own or find_flavor(flavor).default_max_length
    if own < SHORTEST:
        raise CheckpointError(
            f"{checkpoint.source.name} has {own} positions; expected at least {SHORTEST}, which `paceline check` needs "
            "to compare a bundle with torch."
        )
    return int(own)


def _length_notes(model: ModelExport, wanted: int | None) -> list[str]:
    """What a user should know who did not ask for this number of positions."""
    fixed = fixed_positions(model.checkpoint.config)
    if wanted is not None or fixed is None or model.max_length < fixed:
        return []
    return [
        f"texts may have {fixed} positions: the model rotates longer ones by other frequencies, from their start on, "
        "and the keys in a cache cannot follow"
    ]


def _logit_ids(
    checkpoint: Checkpoint, end_tokens: tuple[int, ...], wanted: int | None, other: OtherTokenizer | None
) -> NDArray[np.int32] | None:
    """The draft's ids that it keeps its logits for; None for all. Of ids that it cannot propose it needs none."""
    ids: NDArray[np.int32] | None = None
    if wanted and wanted < len(token_texts(checkpoint.tokenizer)):
        ids = useful_ids(checkpoint.tokenizer, end_tokens, wanted)
    if other is not None and other.method == "intersection":
        shared = other.shared_ids[0]
        ids = shared if ids is None or not len(both := np.intersect1d(ids, shared)) else both
    return ids
