"""Export a target model, and a draft model for it, into a bundle."""

from __future__ import annotations

import dataclasses
import errno
import glob
import hashlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import paceline
from paceline.bundle import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    AdapterEntry,
    Bundle,
    FileEntry,
    LogitIdsEntry,
    Manifest,
    ModelEntry,
    QualityEntry,
    SourceEntry,
    TensorSpec,
    TokenizerEntry,
    file_sha256,
)
from paceline.errors import BundleError, CheckpointError, InvalidInputError, PacelineError

from .calibrate.calibrate import Recipe
from .calibrate.layers import NotLayerwiseError
from .calibrate.quality import is_possible, measure
from .calibrate.run import Pass, run_layers
from .calibrate.shelf import Shelf
from .calibrate.texts import calibration_ids, held_out_ids
from .causal_lm import Trace, check_architecture, trace
from .checkpoint import Checkpoint, WeightReader
from .draft_vocab import useful_ids
from .flavors import Flavor, find_flavor
from .other_tokenizer import DEFAULT_METHOD, METHODS, OtherTokenizer
from .pair import check_widths, token_texts, tokenizer_difference
from .parity import SHORTEST
from .passes.data_file import DataFile
from .passes.lm_head import cut_lm_head
from .passes.weights import check_projections, check_shape, store_weights
from .quantize import WeightFormat
from .quantize.blockwise import BLOCK_SIZES
from .quantize.packed import LEFT_OUT_BITS
from .rotation import fixed_positions
from .sampler.build import write_sampler
from .source import Source

__all__ = ["CALIBRATIONS", "ExportReport", "ModelReport", "check_arguments", "export_bundle"]

CALIBRATIONS = ("gptq", "none")
_LEAST_FILE = 1_000_000  # bytes; with less, a large model would be thousands of files
# Tokens that end a text by their names, for checkpoints whose generation settings got lost (GGUF keeps one end token).
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")

_SHELF = "calibrated"  # a folder while a model is written: weights that were quantised, and are not in its graph yet
_MORE_TEMPLATES = "additional_chat_templates"  # as transformers names the folder

_OnProgress = Callable[[str, float], None]


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
    overwrite: bool = False,
    on_progress: _OnProgress | None = None,
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
        calibration: of the target, one of `CALIBRATIONS`; None means `gptq` for int4 where the architecture permits
            it, and `none` otherwise. The inputs of fp8 projections are looked at in any case.
        draft_calibration: of the draft; None means `none`.
        quality: compare the target as stored with the full-precision model on held-out texts. This makes the thread
            pool of ONNX Runtime, which a later `paceline.load` in the same process shares.
        adapter: folder of a LoRA adapter that was trained on the target, which is merged into it.
        draft_adapter: one that was trained on the draft.
        max_file_size: bytes of one file of weights, at least 1,000,000; more files are written where a model has more.
            None means one file for each model, of any size.
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
        _check_ready(ready, draft, flavor, calibration, adapter)
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
        overwrite=overwrite,
    )
    out = Path(out)
    made_for = find_flavor(flavor)
    precisions = {"target": precision, "draft": draft_precision or precision}
    calibrations = {"target": calibration, "draft": draft_calibration or "none"}
    report = on_progress or (lambda stage, done: None)

    report("read configurations and tokenizers", 0.0)
    smaller = Checkpoint.open(draft, draft_adapter) if draft is not None else None
    checkpoints = {
        "target": Checkpoint.of_bundle(target, smaller)
        if isinstance(target, Bundle)
        else Checkpoint.open(target, adapter)
    }
    check_widths(checkpoints["target"])
    if draft_layers is not None:
        smaller = (smaller or checkpoints["target"]).first_layers(draft_layers)
    difference: str | None = None
    if smaller is not None:
        checkpoints["draft"] = smaller
        difference = tokenizer_difference(checkpoints["target"], smaller)
    if draft_method is not None and difference is None:
        raise InvalidInputError(
            f"draft_method={draft_method!r} is for a draft with another tokenizer than the target's, and this one has "
            "the same; leave it out."
        )
    # What is exported; a target that is ready is taken over.
    exported = {which: checkpoint for which, checkpoint in checkpoints.items() if which == "draft" or ready is None}
    for which, checkpoint in exported.items():
        if checkpoint.packing is not None:
            stored = made_for.weight_format(precisions[which])
            checkpoint.packing.check_precision(checkpoint.source.name, precisions[which], stored)
            if calibrations[which] == "gptq":
                raise InvalidInputError(
                    f"{checkpoint.source.name} is quantised already, and its numbers are kept: there is nothing to "
                    "calibrate; leave the calibration out."
                )
    tokenizers = {which: _tokenizer_entry(checkpoint) for which, checkpoint in checkpoints.items()}
    if ready is not None:
        tokenizers["target"] = ready.manifest.tokenizer
    other = None
    if difference is not None:
        both = tokenizers["target"], tokenizers["draft"]
        other = OtherTokenizer.between(
            checkpoints["target"], checkpoints["draft"], both, draft_method or DEFAULT_METHOD
        )
    logit_ids = None
    if "draft" in checkpoints:
        logit_ids = _logit_ids(checkpoints["draft"], tokenizers["draft"].eos_token_ids, draft_vocab, other)
    lengths = {
        which: _max_length(checkpoint, max_length, which, made_for, other) for which, checkpoint in exported.items()
    }

    formats = {
        which: _stored_format(checkpoint, which, made_for, precisions[which]) for which, checkpoint in exported.items()
    }

    checked = {which: _check_weights(checkpoint, lengths[which]) for which, checkpoint in exported.items()}
    weights = {which: count for which, (_, count) in checked.items()}
    _check_room(
        out,
        sum(
            count * _least_bits(checkpoints[which], formats[which]) // 8
            for which, count in weights.items()
            if which == "target" or logit_ids is None  # what a cut head saves is left open
        )
        + sum(entry.size for entry in (_taken_files(ready).values() if ready is not None else ())),
    )
    traces: dict[str, Trace] = {}
    for which, checkpoint in exported.items():  # before what takes long: it tells what cannot be expressed
        report(f"{which}: trace", 0.02 + 0.02 * len(traces))
        made = trace(checkpoint.config, max_length=lengths[which], dtype=formats[which].dtype, flavor=made_for)
        made_for.finish(made.model)
        if checkpoint.packing is None:
            check_projections(made.model, formats[which], block_size, nodes=made_for.weights, attention=made.attention)
        traces[which] = made
    done, whole = 0.06, sum(weights.values())
    entries: dict[str, ModelEntry] = {}
    notes: dict[str, tuple[str, ...]] = {}
    layers_seconds: dict[str, float] = {}
    with _partial_folder(out, overwrite) as folder:
        files: dict[str, FileEntry] = {}
        if ready is not None:
            files, entries["target"] = _take_over(ready, folder), ready.manifest.target
        for which, checkpoint in exported.items():
            share = 0.91 * weights[which] / whole

            def within(stage: str, part: float, which: str = which, done: float = done, share: float = share) -> None:
                report(f"{which}: {stage}", done + share * part)

            passed, found, layers_seconds[which] = _run_layers(
                checkpoint,
                checked[which][0],
                folder,
                made_for,
                formats[which],
                lengths[which],
                block_size,
                calibrations[which],
                quality and which == "target",
                within,
            )
            entries[which], left = _export_model(
                checkpoint,
                checked[which][0],
                traces[which],
                folder,
                which,
                made_for,
                precisions[which],
                formats[which],
                lengths[which],
                block_size,
                logit_ids if which == "draft" else None,
                passed,
                max_file_size,
                within,
            )
            notes[which] = (
                *_length_notes(checkpoint, lengths[which], max_length),
                *found,
                *left,
                *_notes(checkpoint, which),
            )
            shutil.rmtree(folder / _SHELF, ignore_errors=True)
            done += share
        report("write tokenizer, sampler and manifest", 0.97)
        tokenizer = tokenizers["target"]
        if ready is None:
            _write_tokenizer(checkpoints["target"], folder)
        kept = None if logit_ids is None else logit_ids.tolist()
        # The sampler's graphs know one vocabulary.
        draft_width = entries["draft"].vocab_size if "draft" in entries and other is None else None
        draft_tokenizer = other.write(folder) if other is not None else None
        if other is not None:
            notes["draft"] += (other.note,)
        sampler = write_sampler(folder, tokenizer.vocab_size, entries["target"].vocab_size, draft_width, kept)
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for name in names:
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
    return ExportReport(
        path=out,
        seconds=time.perf_counter() - started,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bytes_written=sum(entry.size for entry in files.values()),
        models=tuple(
            ModelReport(
                which,
                checkpoint.source.name,
                entries[which].precision,
                sum(entry.size for name, entry in files.items() if name.startswith(f"{which}/")),
                weights[which],
                entries[which].calibration,
                entries[which].quality,
                notes[which],
                layers_seconds[which],
            )
            for which, checkpoint in exported.items()
        ),
    )


def _check_ready(
    target: Bundle, draft: Source | None, flavor: str, calibration: str | None, adapter: Path | None
) -> None:
    """Refuse what cannot be honoured where the target has been exported already."""
    if draft is None:
        raise InvalidInputError(
            f"{target.root} is a bundle, so its target is exported already: name a draft for it. One that is cut from "
            "the target needs the target's checkpoint."
        )
    if target.manifest.target.flavor != flavor:
        raise InvalidInputError(
            f"{target.root}: its target has the flavour {target.manifest.target.flavor!r}, and {flavor!r} is asked for."
        )
    if calibration is not None:
        raise InvalidInputError(
            f"calibration={calibration!r} is for a target that is exported, and {target.root} is a bundle already; "
            "leave it out."
        )
    if adapter is not None:
        raise InvalidInputError(
            f"adapter={os.fspath(adapter)!r} is for a target that is exported, and {target.root} is a bundle already, "
            "whose weights are stored: name the target's checkpoint."
        )


def _take_over(bundle: Bundle, folder: Path) -> dict[str, FileEntry]:
    """Copy what belongs to a bundle's target into another folder; its files, by their names.

    Links would save the room, but onnx-ir reads no weights from a file with several names.

    Raises:
        BundleError: a file is not the one that the bundle's manifest describes.
    """
    files = _taken_files(bundle)
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
    return files


def _taken_files(bundle: Bundle) -> dict[str, FileEntry]:
    """The files that belong to a bundle's target, by their names."""
    of_draft = {engine.path for engine in bundle.manifest.engines if engine.model == "draft"}
    return {
        name: entry
        for name, entry in bundle.manifest.files.items()
        if not name.startswith(("draft/", "sampler/")) and name not in of_draft
    }


def check_arguments(
    out: str | os.PathLike[str],
    *,
    has_draft: bool,
    flavor: str = "ort",
    precision: str,
    draft_precision: str | None,
    draft_vocab: int | None,
    draft_method: str | None = None,
    draft_layers: int | None = None,
    max_length: int | None,
    block_size: int,
    calibration: str | None = None,
    draft_calibration: str | None = None,
    quality: bool = True,
    draft_adapter: str | os.PathLike[str] | None = None,
    max_file_size: int | None = None,
    overwrite: bool,
) -> None:
    """Check what can be checked without a checkpoint, so that a mistake is said before anything is fetched.

    Raises:
        InvalidInputError: an argument of a wrong type or out of its range, one that cannot be honoured, or `out` exists
            or cannot be made.
    """
    for name, value, kinds in (
        ("out", out, (str, os.PathLike)),
        ("has_draft", has_draft, (bool,)),
        ("flavor", flavor, (str,)),
        ("precision", precision, (str,)),
        ("draft_precision", draft_precision, (str, type(None))),
        ("draft_vocab", draft_vocab, (int, type(None))),
        ("draft_method", draft_method, (str, type(None))),
        ("draft_layers", draft_layers, (int, type(None))),
        ("max_length", max_length, (int, type(None))),
        ("block_size", block_size, (int,)),
        ("calibration", calibration, (str, type(None))),
        ("draft_calibration", draft_calibration, (str, type(None))),
        ("quality", quality, (bool,)),
        ("draft_adapter", draft_adapter, (str, os.PathLike, type(None))),
        ("max_file_size", max_file_size, (int, type(None))),
        ("overwrite", overwrite, (bool,)),
    ):
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InvalidInputError(f"{name} must be of type {expected}, got {value!r:.80}.")
    if draft_adapter is not None and not has_draft:
        raise InvalidInputError(
            f"draft_adapter={os.fspath(draft_adapter)!r} is for a draft model, and there is none"
            + ("; one that is cut from the target has the target's adapter." if draft_layers is not None else ".")
        )
    if draft_layers is not None:
        if draft_layers < 1:
            raise InvalidInputError(f"draft_layers must be at least 1, got {draft_layers}.")
        has_draft = True
    if draft_method is not None:
        if draft_method not in METHODS:
            raise InvalidInputError(f"Unknown draft_method {draft_method!r}: expected one of {', '.join(METHODS)}.")
        if not has_draft:
            raise InvalidInputError(f"draft_method={draft_method!r} is for a draft model, and there is none.")
    made_for = find_flavor(flavor)
    made_for.weight_format(precision)
    if draft_precision is not None:
        made_for.weight_format(draft_precision, "draft_precision")
        if not has_draft:
            raise InvalidInputError(f"draft_precision={draft_precision!r} is for a draft model, and there is none.")
    if draft_vocab is not None:
        if draft_vocab < 0:
            raise InvalidInputError(f"draft_vocab must be a number of ids, or 0 for all, got {draft_vocab}.")
        if not has_draft:
            raise InvalidInputError(f"draft_vocab={draft_vocab} is for a draft model, and there is none.")
    if draft_calibration is not None and not has_draft:
        raise InvalidInputError(f"draft_calibration={draft_calibration!r} is for a draft model, and there is none.")
    if max_file_size is not None and max_file_size < _LEAST_FILE:
        raise InvalidInputError(
            f"max_file_size must be at least {_LEAST_FILE:,} bytes, which is {_LEAST_FILE // 1000**2} MB; got "
            f"{max_file_size:,}."
        )
    for which, chosen, stored in (
        ("calibration", calibration, precision),
        ("draft_calibration", draft_calibration, draft_precision or precision),
    ):
        if chosen is not None and chosen not in CALIBRATIONS:
            raise InvalidInputError(f"Unknown {which} {chosen!r}: expected one of {', '.join(CALIBRATIONS)}.")
        if chosen is not None and made_for.weight_format(stored).float8:
            raise InvalidInputError(
                f"{which}={chosen!r} is for int4 weights; {stored} is always calibrated, in a way of its own: leave "
                "it out."
            )
        if chosen == "gptq" and stored != "int4":
            raise InvalidInputError(
                f"{which}='gptq' is for int4 weights, and these are {stored}, which is nearly lossless without it; "
                "leave it out."
            )
    if block_size not in BLOCK_SIZES:
        raise InvalidInputError(f"Unknown block size {block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}.")
    if max_length is not None and max_length < 2:
        raise InvalidInputError(f"max_length must be at least 2 positions, got {max_length}.")
    _check_out(out, overwrite)


def _check_out(out: str | os.PathLike[str], overwrite: bool) -> None:
    """Check that `out` is free, or may be replaced, and that a folder can be made beside it: by making one."""
    text = os.fspath(out)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidInputError(f"out must be the path of a folder, got {text!r:.80}.")
    out = Path(text)
    if out.is_symlink() and not out.exists():
        raise InvalidInputError(
            f"{out} is a link to {os.readlink(out)}, which does not exist; remove the link, or name the folder itself."
        )
    if os.path.lexists(out):
        if not overwrite:
            raise InvalidInputError(f"{out} exists already; choose another folder, or pass --overwrite to replace it.")
        if not (out / MANIFEST_NAME).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise InvalidInputError(f"{out} is not a bundle, so it is not replaced; choose another folder.")
    real = Path(os.path.realpath(out))
    above = next(folder for folder in (*real.parents, real) if os.path.lexists(folder))
    if not above.is_dir():
        raise InvalidInputError(f"{out} cannot be made: {above} is no folder; choose another place.")
    try:
        trial = above / f".{real.name}.partial-{os.getpid()}"
        trial.mkdir()
        trial.rmdir()
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidInputError(
            f"{out} cannot be made: no folder can be made in {above} ({error.strerror}); choose another place."
        ) from error


def _check_room(out: Path, least: int) -> None:
    """Check that the disk has room for a bundle of at least so many bytes, before hours of work rather than after.

    Raises:
        PacelineError: it has not.
    """
    real = Path(os.path.realpath(out))
    free = shutil.disk_usage(next(folder for folder in real.parents if folder.is_dir())).free
    if free < least:
        raise PacelineError(
            f"The disk is too full for this bundle: it needs more than {_amount(least)} at {real.parent}, where "
            f"{_amount(free)} are free. Free some space, or choose another disk or fewer bits."
        )


def _amount(size: int) -> str:
    """Bytes, in a unit in which they are no 0."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit / 10), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


def _least_bits(checkpoint: Checkpoint, stored: WeightFormat) -> int:
    """The least number of bits that a parameter takes."""
    if stored.bits is None:
        return {"float32": 32}.get(stored.dtype, 16)
    return stored.bits if checkpoint.packing is None else min(stored.bits, checkpoint.packing.bits)


def _max_length(
    checkpoint: Checkpoint, wanted: int | None, which: str, flavor: Flavor, other: OtherTokenizer | None
) -> int:
    """Positions of one model. A draft may have fewer than were asked for: then drafting stops there.

    One with a tokenizer of its own needs more, where its tokens are shorter.
    """
    if which == "draft" and other is not None and wanted is not None:
        wanted *= 2
    names = ("max_position_embeddings", "max_seq_len", "seq_length")  # as most, MPT and BLOOM call it
    own = next(filter(None, (getattr(checkpoint.config, name, None) for name in names)), flavor.default_max_length)
    if own < SHORTEST:
        raise CheckpointError(
            f"{checkpoint.source.name} has {own} positions; expected at least {SHORTEST}, which `paceline check` needs "
            "to compare a bundle with torch."
        )
    fixed = fixed_positions(checkpoint.config) or own
    if wanted is None:
        return int(min(own, flavor.default_max_length, fixed))
    if wanted > own and which == "target":
        raise InvalidInputError(f"max_length={wanted} exceeds the {own} positions that {checkpoint.source.name} has.")
    return int(min(own, wanted, fixed if which == "draft" else wanted))


def _length_notes(checkpoint: Checkpoint, length: int, wanted: int | None) -> list[str]:
    """What a user should know who did not ask for this number of positions."""
    fixed = fixed_positions(checkpoint.config)
    if wanted is not None or fixed is None or length < fixed:
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


def _check_weights(checkpoint: Checkpoint, max_length: int) -> tuple[WeightReader, int]:
    """Check the headers of a checkpoint's files against its model, since the trace takes long.

    Returns a reader of its weights, which takes seconds to make for a GGUF, and the number of parameters.

    Raises:
        CheckpointError: an architecture that is not supported, or a parameter that is missing or of another shape.
    """
    model = check_architecture(checkpoint.config, max_length)
    reader = checkpoint.weights(model)
    for name, parameter in model.named_parameters():
        check_shape(reader, name, tuple(parameter.shape))
    return reader, sum(parameter.numel() for parameter in model.parameters())


def _stored_format(checkpoint: Checkpoint, which: str, flavor: Flavor, precision: str) -> WeightFormat:
    """How the weights of one model of the pair are stored."""
    stored = flavor.weight_format(precision)
    if checkpoint.packing is not None and stored.bits is not None:
        # Of what the checkpoint left unquantised; the rest stays as it is.
        stored = replace(stored, bits=LEFT_OUT_BITS, attention_bits=LEFT_OUT_BITS, head_rows=0)
    if which == "draft":  # its speed counts for more than its text
        stored = replace(stored, tied_bits=stored.bits, attention_bits=stored.bits, head_rows=0)
    return stored


def _run_layers(
    checkpoint: Checkpoint,
    reader: WeightReader,
    folder: Path,
    flavor: Flavor,
    stored: WeightFormat,
    max_length: int,
    block_size: int,
    calibration: str | None,
    quality: bool,
    report: _OnProgress,
) -> tuple[Pass, tuple[str, ...], float]:
    """Calibrate one model and run it in full precision, as far as this is asked for and possible.

    Returns what the pass found, notes on what was left out, and the seconds it took.

    Raises:
        CheckpointError: calibration was asked for, and the architecture does not permit it.
    """
    started = time.perf_counter()
    notes: list[str] = []
    if quality and (reason := is_possible(stored.dtype)) is not None:
        quality = False
        notes.append(f"quality was not measured: {reason}")
    wanted = stored.float8 or calibration == "gptq" or (calibration is None and stored.bits == 4)
    if checkpoint.packing is not None:
        quality = wanted = False  # these numbers are the checkpoint's; there is nothing finer to compare them with
    recipe = Recipe(stored, block_size, flavor.weights.quantize) if wanted and not stored.float8 else None
    passed = Pass({}, {}, None)
    if wanted or quality:
        stage = "calibrate" if wanted else "run in full precision"
        (folder / _SHELF).mkdir()
        about = (checkpoint.tokenizer, checkpoint.config.vocab_size, max_length)
        try:
            passed = run_layers(
                checkpoint,
                reader,
                recipe,
                calibration=calibration_ids(*about) if wanted else None,
                held_out=held_out_ids(*about) if quality else None,
                shelf=Shelf(folder / _SHELF),
                on_progress=lambda share: report(stage, 0.6 * share),
            )
        except NotLayerwiseError as error:
            if calibration == "gptq":
                raise
            if stored.float8:
                raise CheckpointError(f"{error} So the ranges of fp8 cannot be told; export it with int8.") from error
            notes.append(f"weights are rounded to nearest, quality was not measured: {error}")
        else:
            if stored.float8 and not passed.ranges:
                raise CheckpointError(
                    f"{checkpoint.source.name} has no linear layers in its blocks, whose inputs fp8 rounds; export it "
                    "with int8."
                )
            if recipe is not None and not passed.calibrated:
                notes.append("weights are rounded to nearest: its blocks have no linear layers to calibrate")
    return passed, tuple(notes), time.perf_counter() - started


def _export_model(
    checkpoint: Checkpoint,
    reader: WeightReader,
    traced: Trace,
    folder: Path,
    which: str,
    flavor: Flavor,
    precision: str,
    stored: WeightFormat,
    max_length: int,
    block_size: int,
    logit_ids: NDArray[np.int32] | None,
    passed: Pass,
    max_file_size: int | None,
    report: _OnProgress,
) -> tuple[ModelEntry, tuple[str, ...]]:
    """Write one model's graph and weights into the bundle and describe them; with `logit_ids`, logits for these.

    Returns the description, and notes on what is stored otherwise than the precision says.
    """
    packing = checkpoint.packing
    names = sum(1 for _ in traced.model.graph.initializers)
    stored_count = 0

    def on_weight(name: str) -> None:
        nonlocal stored_count
        stored_count += 1
        report("store weights", 0.6 + 0.25 * min(1.0, stored_count / names))

    report("store weights", 0.6)
    path = folder / which / "model.onnx"
    path.parent.mkdir()
    kept = None
    traced.model.producer_name, traced.model.producer_version = "paceline", paceline.__version__
    with DataFile(path.with_name("model.onnx.data"), max_file_size) as data:
        weights = store_weights(
            traced.model,
            reader,
            stored,
            block_size,
            nodes=flavor.weights,
            embedding=traced.embedding,
            attention=traced.attention,
            constants=traced.constants,
            calibrated=passed.calibrated,
            ranges=passed.ranges,
            data=data,
            on_weight=on_weight,
        )
        if logit_ids is not None:
            cut_lm_head(traced.model, logit_ids, embedding=traced.embedding)
            kept = LogitIdsEntry(f"{which}/logit_ids.npy", traced.vocab_size)
            np.save(folder / kept.path, logit_ids, allow_pickle=False)
        flavor.finish_stored(traced.model)
        report("write", 0.85)
        data.take(traced.model)
    try:
        ir.save(traced.model, path)
    except ir.serde.SerdeError as error:  # of weights so small that they lie in the graph itself
        raise _reason(error) from error
    flavor.after_saving(path)
    # The architecture's settings, for `paceline check` and for a reader; the runtime does not need them.
    checkpoint.config.to_json_file(path.parent / "config.json", use_diff=False)
    report("hash the source", 0.9)
    source = checkpoint.source
    entry = ModelEntry(
        path=f"{which}/model.onnx",
        flavor=cast(Literal["ort", "cuda", "trt"], flavor.name),
        architecture=checkpoint.config.model_type,
        precision=cast(Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"], precision),
        block_size=weights.block_size,
        prequantized=packing.method if packing is not None else None,
        num_layers=traced.num_layers,
        num_kv_heads=traced.num_kv_heads,
        head_size=traced.head_size,
        max_length=max_length,
        vocab_size=traced.vocab_size if logit_ids is None else len(logit_ids),
        kv_dtype=cast(Literal["float32", "float16", "bfloat16"], stored.dtype),
        inputs=_specs(traced, traced.model.graph.inputs),
        outputs=_specs(traced, traced.model.graph.outputs),
        source=SourceEntry(
            source.name,
            source.kind,
            source.sha256(),
            adapter=None
            if checkpoint.adapter is None
            else AdapterEntry(checkpoint.adapter.name, checkpoint.adapter.sha256()),
        ),
        logit_ids=kept,
        calibration="gptq" if passed.calibrated else "ranges" if passed.ranges else None,
        mixed_bits=weights.mixed_bits or None,
    )
    if passed.reference is None:
        return entry, weights.notes
    report("measure quality", 0.93)
    return dataclasses.replace(entry, quality=measure(path, entry, passed.reference)), weights.notes


def _notes(checkpoint: Checkpoint, which: str) -> tuple[str, ...]:
    """What to tell of an adapter that was merged, and of chat templates."""
    notes = []
    if (adapter := checkpoint.adapter) is not None:
        notes.append(f"the adapter {adapter.name} was merged into {len(adapter.changes)} weights")
        if checkpoint.has_tied_head and not checkpoint.config.tie_word_embeddings:
            notes.append(
                "its LM head and its embedding, which were one, are stored as two, for the adapter changes one"
            )
    templates = checkpoint.tokenizer.chat_template
    if which == "target" and isinstance(templates, dict) and "default" not in templates:
        notes.append(
            f"none of its chat templates ({', '.join(sorted(templates))}) is named 'default', so that chats have none; "
            f"they lie in {_MORE_TEMPLATES}"
        )
    return tuple(notes)


def _reason(error: BaseException) -> BaseException:
    """What a weight that cannot be stored or written raised: onnx-ir wraps it, several times, and tells the graph."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PacelineError | OSError):
        cause = cause.__cause__
    return cause or error


def _specs(traced: Trace, values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            value.name,
            value.dtype.numpy().name,
            tuple(size if isinstance(size, int) else str(size.value) for size in value.shape),
        )
        for value in values
    )


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Write tokenizer, chat template and generation settings."""
    tokenizer = checkpoint.tokenizer
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    template = tokenizer.chat_template or {}
    for name, text in ({"default": template} if isinstance(template, str) else template).items():
        path = folder / ("chat_template.jinja" if name == "default" else f"{_MORE_TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    settings = json.dumps(dict(checkpoint.generation_config), indent=1)
    (folder / "generation_config.json").write_text(settings + "\n", encoding="utf-8")


def _tokenizer_entry(checkpoint: Checkpoint) -> TokenizerEntry:
    """What the manifest says of a tokenizer.

    Raises:
        CheckpointError: the settings name an end token that the tokenizer does not have.
    """
    tokenizer, texts = checkpoint.tokenizer, token_texts(checkpoint.tokenizer)
    return TokenizerEntry(
        vocab_size=len(texts),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=_end_tokens(checkpoint, texts),
        pad_token_id=tokenizer.pad_token_id,
        special_tokens={
            name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        },
    )


def _end_tokens(checkpoint: Checkpoint, texts: list[str | None]) -> tuple[int, ...]:
    """Every id that ends a text: what the settings say, as transformers takes it; without any, what names tell.

    Raises:
        CheckpointError: the settings name a token that the tokenizer does not have.
    """
    tokenizer, stated = checkpoint.tokenizer, checkpoint.end_tokens
    if stated is not None:
        if beyond := sorted(token_id for token_id in stated if token_id >= len(texts)):
            raise CheckpointError(
                f"{checkpoint.source.name}: a text should end at token {beyond[0]} (eos_token_id), but the tokenizer's "
                f"ids end at {len(texts) - 1}. Correct eos_token_id in generation_config.json."
            )
        return tuple(sorted(stated))
    kept = checkpoint.generation_config.get("eos_token_id")
    ids = {*(kept if isinstance(kept, list) else [kept]), tokenizer.eos_token_id}
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    ids.update(token_id for token_id, text in enumerate(texts) if text in _END_TEXTS and text in special)
    return tuple(sorted(token_id for token_id in ids if token_id is not None and 0 <= token_id < len(texts)))


@contextmanager
def _partial_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and is removed otherwise."""
    out = Path(os.path.realpath(out))  # through a link, to the folder that it stands for
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():  # an export was killed between taking the old bundle away and putting the new one in place
        for old in out.parent.glob(f".{glob.escape(out.name)}.replaced-*"):
            if not _is_running(old.name.rpartition("-")[2]):
                old.rename(out)
                break
    for left in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):  # of exports that were killed
        if not _is_running(left.name.rpartition("-")[2]):
            shutil.rmtree(left, ignore_errors=True)
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        if out.exists():
            if not overwrite:
                raise InvalidInputError(f"{out} appeared while the bundle was being written; it is left as it is.")
            old = out.parent / f".{out.name}.replaced-{os.getpid()}"
            out.rename(old)
            folder.rename(out)
            shutil.rmtree(old)
        else:
            folder.rename(out)
    except OSError as error:
        free = shutil.disk_usage(out.parent).free
        short = error.errno is None and "written" in str(error)  # as numpy says it
        if error.errno == errno.EFBIG or (short and free >= 1 << 20):
            raise PacelineError(
                f"A file of weights is larger than a file may be at {out.parent} (by its file system, such as FAT32, "
                "or by `ulimit -f`). Nothing was kept; export again with --max-file-size, such as 2GB, or elsewhere."
            ) from error
        short_write = error.errno is None and free < 1 << 20
        if error.errno != errno.ENOSPC and not short_write:
            raise
        raise PacelineError(
            f"The disk is full: {_amount(free)} are left at {out.parent}. Nothing was kept; free some space and "
            "export again."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk, so that a bundle's name never stands for half a bundle after a crash."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_running(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
