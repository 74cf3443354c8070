"""One pass over a checkpoint's layers: it calibrates projections, and notes what the full-precision model says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import CheckpointError
from paceline_export.checkpoint import Checkpoint
from paceline_export.quantize.blockwise import Blockwise
from paceline_export.weight_reader import WeightReader

from .calibrate import LayerCalibration, Recipe
from .layers import LayerwiseModel, NotLayerwiseError
from .quality import FullPrecision
from .ranges import LayerRanges

__all__ = ["Pass", "run_layers"]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass found.

    Attributes:
        calibrated: projections by their names in the checkpoint; empty without a recipe.
        ranges: largest magnitudes of the inputs of projections, by the same names; empty with a recipe, or without a
            text to calibrate on.
        reference: the full-precision model on held-out texts, if there are any.
    """

    calibrated: MutableMapping[str, Blockwise]
    ranges: dict[str, float]
    reference: FullPrecision | None


def run_layers(
    checkpoint: Checkpoint,
    reader: WeightReader,
    recipe: Recipe | None,
    *,
    calibration: torch.Tensor | None = None,
    held_out: Mapping[str, Sequence[torch.Tensor]] | None = None,
    shelf: MutableMapping[str, Blockwise] | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Pass:
    """Carry texts through the layers, one layer's weights at a time.

    Args:
        checkpoint: whose configuration to use.
        reader: of its weights.
        recipe: how to quantise projections; None for not at all.
        calibration: ids of the text to calibrate on, int64 `[sequences, positions]`; needed with a recipe. Without one
            it shows how large the inputs of projections get.
        held_out: ids of sequences, each int64 `[positions]`, by the names of texts to run in full precision.
        shelf: takes the quantised projections; None is a dict, which holds them in memory.
        on_progress: called with the share of the layers that is behind.

    Raises:
        NotLayerwiseError: the architecture cannot be run layer by layer, with the reason.
        CheckpointError: a weight that is missing, or holds values that are no numbers.
    """
    report = on_progress or (lambda share: None)
    try:
        model = LayerwiseModel(checkpoint.config, reader)
        texts = [ids[None] for sequences in (held_out or {}).values() for ids in sequences]
        hidden = model.embed(*texts, *([calibration] if calibration is not None else []))
        quantiser = LayerCalibration(recipe, hidden.pop()) if recipe is not None and calibration is not None else None
        ranger = LayerRanges(hidden.pop()) if recipe is None and calibration is not None else None
        calibrated: MutableMapping[str, Blockwise] = {} if shelf is None else shelf
        ranges: dict[str, float] = {}
        for index in range(len(model)):
            report(index / len(model))
            layer = model.layer(index)
            hidden = [layer(given) for given in hidden]
            if quantiser is not None:
                calibrated.update(quantiser.run(layer))
            if ranger is not None:
                ranges |= ranger.run(layer)
    except CheckpointError:
        raise
    except Exception as error:  # code of transformers, called in a way that an architecture need not stand
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
        raise NotLayerwiseError(
            f"{checkpoint.source.name}: the layers of {checkpoint.config.model_type!r} cannot be run one at a time "
            f"({reason})."
        ) from error
    report(1.0)
    if not held_out:
        return Pass(calibrated, ranges, None)
    rest = iter(hidden)
    found = {name: [next(rest)[0] for _ in sequences] for name, sequences in held_out.items()}
    return Pass(calibrated, ranges, FullPrecision(model, held_out, found))
