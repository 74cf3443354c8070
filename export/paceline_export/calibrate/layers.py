"""A decoder of transformers that runs one layer at a time, so that its float weights are never in memory as a whole.

The model is built without storage. Everything around its layers (embedding, masks, rotations, last norm, LM head) runs
through the model's own forward, with the layers' forwards exchanged; each layer then runs through its own forward with
its weights read from the checkpoint for as long as they are needed. Knows nothing of architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig

from paceline.errors import CheckpointError
from paceline_export.own_attention import OWN_ATTENTION, reference_attention
from paceline_export.passes.weights import check_values
from paceline_export.weight_reader import WeightReader

__all__ = ["Layer", "LayerwiseModel", "NotLayerwiseError", "Product"]

# Computes a linear layer's product from its name inside the layer and its input: [..., rows].
Product = Callable[[str, torch.Tensor], torch.Tensor]
_Call = tuple[tuple[Any, ...], dict[str, Any]]


class NotLayerwiseError(CheckpointError):
    """The layers of an architecture cannot be run one at a time."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer with its weights in float32.

    Attributes:
        prefix: of its parameters' names in the checkpoint, such as `model.layers.3.`.
        module: transformers' own, without storage.
        weights: by the names that the module has for them.
        linears: its linear layers by name, in the order of definition.
    """

    prefix: str
    module: torch.nn.Module
    weights: dict[str, torch.Tensor]
    linears: dict[str, torch.nn.Linear]
    calls: dict[int, _Call]  # what else it is called with, by the number of positions

    def __call__(self, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden: float32 `[sequences, positions, width]`.
            product: computes the linear layers' products instead of torch; it may raise to end the run early.

        Returns:
            What the next layer gets, in the shape of `hidden`.
        """
        args, kwargs = self.calls[hidden.shape[1]]
        exchanged = nullcontext() if product is None else _exchanged(self.linears, product)
        with torch.no_grad(), exchanged:
            output = functional_call(self.module, self.weights, (hidden, *args), kwargs)
        return cast(torch.Tensor, output[0] if isinstance(output, tuple) else output)


class LayerwiseModel:
    """A causal language model of transformers whose layers are read one at a time.

    Args:
        config: of the model.
        reader: of its checkpoint.

    Raises:
        NotLayerwiseError: its layers cannot be told.
    """

    def __init__(self, config: PreTrainedConfig, reader: WeightReader) -> None:
        with init_empty_weights(include_buffers=False):
            self.model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=reference_attention(config),
                experts_implementation="eager",
            ).eval()
        self.reader = reader
        self._in_tuples = config.model_type in OWN_ATTENTION  # older models' layers give more than the hidden states
        self.prefix, self.modules = _decoder_layers(self.model, config.num_hidden_layers)
        self._calls: list[dict[int, _Call]] = [{} for _ in self.modules]
        names = {module: name for name, module in self.model.named_modules()}
        self._table = f"{names[self.model.get_input_embeddings()]}.weight"
        self._head = f"{names[self.model.get_output_embeddings()]}.weight"
        self._outer = [name for name, _ in self.model.named_parameters() if not name.startswith(f"{self.prefix}.")]

    def __len__(self) -> int:
        return len(self.modules)

    def embed(self, *texts: torch.Tensor) -> list[torch.Tensor]:
        """What the first layer gets for texts, each int64 `[sequences, positions]`: float32 `[…, width]` each.

        It also notes what else the layers are called with, which holds for every text of so many positions.

        Raises:
            NotLayerwiseError: the layers of this architecture are not called one after another.
        """
        weights = self._outer_weights(without=self._head)
        found = []
        for ids in texts:
            calls: list[_Call] = []
            sequences: list[torch.Tensor] = []

            def note(
                hidden: torch.Tensor,
                *args: Any,
                calls: list[_Call] = calls,
                sequences: list[torch.Tensor] = sequences,
                **kwargs: Any,
            ) -> Any:
                if not calls:
                    sequences.append(hidden.clone())
                calls.append((args, {name: value for name, value in kwargs.items() if name != "past_key_values"}))
                return (hidden,) if self._in_tuples else hidden

            with torch.no_grad(), self._instead_of_layers([note] * len(self)):
                for sequence in ids:  # one at a time, so that masks fit any number of sequences
                    calls.clear()
                    inputs = {"input_ids": sequence[None], "use_cache": False, "logits_to_keep": 1}
                    functional_call(self.model, weights, (), inputs)
                    if len(calls) != len(self):
                        raise NotLayerwiseError(
                            f"{type(self.model).__name__} has {len(self)} layers and calls {len(calls)}; it cannot be "
                            "run layer by layer."
                        )
            for noted, call in zip(self._calls, calls, strict=True):
                noted[ids.shape[1]] = call
            found.append(torch.cat(sequences))
        return found

    def layer(self, index: int) -> Layer:
        """A layer with its weights, read anew.

        Raises:
            CheckpointError: a weight that is missing, or holds values that are no numbers.
        """
        module, prefix = self.modules[index], f"{self.prefix}.{index}."
        weights = {name: self._read(prefix + name) for name, _ in module.named_parameters()}
        linears = {name: linear for name, linear in module.named_modules() if isinstance(linear, torch.nn.Linear)}
        return Layer(prefix, module, weights, linears, self._calls[index])

    def logits(self, hidden: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Logits, float32 `[positions, vocab]`, of what the last layer gave for each sequence, `[positions, width]`."""
        weights = self._outer_weights(without=self._table)
        for sequence in hidden:

            def give(given: torch.Tensor, *args: Any, sequence: torch.Tensor = sequence, **kwargs: Any) -> Any:
                return (sequence[None],) if self._in_tuples else sequence[None]

            with torch.no_grad(), self._instead_of_layers([give] * len(self)):
                inputs = {"inputs_embeds": torch.zeros_like(sequence)[None], "use_cache": False}
                output = functional_call(self.model, weights, (), inputs)
            yield output.logits[0]

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.reader.read(name)
        check_values(name, tensor, torch.float32)
        return tensor

    def _outer_weights(self, *, without: str) -> dict[str, torch.Tensor]:
        """Weights around the layers; the table `without`, which is large, is of zeros unless it is the other, too."""
        tied = self._head not in self._outer or self._head == self._table
        return {
            name: torch.zeros(1).expand(self.reader.shape(name)) if name == without and not tied else self._read(name)
            for name in self._outer
        }

    @contextmanager
    def _instead_of_layers(self, forwards: list[Any]) -> Iterator[None]:
        for module, forward in zip(self.modules, forwards, strict=True):
            module.forward = forward
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward


def _decoder_layers(model: torch.nn.Module, count: int) -> tuple[str, torch.nn.ModuleList]:
    """The list of decoder layers and its name."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if len(found) > 1:  # lists of other things, as many by chance
        found = [(name, module) for name, module in found if name.endswith("layers")]
    if len(found) != 1:
        raise NotLayerwiseError(
            f"{type(model).__name__} has {len(found)} lists of {count} layers where one is expected; it cannot be run "
            "layer by layer."
        )
    return found[0]


@contextmanager
def _exchanged(linears: dict[str, torch.nn.Linear], product: Product) -> Iterator[None]:
    """Let `product` compute what these linear layers give."""
    for name, linear in linears.items():
        linear.forward = partial(product, name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for linear in linears.values():
            del linear.forward
