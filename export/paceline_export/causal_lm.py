"""Trace a transformers decoder into one ONNX graph with KV caches as inputs and outputs.

Its flavour decides the operators, and the inputs besides token ids and caches (`flavors/ort.py`, `flavors/trt.py`).

Tracing needs no weights: parameters are fake tensors, and the graph's initializers carry the checkpoint's names.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import onnx_ir as ir
import onnxscript.optimizer
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.errors import CheckpointError

from .attention import ATTENTION_NAME, POSITION_BIAS, ChangedRotationError, tracing
from .experts import EXPERTS_NAME
from .flavors import FLAVORS, Flavor
from .own_attention import OWN_ATTENTION, adapt, position_bias
from .passes.products import split_products
from .passes.simplify import simplify
from .rotation import Rotation, find_rotation, num_heads_and_size

__all__ = [
    "Trace",
    "check_architecture",
    "fake_model",
    "projects_for_attention",
    "trace",
]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced graph without weights.

    Attributes:
        model: the graph; initializers have no value yet and are named as in the checkpoint.
        embedding: name of the parameter that input ids are looked up in.
        attention: names of the weights that project for attention.
        constants: values of initializers that no checkpoint holds: tables of rotation, see `Rotation`, what the model
            computes when it is built, and tables of the flavour.
        folded: whether steps behind long texts read keys and values once for all heads that share them.
    """

    model: ir.Model
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    embedding: str
    attention: frozenset[str]
    constants: dict[str, torch.Tensor]
    folded: bool = False


_TRACES: dict[tuple[str, int, str, Flavor], Trace] = {}  # by what they depend on, the longest unused first
_MAX_TRACES = 16


def fake_model(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[torch.nn.Module, FakeTensorMode]:
    """Make the model of a configuration with parameters that have shapes but no storage.

    Raises:
        CheckpointError: transformers knows no causal language model for this configuration.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    implementation = "eager" if config.model_type in OWN_ATTENTION else ATTENTION_NAME
    try:
        with mode:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation, experts_implementation=EXPERTS_NAME
            )
    except Exception as error:  # a configuration may hold anything, and its model's code may stumble over it anyhow
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
        if isinstance(error, KeyError) and error.args == (implementation,):
            reason = "its attention cannot be exchanged"
        raise CheckpointError(
            f"transformers cannot build a causal language model from a {config.model_type!r} configuration: {reason}"
        ) from error
    adapt(model, config)
    if not _takes_positions(model) and position_bias(config, 1) is None:
        raise CheckpointError(
            f"{type(model).__name__} takes no position_ids: it places its tokens by itself, from what it is given at "
            "once; this architecture is not supported."
        )
    return model.eval(), mode


def trace(
    config: PreTrainedConfig, *, max_length: int, dtype: str = "float32", flavor: Flavor = FLAVORS["ort"]
) -> Trace:
    """Trace the decoder that `config` describes.

    Args:
        config: of a decoder whose attention goes through transformers' attention interface and whose positions are
            rotations of a fixed set of frequencies, learned, or biases of its scores (`own_attention.py`).
        max_length: number of positions in the rotation tables, and in the caches where the flavour fixes it.
        dtype: of weights, activations and caches: `"float32"`, `"float16"` or `"bfloat16"`; logits are float32 always.
        flavor: what the graph is for.

    Returns:
        a graph of the caller's own. The last ones are kept, since a trace takes most of the time that a small model's
        export does, and a pair may be one checkpoint in two precisions.

    Raises:
        CheckpointError: the architecture cannot be expressed, with the reason.
    """
    said = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    key = (repr(said), max_length, dtype, flavor)
    if (made := _TRACES.pop(key, None)) is None:
        try:
            made = _trace(config, max_length, _DTYPES[dtype], flavor, by_operators=True)
        except ChangedRotationError:
            made = _trace(config, max_length, _DTYPES[dtype], flavor, by_operators=False)
    _TRACES[key] = made
    if len(_TRACES) > _MAX_TRACES:
        del _TRACES[next(iter(_TRACES))]
    return replace(made, model=made.model.clone(), constants=dict(made.constants))


def _trace(
    config: PreTrainedConfig, max_length: int, torch_dtype: torch.dtype, flavor: Flavor, *, by_operators: bool
) -> Trace:
    model, mode = fake_model(config, torch_dtype)
    modeling = importlib.import_module(type(model).__module__)
    rotation = find_rotation(config, model, modeling, max_length, torch_dtype, by_operators=by_operators)
    num_layers = config.num_hidden_layers
    kv_heads, head_size = num_heads_and_size(config)
    constants = flavor.constants(max_length)
    if (bias := position_bias(config, max_length)) is not None:
        constants[POSITION_BIAS] = bias
    with mode:
        graph_model = _GraphModel(model, rotation, flavor, constants)
        batch, rows = 2, 3  # neither 0 nor 1, which torch.export would take for constants
        length = max_length if flavor.static_length else 64
        inputs = flavor.inputs(batch, rows)
        past = [torch.zeros(batch, kv_heads, length, head_size, dtype=torch_dtype) for _ in range(2 * num_layers)]
        arguments = (
            torch.ones(batch, rows, dtype=torch.int64),
            [given.example for given in inputs],
            past[:num_layers],
            past[num_layers:],
        )
    past_dim = {0: Dim("batch")} if flavor.static_length else {0: Dim("batch"), 2: Dim("max_length")}
    past_dims = [past_dim] * num_layers
    names = [f"{i}.{part}" for part in ("key", "value") for i in range(num_layers)]
    with rotation.applied(model, modeling, graph_model.rotary), _quiet():
        try:
            program = torch.onnx.export(
                graph_model,
                arguments,
                dynamo=True,
                optimize=False,  # constant folding needs values; it runs below, when the weights count as inputs
                verbose=False,
                opset_version=flavor.opset,
                dynamic_shapes=(
                    {0: Dim("batch"), 1: Dim("rows")},
                    [{axis: Dim(dim) for axis, dim in given.dims.items()} or None for given in inputs],
                    past_dims,
                    past_dims,
                ),
                input_names=[
                    "input_ids",
                    *(given.name for given in inputs),
                    *(f"past_key_values.{name}" for name in names),
                ],
                output_names=["logits", *(f"present.{name}" for name in names)],
            )
        except torch.onnx.OnnxExporterError as error:
            cause = error.__cause__ or error
            if isinstance(cause, CheckpointError):
                raise cause from error
            raise CheckpointError(
                f"torch cannot trace {type(model).__name__}; this architecture is not supported. The reason: "
                f"{type(cause).__name__}: {str(cause).strip().splitlines()[0]}"
            ) from error
        graph: ir.Model = program.model
        for initializer in graph.graph.initializers.values():
            initializer.const_value = None
        # Norms first: the optimiser takes an epsilon of 1e-8 or less for an addition of nothing, and drops it.
        onnxscript.optimizer.inline(graph)
        onnxscript.optimizer.fold_constants(graph)
        flavor.fuse_norms(graph)
        simplify(graph)
        split_products(graph)
    _forget_origins(graph)
    if left := [name for name in graph.graph.initializers if "rotary_emb" in name]:
        raise CheckpointError(
            f"{type(model).__name__} rotates in a way of its own (it still uses {left[0]!r}); this architecture is not "
            "supported."
        )
    vocab_size = graph.graph.outputs[0].shape[2]
    table = cast(PreTrainedModel, model).get_input_embeddings()
    embedding = next(f"{name}.weight" for name, module in model.named_modules() if module is table)
    places = {given.name for given in inputs} - {"logits_indices"}
    if not (rotation.tables and rotation.by_operators) and not _looks_up(graph, places):
        raise CheckpointError(
            f"{type(model).__name__} places its tokens neither by rotation nor by a table of positions; this "
            "architecture is not supported."
        )
    attention = frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and projects_for_attention(model, name)
    )
    not_stored = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    tables = rotation.tables | constants | _computed(config, not_stored & set(graph.graph.initializers))
    return Trace(graph, num_layers, kv_heads, head_size, int(vocab_size), embedding, attention, tables)


def _forget_origins(model: ir.Model) -> None:
    """Drop what torch notes about its own insides, files of this machine among it; `namespace`, for viewers, stays."""
    model.graph.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        for each in (node, *node.outputs):
            for name in [name for name in each.metadata_props if name != "namespace"]:
                del each.metadata_props[name]
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _looks_up(graph: ir.Model, inputs: set[str]) -> bool:
    """Whether a table is looked up at places that depend on one of these inputs."""
    depends = {value for value in graph.graph.inputs if value.name in inputs}
    for node in graph.graph:  # in topological order
        if any(value in depends for value in node.inputs):
            depends.update(node.outputs)
    return any(
        node.op_type == "Gather" and node.inputs[0].is_initializer() and node.inputs[1] in depends
        for node in graph.graph
    )


def projects_for_attention(model: torch.nn.Module, name: str) -> bool:
    """Whether a linear layer, by its name in a model or in one of its layers, belongs to an attention block."""
    parent = name.rpartition(".")[0]
    return bool(parent) and "Attention" in type(model.get_submodule(parent)).__name__


class _GraphModel(torch.nn.Module):
    """The forward that is traced. Parameters keep the checkpoint's names, so the model is not a submodule."""

    def __init__(
        self, model: torch.nn.Module, rotation: Rotation, flavor: Flavor, constants: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self.rotary = torch.nn.Module()
        for name, table in (rotation.tables | constants).items():
            self.rotary.register_buffer(name.removeprefix("rotary."), torch.empty_like(table, device="cpu"))
        names = tuple(given.name for given in flavor.inputs(2, 3))
        self._call = (model, rotation, flavor, names, tuple(constants))  # inside a tuple, which torch does not register

    def forward(
        self,
        input_ids: torch.Tensor,
        inputs: list[torch.Tensor],
        past_keys: list[torch.Tensor],
        past_values: list[torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        model, rotation, flavor, names, constants = self._call

        def table(name: str) -> torch.Tensor:
            return self.rotary.get_buffer(name.removeprefix("rotary."))

        state = flavor.state(
            input_ids,
            past_keys,
            past_values,
            [(table(f"rotary.cos{kind}"), table(f"rotary.sin{kind}")) for kind in rotation.layers if rotation.tables],
            rotation.interleaved,
            {name: table(name) for name in constants},
            **dict(zip(names, inputs, strict=True)),
        )
        head = cast(PreTrainedModel, model).get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, given: (state.head_input(given[0]), *given[1:]))
        try:
            with tracing(state):
                output = model(
                    input_ids=input_ids,
                    use_cache=False,
                    logits_to_keep=state.logits_to_keep,
                    **({"position_ids": state.position_ids} if _takes_positions(model) else {}),
                )
        finally:
            hook.remove()
        layers = len(past_keys)
        if sorted(state.present) != list(range(layers)):
            raise CheckpointError(
                f"{type(model).__name__} has {layers} layers but {len(state.present)} of them attend through "
                "transformers' attention interface; this architecture is not supported."
            )
        keys, values = zip(*(state.present[layer] for layer in range(layers)), strict=True)
        return output.logits.to(torch.float32), list(keys), list(values)


def _takes_positions(model: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def check_architecture(config: PreTrainedConfig, max_length: int = 8) -> torch.nn.Module:
    """Check what can be told without a trace, in a second or two; returns the model, without weights.

    Args:
        config: of the model.
        max_length: positions of the graph.

    Raises:
        CheckpointError: the architecture cannot be expressed, with the reason.
    """
    model, _ = fake_model(config, torch.float32)
    find_rotation(config, model, importlib.import_module(type(model).__module__), max_length, torch.float32)
    return model


def _computed(config: PreTrainedConfig, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Buffers that no checkpoint holds, since they are computed when the model is built: factors, tables."""
    if not names:
        return {}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name in names}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch and onnx-ir say about their own insides: deprecations, and weights without values."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
