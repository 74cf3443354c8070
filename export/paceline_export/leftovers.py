"""Tensors of a checkpoint that no parameter of its model is made of: what may be left out, and what may not.

Left out without a word are tables that a model makes by itself (rotations, causal masks), scales of inputs and of
caches, biases of zeros, and a tied LM head that is the embedding; a reader's `left_over` does not name them. Parts of a
larger model, such as a vision tower or layers that predict further tokens, are left out and named. Without others the
model would be another one: what stands in a layer that the model has, or beside a parameter, and layers like its own.
These are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import CheckpointError

__all__ = ["check_left_over", "is_made_anew"]

_LAYER = re.compile(r"(.*?)\.(\d+)\.(.+)")
_MADE_ANEW = re.compile(
    r"(^|[._])(rotary|rope|inv_freq)|\.(masked_bias|causal_mask|position_ids)$"
    r"|(^|[._])((input|output|activation|act|q|k|v|kv|prob)_(zero_point|scale)|_amax)$"
)


def is_made_anew(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a table, a mask or a scale of inputs, which no exported graph reads from a checkpoint."""
    return _MADE_ANEW.search(name) is not None or (name.endswith(".bias") and len(shape) == 4)


def check_left_over(source: str, left_over: Mapping[str, str], model: Any, *, cut: bool) -> tuple[str, ...]:
    """Refuse a checkpoint that holds more of the model's layers than the model has; notes on other tensors.

    Args:
        source: name of the checkpoint.
        left_over: tensors by their names there, with the names that the model would have for them.
        model: of transformers, without storage.
        cut: whether later layers were left out on purpose.

    Raises:
        CheckpointError: a tensor in a layer of the model, or a whole layer that is like the others.
    """
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    modules = {name: module for name, module in model.named_modules() if name}
    stacks = {name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    known = {found[3] for name, _ in model.named_parameters() if (found := _LAYER.match(name)) is not None}
    surplus: dict[tuple[str, int], list[str]] = {}
    others: Counter[str] = Counter()
    for stored, name in left_over.items():
        if any(pattern.search(name) for pattern in ignored):
            continue
        layer = _LAYER.match(name)
        in_stack = layer is not None and layer[1] in stacks
        beside = modules.get(name.rpartition(".")[0])  # such as the norm that a bias belongs to
        if (layer is not None and in_stack and f"{layer[1]}.{layer[2]}" in modules) or (
            beside is not None and next(beside.parameters(recurse=False), None) is not None
        ):
            raise CheckpointError(
                f"{source} holds a tensor {stored!r}, and {type(model).__name__} with this config.json has no such "
                "parameter: without it, the model would be another one. Take config.json from where the "
                "checkpoint came from (of a bias, look at attention_bias and mlp_bias), or remove the tensor."
            )
        if layer is not None and in_stack:
            surplus.setdefault((layer[1], int(layer[2])), []).append(stored)
        else:
            others[re.split(r"\.\d+\.|\.[^.]*$", stored)[0]] += 1
    for (stack, number), names in sorted(surplus.items()):
        if cut:
            continue
        if all((found := _LAYER.match(left_over[name])) is not None and found[3] in known for name in names):
            raise CheckpointError(
                f"{source} holds a layer {stack}.{number} ({names[0]!r}), and its configuration says that there are "
                f"{len(model.get_submodule(stack))}. Take config.json from where the checkpoint came from, or remove "
                "the layer's tensors."
            )
        others[f"{stack}.{number}"] = len(names)
    if not others:
        return ()
    shown = ", ".join(f"{part} ({count})" for part, count in sorted(others.items())[:4])
    more = f", and {len(others) - 4} more parts" if len(others) > 4 else ""
    return (
        f"{others.total()} tensors of the checkpoint are left out, since {type(model).__name__} has no such parts: "
        f"{shown}{more}",
    )
