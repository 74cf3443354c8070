"""Calibrate a model's projections layer by layer, in the presence of the errors of the layers before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..quantize.blockwise import Blockwise, dequantize, quantize
from ..quantize.gptq import Inputs, gptq
from .layers import Layer

__all__ = ["LayerCalibration", "Recipe"]

_SEQUENCES = 8  # that run through a layer together
# Inputs are told apart by their second moments in groups of at most so many columns: with a few thousand positions of
# text, moments between more columns are noise, and the largest projections take most of the time.
_GROUP = 2048


@dataclass(frozen=True, slots=True)
class Recipe:
    """How projections are quantised.

    Attributes:
        bits: of a projection by its name in the layer.
        block_size: columns that share a scale.
        symmetric: whether blocks have no zero point.
        damping: see `gptq`.
        correction: see `gptq`.
    """

    bits: Callable[[torch.nn.Module, str], int]
    block_size: int
    symmetric: bool = True
    damping: float = 0.5
    correction: float = 0.5
    group: int = _GROUP


class _Reached(Exception):  # noqa: N818  (no error: it ends a run early)
    """The projection whose inputs are wanted was reached."""


@dataclass(slots=True)
class LayerCalibration:
    """Quantises layer after layer, and carries the text through them.

    Args:
        recipe: how.
        hidden: float32 `[sequences, positions, width]`: what the first layer gets.
    """

    recipe: Recipe
    hidden: torch.Tensor
    full: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.full = self.hidden.clone()

    def run(self, layer: Layer) -> dict[str, Blockwise]:
        """Quantise the linear layers of one layer; by their names in the checkpoint."""
        pieces = [slice(i, i + _SEQUENCES) for i in range(0, len(self.hidden), _SEQUENCES)]
        groups = _groups(layer, self.full[:1])
        first = {names[0] for names in groups}
        wide = {name for name, linear in layer.linears.items() if self.recipe.bits(layer.module, name) == 8}
        # In full precision: what each group of projections gets to see there.
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in layer.linears}
        weights = {name: linear_weight(layer, name) for name in layer.linears}
        half = {name: weight.to(_fast()) for name, weight in weights.items()}

        def in_full(name: str, x: torch.Tensor) -> torch.Tensor:
            if name in first and name not in wide:
                seen[name].append(x.to(_fast()))
            return _product(x, half[name], layer.weights.get(f"{name}.bias"))

        if self.recipe.correction:
            for piece in pieces:
                self.full[piece] = layer(self.full[piece], in_full)
        result: dict[str, Blockwise] = {}
        memo: dict[tuple[int, str], torch.Tensor] = {}
        for names in groups:
            if wide.issuperset(names):
                for name in names:
                    result[name] = quantize(
                        weights[name], bits=8, block_size=self.recipe.block_size, symmetric=True
                    )
                    half[name] = torch.from_numpy(dequantize(result[name])).to(_fast())
        for names in [*(names for names in groups if not wide.issuperset(names)), ()]:
            inputs: list[torch.Tensor] = []
            for number, piece in enumerate(pieces):

                def quantised(
                    name: str,
                    x: torch.Tensor,
                    number: int = number,
                    names: tuple[str, ...] = names,
                    inputs: list[torch.Tensor] = inputs,
                ) -> torch.Tensor:
                    if name in names:
                        inputs.append(x.to(_fast()))
                        raise _Reached
                    key = (number, name)
                    if key not in memo:
                        memo[key] = _product(x, half[name], layer.weights.get(f"{name}.bias")).to(_fast())
                    return memo[key].to(torch.float32)

                try:
                    output = layer(self.hidden[piece], quantised)
                except _Reached:
                    continue
                self.hidden[piece] = output
            if not names:
                break
            moments = _moments(inputs, seen[names[0]], self.recipe)
            for name in names:
                result[name] = gptq(
                    weights[name],
                    moments,
                    bits=4,
                    block_size=self.recipe.block_size,
                    symmetric=self.recipe.symmetric,
                    damping=self.recipe.damping,
                    correction=self.recipe.correction,
                )
                half[name] = torch.from_numpy(dequantize(result[name])).to(_fast())
            for number, _ in enumerate(pieces):
                x = inputs[number]
                for name in names:
                    memo[number, name] = _product(x, half[name], layer.weights.get(f"{name}.bias")).to(_fast())
            seen[names[0]].clear()
        return {f"{layer.prefix}{name}.weight": weight for name, weight in result.items()}


def linear_weight(layer: Layer, name: str) -> torch.Tensor:
    """The float32 `[rows, columns]` of a linear layer."""
    return layer.weights[f"{name}.weight"]


def _groups(layer: Layer, hidden: torch.Tensor) -> list[tuple[str, ...]]:
    """Linear layers in the order of their calls, those with the same input together."""
    calls: list[tuple[str, torch.Tensor]] = []

    def note(name: str, x: torch.Tensor) -> torch.Tensor:
        calls.append((name, x))
        weight = linear_weight(layer, name)
        return _product(x, weight, layer.weights.get(f"{name}.bias"))

    layer(hidden, note)
    groups: list[tuple[torch.Tensor, list[str]]] = []
    for name, x in calls:
        if groups and groups[-1][0] is x:
            groups[-1][1].append(name)
        else:
            groups.append((x, [name]))
    return [tuple(names) for _, names in groups]


def _moments(inputs: list[torch.Tensor], full: list[torch.Tensor], recipe: Recipe) -> Inputs:
    columns = inputs[0].shape[-1]
    block = max(128, recipe.block_size)
    count = -(-columns // recipe.group)
    size = -(-columns // (count * block)) * block
    if columns % size:  # no even split
        size = next((s for s in range(size, columns, block) if columns % s == 0), columns)
    count = columns // size
    hessian = torch.zeros(count, size, size)
    cross = torch.zeros(count, size, size) if full and recipe.correction else None
    for number, x in enumerate(inputs):
        x = x.reshape(-1, columns)
        difference = (full[number].reshape(-1, columns).float() - x.float()).to(x.dtype) if cross is not None else None
        for i in range(count):
            part = x[:, i * size : (i + 1) * size]
            hessian[i] += part.T @ part
            if cross is not None and difference is not None:
                cross[i] += difference[:, i * size : (i + 1) * size].T @ part
    return Inputs(hessian, cross)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x weightᵀ + bias` in float32, multiplied in the dtype of the weight."""
    result = (x.to(weight.dtype) @ weight.T).to(torch.float32)
    return result if bias is None else result + bias


def _fast() -> torch.dtype:
    """The dtype of large products: bfloat16 where the processor multiplies it, which halves time and memory."""
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
