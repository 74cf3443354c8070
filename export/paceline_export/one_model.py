"""Export one model of a pair: calibrate it, store its weights, write its graph and describe it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

import paceline
from paceline.bundle import AdapterEntry, LogitIdsEntry, ModelEntry, SourceEntry, TensorSpec
from paceline.errors import CheckpointError, InvalidInputError, PacelineError

from .calibrate.calibrate import Recipe
from .calibrate.layers import NotLayerwiseError
from .calibrate.quality import is_possible, measure
from .calibrate.run import Pass, run_layers
from .calibrate.shelf import Shelf
from .calibrate.texts import calibration_ids, held_out_ids
from .causal_lm import Trace, check_architecture, trace
from .checkpoint import Checkpoint
from .flavors import Flavor
from .leftovers import check_left_over
from .passes.data_file import DataFile
from .passes.folded import fold_query_heads
from .passes.lm_head import cut_lm_head
from .passes.weights import check_projections, check_shape, store_weights
from .quantize import WeightFormat
from .quantize.packed import LEFT_OUT_BITS
from .tokenizer_files import MORE_TEMPLATES, moved_tokens
from .weight_reader import WeightReader

__all__ = ["SHELF", "ModelExport", "OnProgress", "Weights", "export_model", "notes_on", "run_model_layers"]

SHELF = "calibrated"  # a folder while a model is written: weights that were quantised, and are not in its graph yet
OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ModelExport:
    """What is asked of one model's export.

    Attributes:
        which: `target` or `draft`, the folder in the bundle.
        checkpoint: where the model comes from.
        flavor: of its graph.
        precision: of its weights, one of the flavour's.
        max_length: number of positions.
        block_size: values that share a scale.
        calibration: one of `quantize.CALIBRATIONS`; None is the best one that is possible.
        quality: whether to compare it with the full-precision model.
        max_file_size: bytes of one file of weights; None for any.
        long_context: whether steps behind long texts read keys and values once for all heads that share them.
        logit_ids: int32, ids that logits are kept for; None for all.

    Raises:
        InvalidInputError: a precision or calibration that would quantise a checkpoint's own few bits anew.
    """

    which: Literal["target", "draft"]
    checkpoint: Checkpoint
    flavor: Flavor
    precision: str
    max_length: int
    block_size: int
    calibration: str | None
    quality: bool
    max_file_size: int | None
    long_context: bool = False
    logit_ids: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if (packing := self.checkpoint.packing) is None:
            return
        name = self.checkpoint.source.name
        packing.check_precision(name, self.precision, self.flavor.weight_format(self.precision))
        if self.calibration == "gptq":
            raise InvalidInputError(
                f"{name} is quantised already, and its numbers are kept: there is nothing to calibrate; leave the "
                "calibration out."
            )

    @property
    def stored(self) -> WeightFormat:
        """How the weights are stored."""
        stored = self.flavor.weight_format(self.precision)
        if self.checkpoint.packing is not None and stored.bits is not None:
            # Of what the checkpoint left unquantised; the rest stays as it is.
            stored = replace(stored, bits=LEFT_OUT_BITS, attention_bits=LEFT_OUT_BITS, head_rows=0)
        if self.which == "draft":  # its speed counts for more than its text
            stored = replace(stored, tied_bits=stored.bits, attention_bits=stored.bits, head_rows=0)
        return stored

    @property
    def least_bits(self) -> int:
        """The least number of bits that a parameter takes."""
        stored, packing = self.stored, self.checkpoint.packing
        if stored.bits is None:
            return {"float32": 32}.get(stored.dtype, 16)
        return stored.bits if packing is None else min(stored.bits, packing.bits)

    def check_weights(self) -> Weights:
        """Check the headers of a checkpoint's files against its model, since the trace takes long.

        Raises:
            CheckpointError: an architecture that is not supported, a parameter that is missing or of another shape, or
                a tensor without which the model would be another one.
        """
        model = check_architecture(self.checkpoint.config, self.max_length)
        reader = self.checkpoint.weights(model)  # it takes seconds to make for a GGUF
        for name, parameter in model.named_parameters():
            check_shape(reader, name, tuple(parameter.shape))
        source = self.checkpoint.source.name
        notes = check_left_over(source, reader.left_over(), model, cut=self.checkpoint.cut)
        return Weights(reader, sum(parameter.numel() for parameter in model.parameters()), notes)

    def trace(self) -> Trace:
        """Its graph, without weights; it tells what cannot be expressed.

        Raises:
            CheckpointError: with what that is.
        """
        made = trace(self.checkpoint.config, max_length=self.max_length, dtype=self.stored.dtype, flavor=self.flavor)
        self.flavor.finish(made.model)
        folded = self.long_context and fold_query_heads(made.model) > 0
        if self.long_context and not folded and self.which == "target":
            raise CheckpointError(
                f"{self.checkpoint.source.name}: long_context asks for heads that share keys and values, rotate, and "
                "see the whole text, and no layer has such; leave it out."
            )
        if self.checkpoint.packing is None:
            nodes = self.flavor.weights
            check_projections(made.model, self.stored, self.block_size, nodes=nodes, attention=made.attention)
        return replace(made, folded=folded)


@dataclass(frozen=True, slots=True)
class Weights:
    """A checkpoint's weights, checked: their reader, the number of parameters, and notes on what is left out."""

    reader: WeightReader
    count: int
    notes: tuple[str, ...]


def run_model_layers(
    asked: ModelExport, reader: WeightReader, folder: Path, report: OnProgress
) -> tuple[Pass, tuple[str, ...], float]:
    """Calibrate one model and run it in full precision, as far as this is asked for and possible.

    Returns what the pass found, notes on what was left out, and the seconds it took.

    Raises:
        CheckpointError: calibration was asked for, and the architecture does not permit it.
    """
    checkpoint, stored, quality, calibration = asked.checkpoint, asked.stored, asked.quality, asked.calibration
    started = time.perf_counter()
    notes: list[str] = []
    if quality and (reason := is_possible(stored.dtype)) is not None:
        quality = False
        notes.append(f"quality was not measured: {reason}")
    wanted = stored.float8 or calibration == "gptq" or (calibration is None and stored.bits == 4)
    if checkpoint.packing is not None:
        quality = wanted = False  # these numbers are the checkpoint's; there is nothing finer to compare them with
    recipe = Recipe(stored, asked.block_size, asked.flavor.weights.quantize) if wanted and not stored.float8 else None
    passed = Pass({}, {}, None)
    if wanted or quality:
        stage = "calibrate" if wanted else "run in full precision"
        (folder / SHELF).mkdir()
        about = (checkpoint.tokenizer, checkpoint.config.vocab_size, asked.max_length)
        try:
            passed = run_layers(
                checkpoint,
                reader,
                recipe,
                calibration=calibration_ids(*about) if wanted else None,
                held_out=held_out_ids(*about) if quality else None,
                shelf=Shelf(folder / SHELF),
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


def export_model(
    asked: ModelExport, reader: WeightReader, traced: Trace, passed: Pass, folder: Path, report: OnProgress
) -> tuple[ModelEntry, tuple[str, ...]]:
    """Write one model's graph and weights into the bundle's folder and describe them.

    Returns the description, and notes on what is stored otherwise than the precision says.
    """
    checkpoint, which, flavor, logit_ids = asked.checkpoint, asked.which, asked.flavor, asked.logit_ids
    packing, stored = checkpoint.packing, asked.stored
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
    with DataFile(path.with_name("model.onnx.data"), asked.max_file_size) as data:
        weights = store_weights(
            traced.model,
            reader,
            stored,
            asked.block_size,
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
        precision=cast(Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"], asked.precision),
        block_size=weights.block_size,
        prequantized=packing.method if packing is not None else None,
        num_layers=traced.num_layers,
        num_kv_heads=traced.num_kv_heads,
        head_size=traced.head_size,
        max_length=asked.max_length,
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
        long_context=traced.folded,
    )
    if passed.reference is None:
        return entry, weights.notes
    report("measure quality", 0.93)
    return replace(entry, quality=measure(path, entry, passed.reference)), weights.notes


def notes_on(asked: ModelExport) -> tuple[str, ...]:
    """What to tell of an adapter that was merged, of tokens, and of chat templates."""
    checkpoint, notes = asked.checkpoint, []
    if (adapter := checkpoint.adapter) is not None:
        notes.append(f"the adapter {adapter.name} was merged into {len(adapter.changes)} weights")
        if checkpoint.has_tied_head and not checkpoint.config.tie_word_embeddings:
            notes.append(
                "its LM head and its embedding, which were one, are stored as two, for the adapter changes one"
            )
    if moved := moved_tokens(checkpoint):
        notes.append(
            f"{len(moved)} added tokens have other ids than tokenizer.json says, since those are taken or too high: "
            f"{', '.join(moved[:5])}{', …' if len(moved) > 5 else ''}"
        )
    templates = checkpoint.tokenizer.chat_template
    if asked.which == "target" and isinstance(templates, dict) and "default" not in templates:
        notes.append(
            f"none of its chat templates ({', '.join(sorted(templates))}) is named 'default', so that chats have none; "
            f"they lie in {MORE_TEMPLATES}"
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
