"""How a model places its tokens: tables of its rotation, found out by trying it, and who rotates while it is traced.

Where the rotation is one that the operators of a graph know, they rotate. Everywhere else the model's own code rotates,
by tables that are looked up: a few more operators in each layer, for any rotation whose frequencies are fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedConfig

from paceline.errors import CheckpointError

from .attention import leave_unrotated
from .own_attention import OWN_ATTENTION, position_bias

__all__ = ["Rotation", "find_rotation", "fixed_positions", "num_heads_and_size"]

# Rotations whose frequencies depend on how long the text is, from some length on.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Rotation:
    """The tables of a model's rotation.

    Attributes:
        tables: `rotary.cos` and `rotary.sin`; of models that rotate some layers otherwise, one pair for each kind of
            layer, named `rotary.cos_KIND`. Empty where the model does not rotate.
        layers: what the names of each layer's tables end with.
        interleaved: whether pairs are neighbours.
        by_operators: whether the operators rotate: the tables are `[max_length, rotated / 2]`, where the first
            `rotated` values of a head rotate. Otherwise the model does, by tables as its own code wants them.
    """

    tables: dict[str, torch.Tensor]
    layers: tuple[str, ...]
    interleaved: bool
    by_operators: bool

    @contextmanager
    def applied(self, model: torch.nn.Module, modeling: Any, tables: torch.nn.Module) -> Iterator[None]:
        """Make the model rotate this way inside the block.

        Args:
            model: to be traced.
            modeling: the module that holds its code.
            tables: holds the tables as buffers, by their names behind `rotary.`.
        """

        def looked_up(
            x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = (
                torch.nn.functional.embedding(position_ids, tables.get_buffer(f"{name}{_suffix(layer_type)}"))
                for name in ("cos", "sin")
            )
            if self.by_operators:  # nobody reads them; the model may ask for their width
                cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
            return cos.to(x.dtype), sin.to(x.dtype)

        with ExitStack() as undo:
            if self.by_operators and self.tables:
                undo.callback(setattr, modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)
                modeling.apply_rotary_pos_emb = leave_unrotated
            for module in _rotaries(model):  # its own forward may depend on how long the text is
                undo.callback(delattr, module, "forward")
                module.forward = looked_up
            yield


def num_heads_and_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Number of KV heads and the size of a head."""
    heads = config.num_attention_heads
    own = OWN_ATTENTION.get(config.model_type)
    kv_heads = own.kv_heads(config) if own is not None else getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def fixed_positions(config: PreTrainedConfig) -> int | None:
    """Positions up to which the frequencies of a rotation are the same for every text; None where they always are."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    found = [
        int(kind.get("original_max_position_embeddings") or config.max_position_embeddings)
        if kind["rope_type"] == "longrope"
        else int(config.max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in _BY_LENGTH
    ]
    return min(found, default=None)


def find_rotation(
    config: PreTrainedConfig,
    model: torch.nn.Module,
    modeling: Any,
    max_length: int,
    dtype: torch.dtype,
    *,
    by_operators: bool = True,
) -> Rotation:
    """Cosine and sine of every position, and whether pairs are interleaved, found out by trying the rotation.

    Args:
        config: of the model.
        model: without storage.
        modeling: the module that holds its code.
        max_length: number of positions.
        dtype: of the tables.
        by_operators: whether operators may rotate, where they can.

    Raises:
        CheckpointError: the tokens are placed in a way that no table holds.
    """
    name = type(model).__name__
    modules = _rotaries(model)
    classes = {type(module) for module in modules}
    if not classes:
        return Rotation({}, ("",) * config.num_hidden_layers, interleaved=False, by_operators=True)
    if len(classes) > 1:
        raise CheckpointError(
            f"{name} rotates in {len(classes)} ways ({', '.join(sorted(each.__name__ for each in classes))}); "
            "this architecture is not supported."
        )
    rotary = cast(Any, classes.pop())
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    kinds: tuple[str | None, ...] = (None,) * config.num_hidden_layers
    if by_kind:
        kinds = tuple(config.layer_types)
    _, head_size = num_heads_and_size(config)
    found: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
    for kind in sorted(set(kinds), key=str):
        which = {} if kind is None else {"layer_type": kind}

        def tried(count: int, which: dict[str, str] = which) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                cos, sin = rotary(config)(torch.zeros(1, 1, 1), torch.arange(count)[None], **which)
            return cos, sin

        try:
            cos, sin = tried(max_length)
            short = tried(min(max_length, 2))
        except Exception as error:  # its code may want other arguments, or may not come as tensors
            raise CheckpointError(
                f"The rotation of {name} cannot be tried ({type(error).__name__}: {error}); this architecture is not "
                "supported."
            ) from error
        if not (torch.isfinite(cos).all() and torch.isfinite(sin).all()):
            raise CheckpointError(
                f"The rotation of {name} is no number at some positions; look at its rope_parameters "
                f"(rope_theta above all): {parameters!r:.200}."
            )
        same = all(torch.allclose(x[:, : s.shape[1]], s, atol=1e-6) for x, s in zip((cos, sin), short, strict=True))
        fixed = fixed_positions(config)
        if not same or max_length > (fixed or max_length):
            raise CheckpointError(
                f"The frequencies of {name}'s rotation change with the length of the text, and the keys in a cache "
                "cannot follow. "
                + (
                    f"Up to {fixed} positions they are the same: export it with --max-length {fixed} or less."
                    if fixed
                    else "This architecture is not supported."
                )
            )
        found[kind] = cos, sin
    rotate = getattr(modeling, "apply_rotary_pos_emb", None)
    layers = tuple(map(_suffix, kinds))
    first = next(iter(found.values()))[0]
    width = first.shape[-1]
    # ONNX Runtime rotates a multiple of 16 values of a head, the first ones.
    if by_operators and rotate is not None and width % 16 == 0 and width <= head_size:
        interleaved = {_is_interleaved(rotate, *pair, head_size) for pair in found.values()}
        if len(interleaved) == 1 and None not in interleaved:
            pairs = interleaved == {True}
            # A table as the model has it repeats each frequency; the operator wants it once.
            keep = slice(0, None, 2) if pairs else slice(0, width // 2)
            return Rotation(_tables(found, dtype, keep), layers, pairs, by_operators=True)
    return Rotation(_tables(found, dtype, slice(None)), layers, interleaved=False, by_operators=False)


def _rotaries(model: torch.nn.Module) -> list[torch.nn.Module]:
    if position_bias(cast(PreTrainedConfig, model.config), 1) is not None:
        return []  # Falcon has one all the same, and leaves it unused
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]


def _tables(
    found: dict[str | None, tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype, keep: slice
) -> dict[str, torch.Tensor]:
    return {
        f"rotary.{name}{_suffix(kind)}": table[0, :, keep].to(dtype).contiguous()
        for kind, pair in found.items()
        for name, table in zip(("cos", "sin"), pair, strict=True)
    }


def _suffix(kind: str | None) -> str:
    return "" if kind is None else f"_{kind}"


def _is_interleaved(rotate: Any, cos: torch.Tensor, sin: torch.Tensor, head_size: int) -> bool | None:
    """Whether the model rotates neighbours (x0, x1), (x2, x3), … or halves (x0, x_n/2), …; None for neither.

    Only the first values of a head may rotate.
    """
    size = cos.shape[-1]
    count = min(cos.shape[1], 8)
    x = torch.randn(1, 1, count, head_size, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            rotated, _ = rotate(x, x, cos[:, :count], sin[:, :count])
    except Exception:  # it is called otherwise; the model itself knows how
        return None
    first, rest = x[..., :size], x[..., size:]
    for interleaved in (False, True):
        keep = slice(0, None, 2) if interleaved else slice(0, size // 2)
        other = slice(1, None, 2) if interleaved else slice(size // 2, None)
        even, odd, c, s = first[..., keep], first[..., other], cos[:, None, :count, keep], sin[:, None, :count, keep]
        pair = even * c - odd * s, odd * c + even * s
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        expected = torch.cat((turned, rest), -1)
        if rotated.shape == expected.shape and torch.allclose(rotated, expected, atol=1e-5):
            return interleaved
    return None
