"""LoRA adapters in the format of the package `peft`, merged into the weights of a checkpoint as they are read.

```
ADAPTER/adapter_config.json         r, lora_alpha, use_rslora, use_dora, rank_pattern, alpha_pattern, …
ADAPTER/adapter_model.safetensors   base_model.model.MODULE.lora_A.weight        [r, columns]
                                    base_model.model.MODULE.lora_B.weight        [rows, r]
                                    base_model.model.MODULE.lora_magnitude_vector  [rows], DoRA's
                                    base_model.model.MODULE.lora_embedding_A, _B   [r, ids], [width, r]
                                    base_model.model.MODULE.weight               trained in full (modules_to_save)
                                    base_model.model.MODULE.base_layer.weight    what factors are added to, if given
```

Merged, a weight `W [rows, columns]` is `W + s B A`, with `s = lora_alpha / r`, or `lora_alpha / √r` if rank-stabilised
(Hu et al. 2021, Kalajdzievski 2023). DoRA scales its rows to the lengths `m` that it learned (Liu et al. 2024):
`m (W + s B A) / ‖W + s B A‖`. Nothing of an adapter is executed, and `peft` is not needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from transformers.pytorch_utils import Conv1D

from paceline.bundle import file_sha256
from paceline.errors import CheckpointError

from .layer_patterns import first_matches
from .safetensors_reader import opened
from .weights import FLOAT_KINDS, check_safetensors, read_json

if TYPE_CHECKING:
    from .quantize.packed import PackedWeight
    from .weight_reader import WeightReader

__all__ = ["AdaptedReader", "Adapter", "Change"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Trained adapters are far below; far above it, what is added overflows.
_MOST_SCALE = 1e6
_PART = re.compile(r"(.+)\.lora_(?:(A|B)\.weight|embedding_(A|B)|(magnitude_vector)(?:\.weight)?)")
# Ways to begin a training that leave the base model as it is; others (pissa, olora, …) take something out of it.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Settings by which an adapter is no fixed sum of matrices, with what they do; falsy is off.
_REFUSED = {
    "lora_bias": "trains biases of its own",
    "target_parameters": "changes parameters that are no layer's weight",
    "trainable_token_indices": "trains rows of the embedding by themselves",
    "layer_replication": "stacks layers of the model several times",
    "alora_invocation_tokens": "works behind certain tokens only",
    "use_qalora": "averages its inputs",
    "use_bdlora": "has block-diagonal matrices",
    "arrow_config": "chooses among several adapters for each token",
}


@dataclass(slots=True)
class Change:
    """What an adapter does to one parameter: the names of its tensors, and the scale of the product.

    `whole` is a tensor that replaces the parameter, `a` and `b` are factors of what is added, `magnitude` is DoRA's.
    """

    a: str | None = None
    b: str | None = None
    magnitude: str | None = None
    whole: str | None = None
    embedding: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on this disk.

    Attributes:
        name: of its folder.
        file: its weights.
        changes: by the names of the base model's parameters.
        shapes: of its tensors, by their names in the file.
    """

    name: str
    file: Path
    changes: Mapping[str, Change]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: Path) -> Adapter:
        """Read the configuration and the names and shapes of an adapter's tensors.

        Raises:
            CheckpointError: no such adapter, a damaged one, or one that does something else than what is merged here.
        """
        folder = Path(folder)
        if not (folder / _CONFIG).is_file():
            raise CheckpointError(
                f"{folder} is not an adapter: it has no {_CONFIG}. Expected a folder with {_CONFIG} and {_WEIGHTS}, as "
                "peft's save_pretrained writes it."
            )
        settings = read_json(folder / _CONFIG)
        _check_settings(folder, settings)
        file = folder / _WEIGHTS
        if not file.is_file():
            pickled = (folder / "adapter_model.bin").is_file()
            raise CheckpointError(
                f"{folder} has no {_WEIGHTS}"
                + (
                    " but adapter_model.bin, a pickle, which can run any code when it is loaded; save it again with "
                    "peft's save_pretrained where you trust it."
                    if pickled
                    else ". Copy or download it again in full."
                )
            )
        check_safetensors(file)
        with opened(file) as handle:
            slices = {key: handle.get_slice(key) for key in list(handle.keys())}
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            kinds = {key: part.get_dtype() for key, part in slices.items()}
        if odd := [f"{key} ({kind})" for key, kind in kinds.items() if kind not in FLOAT_KINDS]:
            raise CheckpointError(f"{file} holds tensors that are no plain floating-point ones: {', '.join(odd[:3])}.")
        return cls(folder.resolve().name, file, _changes(folder, settings, shapes), shapes)

    def first_layers(self, count: int) -> Adapter:
        """What it does to a model's first `count` layers, and to what is outside of layers."""

        def stays(name: str) -> bool:
            number = re.search(r"\.(\d+)\.", name)  # the first is the layer's; an expert's would stand behind it
            return number is None or int(number[1]) < count

        changes = {name: change for name, change in self.changes.items() if stays(name)}
        return replace(self, changes=changes)

    def sha256(self) -> str:
        """SHA-256 of the file of weights."""
        return file_sha256(self.file)

    def tensors(self, change: Change) -> dict[str, torch.Tensor]:
        """The float32 tensors of a change by the names of its fields."""
        parts = {part: getattr(change, part) for part in ("a", "b", "magnitude", "whole")}
        with opened(self.file) as handle:
            found = {part: handle.get_tensor(key).to(torch.float32) for part, key in parts.items() if key is not None}
        for part, tensor in found.items():
            if not torch.isfinite(tensor).all():
                raise CheckpointError(
                    f"The tensor {parts[part]!r} of the adapter {self.name} holds values that are NaN or infinite; its "
                    "training failed, or the file is damaged."
                )
        return found


@dataclass(slots=True)
class AdaptedReader:
    """Reads a checkpoint's weights with an adapter merged into them.

    Args:
        reader: of the checkpoint.
        adapter: what to merge.
        model: whose parameters are read; it needs no storage.

    Raises:
        CheckpointError: the adapter was made for another model.
    """

    reader: WeightReader
    adapter: Adapter
    model: torch.nn.Module
    _transposed: frozenset[str] = field(init=False)  # parameters [columns, rows], as GPT-2's

    def __post_init__(self) -> None:
        modules = {f"{name}.weight": module for name, module in self.model.named_modules()}
        self._transposed = frozenset(name for name, module in modules.items() if isinstance(module, Conv1D))
        parameters = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        for name, change in self.adapter.changes.items():
            if name not in parameters and re.search(r"\.experts\.\d+\.", name):
                raise CheckpointError(
                    f"The adapter {self.adapter.name} changes {name!r}, one expert's layer. Experts are stacked in one "
                    "parameter, which adapters are not merged into: merge it with peft (merge_and_unload) and export "
                    "that."
                )
            if name not in parameters:
                raise CheckpointError(
                    f"The adapter {self.adapter.name} changes {name!r}, which {type(self.model).__name__} does not "
                    "have. It was made for another model, or another version of transformers: name the base model that "
                    f"its {_CONFIG} names."
                )
            if (made_for := self._made_for(name, change)) != parameters[name]:
                raise CheckpointError(
                    f"The adapter {self.adapter.name} changes {name!r} as if its shape were {made_for}; the checkpoint "
                    f"has {parameters[name]}. It was made for another model, or for one whose vocabulary was changed: "
                    "then merge it there (merge_and_unload) and export that."
                )
            if change.a is not None and change.embedding != isinstance(modules.get(name), torch.nn.Embedding):
                kind = "an embedding" if change.embedding else "a linear layer"
                raise CheckpointError(f"The adapter {self.adapter.name} takes {name!r} for {kind}, which it is not.")
            if change.embedding and change.magnitude is not None:
                raise CheckpointError(
                    f"The adapter {self.adapter.name} is DoRA on the embedding {name!r}, which is not supported; "
                    "merge it with peft (merge_and_unload) and export that."
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter.

        Raises:
            CheckpointError: the checkpoint does not hold it.
        """
        return self.reader.shape(name)

    def read(self, name: str) -> torch.Tensor:
        """The parameter as float32, with what the adapter adds.

        Raises:
            CheckpointError: the checkpoint does not hold it, or the adapter's numbers are none.
        """
        change = self.adapter.changes.get(name)
        if change is None:
            return self.reader.read(name)
        parts = self.adapter.tensors(change)
        weight = parts["whole"] if "whole" in parts else self.reader.read(name)
        if change.a is None:
            return weight
        a, b = parts["a"], parts["b"]
        if change.embedding or name in self._transposed:
            merged = torch.addmm(weight, a.T, b.T, alpha=change.scale)  # [columns, rows]
        else:
            merged = torch.addmm(weight, b, a, alpha=change.scale)
        if (magnitude := parts.get("magnitude")) is None:
            return merged
        across = 0 if name in self._transposed else 1
        factor: torch.Tensor = magnitude.reshape(-1) / torch.linalg.vector_norm(merged, dim=across)
        return merged.mul(factor if across == 0 else factor[:, None])

    def packed(self, name: str) -> PackedWeight | None:
        """The parameter in few bits, where the checkpoint holds it so and the adapter leaves it."""
        return None if name in self.adapter.changes else self.reader.packed(name)

    def left_over(self) -> dict[str, str]:
        """What of the checkpoint no parameter is made of.

        Raises:
            CheckpointError: its tied head is another one than its embedding.
        """
        return self.reader.left_over()

    def _made_for(self, name: str, change: Change) -> tuple[int, ...]:
        """The shape of the parameter that a change was made for."""
        shapes = self.adapter.shapes
        if change.a is None:
            return shapes[str(change.whole)]
        rows, columns = shapes[str(change.b)][0], shapes[str(change.a)][1]
        return (columns, rows) if change.embedding or name in self._transposed else (rows, columns)


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse adapters that are no sum of two small matrices.

    Raises:
        CheckpointError: with the reason.
    """
    mend = "merge it with peft (merge_and_unload) and export that."
    if (kind := settings.get("peft_type")) != "LORA":
        raise CheckpointError(f"{folder} is an adapter of the type {kind!r:.40}; expected LORA. If peft can, {mend}")
    if (task := settings.get("task_type")) not in (None, "CAUSAL_LM"):
        raise CheckpointError(f"{folder} was trained for the task {task!r:.40}; expected CAUSAL_LM.")
    for setting, what in _REFUSED.items():
        if settings.get(setting):
            raise CheckpointError(f"{folder}: this adapter {what} ({setting}), which is not supported; {mend}")
    start = settings.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise CheckpointError(
            f"{folder}: init_lora_weights={start!r:.40} takes something out of the base model when training begins, so "
            "that the adapter fits that model only. Save it with peft's path_initial_model_for_weight_conversion, or "
            f"{mend}"
        )
    for setting in ("r", "lora_alpha"):
        value = settings.get(setting)
        if not _is_number(value) or value <= 0:
            raise CheckpointError(f"{folder / _CONFIG}: {setting} is {_shown(value)}; expected a positive number.")
    for setting in ("alpha_pattern", "rank_pattern"):
        patterns = settings.get(setting) or {}
        if not isinstance(patterns, Mapping):
            raise CheckpointError(f"{folder / _CONFIG}: {setting} is {patterns!r:.80}; expected numbers by names.")
        for pattern, value in patterns.items():
            if not _is_number(value):
                raise CheckpointError(
                    f"{folder / _CONFIG}: {setting} has {_shown(value)} for {pattern!r:.80}; expected a number."
                )


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether a setting is a number that float64 holds."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond it
        return False


def _shown(value: Any) -> str:
    """A setting as messages show it: a whole number may have thousands of digits."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _changes(folder: Path, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Change]:
    """Sort an adapter's tensors by the parameters that they change.

    Raises:
        CheckpointError: names or shapes that peft does not write.
    """
    changes: dict[str, Change] = {}
    for key in shapes:
        if not key.startswith(_PREFIX):
            raise CheckpointError(
                f"{folder / _WEIGHTS} holds a tensor {key!r:.80}; expected names that begin with {_PREFIX!r}, as peft "
                "writes them. Save the adapter with peft's save_pretrained."
            )
        path = key.removeprefix(_PREFIX)
        if (found := _PART.fullmatch(path)) is not None:
            module, factor, embedding_factor, magnitude = found.groups()
            change = changes.setdefault(f"{module}.weight", Change())
            change.embedding |= embedding_factor is not None
            setattr(change, "magnitude" if magnitude else (factor or embedding_factor).lower(), key)
        elif "lora_" in path:
            raise CheckpointError(f"{folder / _WEIGHTS} holds a tensor {key!r:.80}, of a kind that is not supported.")
        else:
            name = path.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            changes.setdefault(name, Change()).whole = key
    if not changes:
        raise CheckpointError(f"{folder / _WEIGHTS} holds no tensor.")
    for name, change in changes.items():
        _check_change(folder, name, change, shapes)
    low_rank = [name for name, change in changes.items() if change.a is not None]
    modules = [name.removesuffix(".weight") for name in low_rank]
    ranks = _numbers(folder, settings, "r", "rank_pattern", modules)
    alphas = _numbers(folder, settings, "lora_alpha", "alpha_pattern", modules)
    for name, stated, alpha in zip(low_rank, ranks, alphas, strict=True):
        change = changes[name]
        rank = shapes[str(change.a)][0]
        if stated != rank:
            raise CheckpointError(
                f"{folder / _WEIGHTS}: the factors of {name!r} have rank {rank}, and {_CONFIG} says {stated:g} (r, or "
                "rank_pattern for this layer). They come from two trainings, and the scale of what is added depends on "
                "the rank: take both files from where the adapter came from."
            )
        change.scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        if not abs(change.scale) < _MOST_SCALE:
            raise CheckpointError(
                f"{folder / _CONFIG}: lora_alpha of {name!r} is {alpha!r:.40}, so that what is added would be "
                f"multiplied by {change.scale:.3g}; expected less than {_MOST_SCALE:.0e}."
            )
        if settings.get("use_dora") and change.magnitude is None:
            raise CheckpointError(
                f"{folder / _WEIGHTS} has no lora_magnitude_vector of {name!r}, though {_CONFIG} says use_dora. Copy "
                "or download it again in full, or save it again with peft's save_pretrained."
            )
    return changes


def _check_change(folder: Path, name: str, change: Change, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a change has a tensor for all of the parameter, or two factors that fit each other.

    Of an embedding or LM head with factors, peft may save the layer that they are added to as well.
    """
    has_factors = change.a is not None or change.b is not None or change.magnitude is not None
    if change.whole is not None and has_factors and ".base_layer." not in change.whole:
        raise CheckpointError(f"{folder / _WEIGHTS} holds {name!r} in full and as low-rank factors; expected one.")
    if not has_factors:
        return
    parts = [shapes[key] for key in (change.a, change.b) if key is not None]
    fits = len(parts) == 2 and all(len(shape) == 2 for shape in parts) and parts[0][0] == parts[1][1]
    if not fits or not parts[0][0]:
        raise CheckpointError(
            f"{folder / _WEIGHTS}: the factors of {name!r} have shapes {', '.join(map(str, parts)) or 'none'}; "
            "expected A [r, columns] and B [rows, r]."
        )
    rows = parts[1][0]
    if change.magnitude is not None and (found := shapes[change.magnitude]) not in ((rows,), (rows, 1), (1, rows)):
        raise CheckpointError(
            f"{folder / _WEIGHTS}: the magnitudes of {name!r} have shape {found}; expected ({rows},)."
        )


def _numbers(
    folder: Path, settings: Mapping[str, Any], name: str, patterns: str, modules: Sequence[str]
) -> list[float]:
    """A number for each of some modules: that of the first pattern that is the end of its name, or the plain one.

    Raises:
        CheckpointError: a pattern that cannot be read.
    """
    stated: Mapping[str, float] = settings.get(patterns) or {}
    values = list(stated.values())
    found = first_matches(f"{folder / _CONFIG}: {patterns}", list(stated), modules)
    return [float(settings[name] if index is None else values[index]) for index in found]
