"""One pass over a checkpoint's layers that calibrates its projections and notes what the full-precision model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.errors import CheckpointError

from ..checkpoint import Checkpoint, WeightReader
from ..quantize.blockwise import Blockwise
from .calibrate import LayerCalibration, Recipe
from .layers import LayerwiseModel
from .quality import FullPrecision
from .texts import calibration_ids, held_out_ids

__all__ = ["Pass", "is_wide", "run_layers"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass found.

    Attributes:
        calibrated: projections by their names in the checkpoint; empty without calibration.
        reference: the full-precision model on held-out texts, if that was asked for.
    """

    calibrated: dict[str, Blockwise]
    reference: FullPrecision | None


def is_wide(layer: torch.nn.Module, name: str) -> bool:
    """Whether a projection gets 8 bits where the others get 4: those of attention, which hurt most for their size."""
    parent = name.rpartition(".")[0]
    return bool(parent) and "Attention" in type(layer.get_submodule(parent)).__name__


def run_layers(
    checkpoint: Checkpoint,
    reader: WeightReader,
    recipe: Recipe | None,
    *,
    quality: bool,
    on_progress: Callable[[float], None],
) -> Pass:
    """Carry texts through the layers, one layer's weights at a time.

    Args:
        checkpoint: whose configuration and tokenizer to use.
        reader: of its weights.
        recipe: how to quantise projections; None for not at all.
        quality: whether to carry the held-out texts through, too, in full precision.
        on_progress: called with the share of the layers that is behind.

    Raises:
        CheckpointError: the architecture cannot be run layer by layer, with the reason.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    try:
        model = LayerwiseModel(config, reader)
        longest = int(getattr(config, "max_position_embeddings", None) or 256)
        held_out = held_out_ids(tokenizer, config.vocab_size, longest) if quality else {}
        texts = [*held_out.values()]
        if recipe is not None:
            texts.append(calibration_ids(tokenizer, config.vocab_size, longest))
        hidden = model.embed(*texts)
        calibration = LayerCalibration(recipe, hidden.pop()) if recipe is not None else None
        reference = dict(zip(held_out, hidden, strict=True))
        calibrated: dict[str, Blockwise] = {}
        for index in range(len(model)):
            on_progress(index / len(model))
            layer = model.layer(index)
            for name, given in reference.items():
                reference[name] = torch.cat([layer(sequence[None]) for sequence in given])
            if calibration is not None:
                calibrated |= calibration.run(layer)
    except CheckpointError:
        raise
    except Exception as error:  # code of transformers, called in a way that an architecture need not stand
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        raise CheckpointError(
            f"{checkpoint.source.name}: the layers of {config.model_type!r} cannot be run one at a time ({reason})."
        ) from error
    on_progress(1.0)
    return Pass(calibrated, FullPrecision(model, held_out, reference) if quality else None)
