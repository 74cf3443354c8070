"""Trace a transformers decoder into one ONNX graph with KV caches as inputs and outputs.

Its flavour decides the operators, and the inputs besides token ids and caches (`flavors/ort.py`, `flavors/trt.py`).

Tracing needs no weights: parameters are fake tensors, and the graph's initializers carry the checkpoint's names.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.errors import CheckpointError

from .attention import ATTENTION_NAME, leave_unrotated, tracing
from .flavors import FLAVORS, Flavor

__all__ = [
    "Trace",
    "check_architecture",
    "fake_model",
    "num_heads_and_size",
    "projects_for_attention",
    "trace",
]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Rotations whose frequencies do not depend on the length of the text, so that one table serves every step.
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Trace:
    """A traced graph without weights.

    Attributes:
        model: the graph; initializers have no value yet and are named as in the checkpoint.
        embedding: name of the parameter that input ids are looked up in.
        attention: names of the weights that project for attention.
        constants: values of initializers that no checkpoint holds: tables of rotation, `[max_length, head_size / 2]`,
            fixed factors, and tables of the flavour.
    """

    model: ir.Model
    num_layers: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    embedding: str
    attention: frozenset[str]
    constants: dict[str, torch.Tensor]


def num_heads_and_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of KV heads and the size of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def fake_model(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[torch.nn.Module, FakeTensorMode]:
    """Make the model of a configuration with parameters that have shapes but no storage.

    Raises:
        CheckpointError: transformers knows no causal language model for this configuration.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except Exception as error:  # a configuration may hold anything, and its model's code may stumble over it anyhow
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error)
        if isinstance(error, KeyError):
            reason = "its attention cannot be exchanged"
        raise CheckpointError(
            f"transformers cannot build a causal language model with an exchangeable attention from a "
            f"{config.model_type!r} configuration: {reason}"
        ) from error
    return model.eval(), mode


def trace(
    config: PreTrainedConfig, *, max_length: int, dtype: str = "float32", flavor: Flavor = FLAVORS["ort"]
) -> Trace:
    """Trace the decoder that `config` describes.

    Args:
        config: of a decoder whose attention goes through transformers' attention interface and whose positions are
            rotations of a fixed set of frequencies.
        max_length: number of positions in the rotation tables, and in the caches where the flavour fixes it.
        dtype: of weights, activations and caches: `"float32"`, `"float16"` or `"bfloat16"`; logits are float32 always.
        flavor: what the graph is for.

    Raises:
        CheckpointError: the architecture cannot be expressed, with the reason.
    """
    torch_dtype = _DTYPES[dtype]
    model, mode = fake_model(config, torch_dtype)
    modeling = importlib.import_module(type(model).__module__)
    factors = _fixed_factors(model)
    rotation = _rotation(config, model, modeling, max_length, torch_dtype)
    num_layers = config.num_hidden_layers
    kv_heads, head_size = num_heads_and_size(config)
    constants = flavor.constants(max_length)
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
    with _unrotated(modeling), _quiet():
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
        onnxscript.optimizer.optimize_ir(graph)
    attention_nodes = sum(node.op_type == flavor.attention_op for node in graph.graph)
    if attention_nodes != num_layers:
        raise CheckpointError(
            f"{type(model).__name__} has {num_layers} layers but {attention_nodes} of them attend through "
            "transformers' attention interface; this architecture is not supported."
        )
    if left := [name for name in graph.graph.initializers if "rotary_emb" in name]:
        raise CheckpointError(
            f"{type(model).__name__} rotates in a way of its own (it still uses {left[0]!r}); this architecture is not "
            "supported."
        )
    vocab_size = graph.graph.outputs[0].shape[2]
    table = cast(PreTrainedModel, model).get_input_embeddings()
    embedding = next(f"{name}.weight" for name, module in model.named_modules() if module is table)
    attention = frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and projects_for_attention(model, name)
    )
    tables = rotation.tables | constants | factors
    return Trace(graph, num_layers, kv_heads, head_size, int(vocab_size), embedding, attention, tables)


def projects_for_attention(model: torch.nn.Module, name: str) -> bool:
    """Whether a linear layer, by its name in a model or in one of its layers, belongs to an attention block."""
    parent = name.rpartition(".")[0]
    return bool(parent) and "Attention" in type(model.get_submodule(parent)).__name__


class _GraphModel(torch.nn.Module):
    """The forward that is traced. Parameters keep the checkpoint's names, so the model is not a submodule."""

    def __init__(
        self, model: torch.nn.Module, rotation: _Rotation, flavor: Flavor, constants: dict[str, torch.Tensor]
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
            [(table(f"rotary.cos{kind}"), table(f"rotary.sin{kind}")) for kind in rotation.layers],
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
                    position_ids=state.position_ids,
                    use_cache=False,
                    logits_to_keep=state.logits_to_keep,
                )
        finally:
            hook.remove()
        return output.logits.to(torch.float32), state.present_keys, state.present_values


@dataclass(frozen=True, slots=True)
class _Rotation:
    """How a model places its tokens.

    Attributes:
        tables: `rotary.cos` and `rotary.sin`; of models that rotate some layers otherwise, one pair for each kind of
            layer, named `rotary.cos_KIND`.
        layers: what the names of each layer's tables end with.
        interleaved: whether pairs are neighbours.
    """

    tables: dict[str, torch.Tensor]
    layers: tuple[str, ...]
    interleaved: bool


def check_architecture(config: PreTrainedConfig) -> torch.nn.Module:
    """Check what can be told without a trace, in a second or two; returns the model, without weights.

    Raises:
        CheckpointError: the architecture cannot be expressed, with the reason.
    """
    model, _ = fake_model(config, torch.float32)
    _fixed_factors(model)
    _rotation(config, model, importlib.import_module(type(model).__module__), 8, torch.float32)
    return model


def _fixed_factors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are computed when the model is built: factors whose number stands beside them, as Gemma's."""
    stored = set(model.state_dict())
    factors = {}
    for name, buffer in model.named_buffers():
        if name in stored or "rotary_emb" in name:
            continue
        path, _, leaf = name.rpartition(".")
        number = getattr(model.get_submodule(path), f"scalar_{leaf}", None)
        if buffer.dim() or not isinstance(number, int | float):
            raise CheckpointError(
                f"{type(model).__name__} computes {name!r} when it is built instead of storing it; this architecture "
                "is not supported."
            )
        factors[name] = torch.tensor(float(number))
    return factors


def _rotation(
    config: PreTrainedConfig, model: torch.nn.Module, modeling: Any, max_length: int, dtype: torch.dtype
) -> _Rotation:
    """Cosine and sine of every position, and whether pairs are interleaved, found out by trying the rotation."""
    rotaries = {type(module) for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")}
    rotate = getattr(modeling, "apply_rotary_pos_emb", None)
    if len(rotaries) != 1 or rotate is None:
        raise CheckpointError(
            f"{type(model).__name__} does not place its tokens by one rotary embedding "
            f"({len(rotaries)} found, apply_rotary_pos_emb {'found' if rotate else 'missing'}); "
            "this architecture is not supported."
        )
    rotary = rotaries.pop()
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds: tuple[str | None, ...] = (None,) * config.num_hidden_layers
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        kinds = tuple(config.layer_types)
    _, head_size = num_heads_and_size(config)
    if head_size % 16:
        raise CheckpointError(
            f"{type(model).__name__} has heads of {head_size} values; "
            "ONNX Runtime rotates heads of a multiple of 16 only."
        )
    tables: dict[str, torch.Tensor] = {}
    interleaved = False
    for kind in sorted(set(kinds), key=str):
        rope_type = ((parameters if kind is None else parameters.get(kind)) or {}).get("rope_type", "default")
        if rope_type not in _STATIC_ROPE_TYPES:
            raise CheckpointError(
                f"The rotation {rope_type!r} of {type(model).__name__} is not supported: expected one of "
                f"{', '.join(_STATIC_ROPE_TYPES)}, whose frequencies do not change with the length of the text."
            )
        which = {} if kind is None else {"layer_type": kind}
        with torch.no_grad():
            cos, sin = rotary(config)(torch.zeros(1, 1, 1), torch.arange(max_length)[None], **which)
        if not (torch.isfinite(cos).all() and torch.isfinite(sin).all()):
            raise CheckpointError(
                f"The rotation of {type(model).__name__} is no number at some positions; look at its rope_parameters "
                f"(rope_theta above all): {parameters!r:.200}."
            )
        if cos.shape[-1] != head_size:
            raise CheckpointError(
                f"{type(model).__name__} rotates {cos.shape[-1]} of {head_size} values of a head; partial rotation is "
                "not supported."
            )
        interleaved = _is_interleaved(rotate, cos, sin, type(model).__name__)
        # A table as the model has it repeats each frequency; the operator wants it once.
        keep = slice(0, None, 2) if interleaved else slice(0, head_size // 2)
        for name, table in (("cos", cos), ("sin", sin)):
            tables[f"rotary.{name}{_suffix(kind)}"] = table[0, :, keep].to(dtype).contiguous()
    return _Rotation(tables, tuple(map(_suffix, kinds)), interleaved)


def _suffix(kind: str | None) -> str:
    return "" if kind is None else f"_{kind}"


def _is_interleaved(rotate: Any, cos: torch.Tensor, sin: torch.Tensor, model_name: str) -> bool:
    """Whether the model rotates neighbours (x0, x1), (x2, x3), … or halves (x0, x_n/2), ….

    Raises:
        CheckpointError: it does neither.
    """
    size = cos.shape[-1]
    count = min(cos.shape[1], 8)
    x = torch.randn(1, 1, count, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rotated, _ = rotate(x, x, cos[:, :count], sin[:, :count])
    for interleaved in (False, True):
        even, odd = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., : size // 2], x[..., size // 2 :])
        keep = slice(0, None, 2) if interleaved else slice(0, size // 2)
        c, s = cos[:, None, :count, keep], sin[:, None, :count, keep]
        first, second = even * c - odd * s, odd * c + even * s
        expected = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        if torch.allclose(rotated, expected, atol=1e-5):
            return interleaved
    raise CheckpointError(f"The rotation of {model_name} pairs values in an unknown way; it is not supported.")


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


@contextmanager
def _unrotated(modeling: Any) -> Iterator[None]:
    """Leave queries and keys as they are inside the block: the attention operator rotates them."""
    original = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = leave_unrotated
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = original
