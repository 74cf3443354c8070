"""What reads a checkpoint's weights, whatever holds them."""

from __future__ import annotations

from typing import Protocol

import torch

from .quantize.packed import PackedWeight

__all__ = ["WeightReader"]


class WeightReader(Protocol):
    """Reads weights by the name of the model's parameter."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter, without reading it; raises CheckpointError where there is none."""

    def read(self, name: str) -> torch.Tensor:
        """The parameter as a float32 tensor of its own."""

    def packed(self, name: str) -> PackedWeight | None:
        """The parameter in few bits, where the checkpoint holds it quantised in blocks; None elsewhere."""

    def left_over(self) -> dict[str, str]:
        """Stored tensors that no parameter is made of, with the model's names for them, but what is surely harmless."""
