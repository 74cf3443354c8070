"""How large the inputs of a model's projections get, so that they can be rounded to few bits by a fixed scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layers import Layer

__all__ = ["LayerRanges"]

_SEQUENCES = 8  # that run through a layer together


@dataclass(slots=True)
class LayerRanges:
    """Looks at layer after layer in full precision, and carries the text through them.

    Args:
        hidden: float32 `[sequences, positions, width]`: what the first layer gets.
    """

    hidden: torch.Tensor

    def run(self, layer: Layer) -> dict[str, float]:
        """The largest magnitude among the inputs of each linear layer, by their weights' names in the checkpoint."""
        found: dict[str, float] = {}

        def note(name: str, x: torch.Tensor) -> torch.Tensor:
            largest = float(x.abs().max())
            found[name] = max(largest, found.get(name, 0.0))
            return torch.nn.functional.linear(x, layer.weights[f"{name}.weight"], layer.weights.get(f"{name}.bias"))

        for piece in range(0, len(self.hidden), _SEQUENCES):
            part = slice(piece, piece + _SEQUENCES)
            self.hidden[part] = layer(self.hidden[part], note)
        return {f"{layer.prefix}{name}.weight": largest for name, largest in found.items()}
