"""What a graph flavour consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
import torch

from paceline.errors import InvalidInputError
from paceline_export.attention import GraphState
from paceline_export.quantize import WeightFormat
from paceline_export.quantize.blockwise import Blockwise

__all__ = ["Flavor", "GraphInput", "WeightNodes"]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input that a flavour's graphs have besides token ids and caches.

    Attributes:
        name: in the graph, and the field of the flavour's state.
        example: what to trace with.
        dims: names of its dynamic dimensions, by axis.
    """

    name: str
    example: torch.Tensor
    dims: Mapping[int, str]


class WeightNodes(Protocol):
    """How a flavour quantises weights and reads quantised ones.

    The nodes of a chain are in order; the last one's only output is the result.
    """

    def check(self, name: str, columns: int, *, bits: int, block_size: int) -> None:
        """Raises a CheckpointError where no projection of so many columns can be quantised."""

    def quantize(self, name: str, weight: torch.Tensor, *, bits: int, block_size: int, symmetric: bool) -> Blockwise:
        """Quantise a projection `[rows, columns]`; raises a CheckpointError where its shape does not allow it."""

    def quantize_table(self, weight: torch.Tensor, *, bits: int) -> Blockwise | None:
        """Quantise the table `[rows, columns]` that ids are looked up in; None where its shape does not allow it."""

    def refusal(self, weight: Blockwise) -> str | None:
        """Why a weight that was quantised elsewhere cannot be held as it is, or None."""

    def product(self, model: ir.Model, x: ir.Value, name: str, weight: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """`x [batch, rows, columns]` times the transposed weight."""

    def lookup(self, model: ir.Model, ids: ir.Value, name: str, table: Blockwise, dtype: ir.DataType) -> list[ir.Node]:
        """Rows of a table of its own."""

    def tied_lookup(
        self, model: ir.Model, ids: ir.Value, name: str, head: Blockwise, dtype: ir.DataType
    ) -> list[ir.Node]:
        """Rows of the table that `product` multiplies by under the same name."""


@dataclass(frozen=True, slots=True, eq=False)
class Flavor:
    """A kind of graph: what runs it, its operators and inputs, and how its weights are stored.

    Attributes:
        name: as the manifest and `--flavor` say it.
        opset: of the standard operators.
        precisions: what can be stored, by its name; the first is what is meant without one.
        default_max_length: positions of a graph whose export does not say how many, at most.
        static_length: whether caches have their number of positions in the graph.
        state: makes the state of a trace; takes the fields of `GraphState` and one argument for each of `inputs`.
        inputs: the inputs besides ids and caches, for a batch and a number of rows to trace with.
        constants: tables of its own for a number of positions.
        fuse_norms: makes norms one operator each, while the graph is traced.
        finish: the passes over a traced graph before it gets its weights.
        finish_stored: the passes over a graph that has them.
        weights: how weights are quantised and read.
        after_saving: what is done to a graph's file.
    """

    name: str
    opset: int
    precisions: Mapping[str, WeightFormat]
    default_max_length: int
    static_length: bool
    state: Callable[..., GraphState]
    inputs: Callable[[int, int], tuple[GraphInput, ...]]
    constants: Callable[[int], dict[str, torch.Tensor]]
    fuse_norms: Callable[[ir.Model], Any]
    finish: Callable[[ir.Model], Any]
    finish_stored: Callable[[ir.Model], Any]
    weights: WeightNodes
    after_saving: Callable[[Path], Any]

    def weight_format(self, precision: str, argument: str = "precision") -> WeightFormat:
        """The format of a precision by name, which `argument` gave.

        Raises:
            InvalidInputError: there is none for this flavour.
        """
        if precision not in self.precisions:
            raise InvalidInputError(
                f"{argument}={precision!r} is none that graphs of the flavour {self.name} have: expected one of "
                f"{', '.join(self.precisions)}."
            )
        return self.precisions[precision]
