"""Calibrate a model's projections layer by layer, in the presence of the errors of the layers before."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline_export.causal_lm import projects_for_attention
from paceline_export.quantize import WeightFormat
from paceline_export.quantize.blockwise import Blockwise, dequantize
from paceline_export.quantize.gptq import gptq

from .layers import Layer

__all__ = ["LayerCalibration", "Recipe"]

_SEQUENCES = 8  # that run through a layer together


@dataclass(frozen=True, slots=True)
class Recipe:
    """How projections are quantised.

    Attributes:
        weight_format: what they are stored as. Those with 8 bits are rounded to nearest: there is nothing to gain.
        block_size: columns that share a scale.
        rounded: rounds the others; the flavour's `WeightNodes.quantize`.
        damping: see `gptq`. With the usual 0.01, a few thousand positions of text overfit: on other text the model is
            worse than rounded to nearest. 2 was better than 0.5 on every text that was measured.
        group: columns between which second moments are taken, at most. Between more of them they are noise with so
            little text, and the largest projections would take most of the time.
    """

    weight_format: WeightFormat
    block_size: int
    rounded: Callable[..., Blockwise]
    damping: float = 2.0
    group: int = 2048

    def is_wide(self, layer: Layer, name: str) -> bool:
        """Whether a linear layer of a decoder layer is stored in 8 bits."""
        return self.weight_format.projection_bits(attention=projects_for_attention(layer.module, name)) == 8


class _Reached(Exception):  # noqa: N818  (no error: it ends a run early)
    """The projection whose inputs are wanted was reached."""


@dataclass(slots=True)
class LayerCalibration:
    """Quantises layer after layer, and carries the text through them as quantised.

    Args:
        recipe: how.
        hidden: float32 `[sequences, positions, width]`: what the first layer gets.
    """

    recipe: Recipe
    hidden: torch.Tensor

    def run(self, layer: Layer) -> dict[str, Blockwise]:
        """Quantise the linear layers of one layer; by their names in the checkpoint."""
        pieces = range(0, len(self.hidden), _SEQUENCES)
        weights = _Weights(layer)
        groups = _groups(layer, weights, self.hidden[:1])
        wide = {name for name in layer.linears if self.recipe.is_wide(layer, name)}
        narrow = [names for names in groups if not wide.issuperset(names)]
        result = {
            name: self.recipe.rounded(
                name, weights.float(name), bits=8, block_size=self.recipe.block_size, symmetric=True
            )
            for name in (name for names in groups for name in names)
            if name in wide
        }
        for name, stored in result.items():
            weights.replace(name, stored)
        # Products whose inputs will not change any more, so that each is computed once.
        done: dict[tuple[int, str], torch.Tensor] = {}
        for names in narrow:
            inputs = [self._inputs(layer, weights, done, piece, names) for piece in pieces]
            hessian = _second_moments(inputs, self.recipe)
            for name in names:
                if name not in wide:
                    result[name] = gptq(
                        weights.float(name),
                        hessian,
                        bits=4,
                        block_size=self.recipe.block_size,
                        symmetric=self.recipe.weight_format.symmetric,
                        damping=self.recipe.damping,
                    )
                    weights.replace(name, result[name])
                for piece, x in zip(pieces, inputs, strict=True):
                    done[piece, name] = weights.product(name, x).to(x.dtype)
        for piece in pieces:
            part = slice(piece, piece + _SEQUENCES)
            self.hidden[part] = layer(self.hidden[part], _remembering(weights, done, piece))
        return {f"{layer.prefix}{name}.weight": weight for name, weight in result.items()}

    def _inputs(
        self,
        layer: Layer,
        weights: _Weights,
        done: dict[tuple[int, str], torch.Tensor],
        piece: int,
        names: Sequence[str],
    ) -> torch.Tensor:
        """What these projections get to see behind those that are quantised already: `[…, columns]`."""
        found: list[torch.Tensor] = []
        remembered = _remembering(weights, done, piece)

        def product(name: str, x: torch.Tensor) -> torch.Tensor:
            if name in names:
                found.append(x.to(weights.dtype))
                raise _Reached
            return remembered(name, x)

        with contextlib.suppress(_Reached):
            layer(self.hidden[piece : piece + _SEQUENCES], product)
        return found[0]


class _Weights:
    """A layer's linear weights in the dtype that the processor multiplies fastest, as they are at the moment."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        # bfloat16 halves time and memory where the processor multiplies it.
        self.dtype = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        self._now = {name: self.float(name).to(self.dtype) for name in layer.linears}

    def float(self, name: str) -> torch.Tensor:
        """The original, float32 `[rows, columns]`."""
        return self.layer.weights[f"{name}.weight"]

    def replace(self, name: str, weight: Blockwise) -> None:
        """From now on, multiply by what a quantised weight stands for."""
        self._now[name] = torch.from_numpy(dequantize(weight)).to(self.dtype)

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What the linear layer gives, float32 `[…, rows]`."""
        result = (x.to(self.dtype) @ self._now[name].T).to(torch.float32)
        bias = self.layer.weights.get(f"{name}.bias")
        return result if bias is None else result + bias


def _remembering(
    weights: _Weights, done: dict[tuple[int, str], torch.Tensor], piece: int
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """A product that is computed at most once for each piece of the text."""

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        if (piece, name) not in done:
            done[piece, name] = weights.product(name, x).to(weights.dtype)
        return done[piece, name].to(torch.float32)

    return product


def _groups(layer: Layer, weights: _Weights, hidden: torch.Tensor) -> list[list[str]]:
    """Linear layers in the order of their calls, those with the same input together; without any called twice."""
    calls: list[tuple[str, torch.Tensor]] = []

    def note(name: str, x: torch.Tensor) -> torch.Tensor:
        calls.append((name, x))
        return weights.product(name, x)

    layer(hidden, note)
    counts = Counter(name for name, _ in calls)
    groups: list[tuple[torch.Tensor, list[str]]] = []
    for name, x in calls:
        if counts[name] > 1:
            continue
        if groups and groups[-1][0] is x:
            groups[-1][1].append(name)
        else:
            groups.append((x, [name]))
    return [names for _, names in groups]


def _second_moments(inputs: Sequence[torch.Tensor], recipe: Recipe) -> torch.Tensor:
    """`X Xᵀ` of inputs `[…, columns]`, float32 `[groups, size, size]`, in groups of columns."""
    columns = inputs[0].shape[-1]
    count = _even_groups(columns, recipe)
    size = columns // count
    hessian = torch.zeros(count, size, size)
    for given in inputs:
        x = given.reshape(-1, count, size)
        for i in range(count):
            hessian[i] += x[:, i].T @ x[:, i]
    return hessian


def _even_groups(columns: int, recipe: Recipe) -> int:
    """The least number of groups of whole blocks with at most `recipe.group` columns each; 1 where there is none."""
    for count in range(-(-columns // recipe.group), columns // recipe.block_size + 1):
        if columns % (count * recipe.block_size) == 0:
            return count
    return 1
