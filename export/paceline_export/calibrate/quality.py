"""What the stored weights cost: the shipped graph in ONNX Runtime against the full-precision model in torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.bundle import ModelEntry, QualityEntry, TextQuality
from paceline.errors import InstallationError
from paceline.ort_session import import_onnxruntime
from paceline_export.cpu import open_on_cpu
from paceline_export.parity import log_softmax

from .layers import LayerwiseModel

__all__ = ["FullPrecision", "Scores", "measure"]

# The first positions of a sequence are left out: with so little before them, all is open.
_SKIPPED = 8


@dataclass(frozen=True, slots=True)
class FullPrecision:
    """What the full-precision model makes of texts.

    Attributes:
        model: gives logits.
        ids: of each text's sequences, int64 `[positions]`, by the texts' names.
        hidden: what its last layer gave for each, float32 `[positions, width]`.
    """

    model: LayerwiseModel
    ids: Mapping[str, Sequence[torch.Tensor]]
    hidden: Mapping[str, Sequence[torch.Tensor]]


class Scores:
    """Sums over the positions of a text."""

    def __init__(self) -> None:
        self.positions = self.agreeing = self.predicted = 0
        self.kl = self.loss = self.full_loss = 0.0

    def add(self, ids: NDArray[np.int64], full: NDArray[np.float32], shipped: NDArray[np.float32]) -> None:
        """Add a sequence: ids `[positions]` and both models' logits `[positions, vocab]`."""
        for i in range(_SKIPPED if len(ids) > 2 * _SKIPPED else 0, len(ids)):
            log_p, log_q = (log_softmax(logits[i].astype(np.float64)) for logits in (full, shipped))
            self.positions += 1
            self.kl += float(np.exp(log_p) @ (log_p - log_q))
            self.agreeing += int(full[i].argmax() == shipped[i].argmax())
            if i + 1 < len(ids):
                self.predicted += 1
                self.loss -= float(log_q[ids[i + 1]])
                self.full_loss -= float(log_p[ids[i + 1]])

    def result(self) -> TextQuality:
        """The means."""
        predicted = max(self.predicted, 1)
        return TextQuality(
            positions=self.positions,
            kl=self.kl / self.positions,
            argmax_agreement=self.agreeing / self.positions,
            perplexity=math.exp(min(self.loss / predicted, 700.0)),
            full_perplexity=math.exp(min(self.full_loss / predicted, 700.0)),
        )


def measure(graph: Path, entry: ModelEntry, reference: FullPrecision) -> QualityEntry:
    """Compare an exported graph with the model that it was exported from, arithmetic included.

    It runs on the thread pool that all models of a process share, and makes it if need be.

    Args:
        graph: its file.
        entry: what the manifest says of it.
        reference: the full-precision model on texts named `prompts` and `code`.

    Raises:
        InstallationError: ONNX Runtime is missing.
    """
    model = open_on_cpu(graph, entry, max(len(ids) for text in reference.ids.values() for ids in text))
    found = {}
    for name, ids in reference.ids.items():
        scores = Scores()
        for sequence, full in zip(ids, reference.model.logits(reference.hidden[name]), strict=True):
            cache = model.new_cache(len(sequence))
            shipped = model.forward(sequence.tolist(), cache, len(sequence))
            scores.add(sequence.numpy(), full.numpy(), shipped)
        found[name] = scores.result()
    return QualityEntry(**found)


def is_possible(dtype: str) -> str | None:
    """Why quality cannot be measured here for activations of this dtype, or None."""
    if dtype == "bfloat16":
        return "ONNX Runtime does not run bfloat16 on a CPU"
    try:
        import_onnxruntime()
    except InstallationError as error:
        return str(error)
    return None
