"""Parameters that a checkpoint holds under other names, or in other pieces, than the model has them.

transformers keeps a list of such changes for each architecture, for what was published before its code changed: experts
one by one that are stacked now, names of older days, a model's parameters without its prefix. This reads that list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

__all__ = ["Conversions"]


class Conversions:
    """What a model's parameters are made of.

    Args:
        stored: names that the checkpoint holds.
        model: of transformers, without storage.
    """

    def __init__(self, stored: Iterable[str], model: Any) -> None:
        self._model = model
        changes = get_model_conversion_mapping(model)
        renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._names: dict[str, str] = {}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        parameters = model.state_dict()
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            self._names[name] = target
            targets = [target]
            if pattern is not None:  # one tensor may become several parameters
                first, *others = self._converters[pattern].target_patterns
                targets += [target.replace(first, other) for other in others]
            for each in targets:
                self._sources.setdefault(each, []).append((name, pattern))

    def sources(self, name: str) -> list[str]:
        """Names of the stored tensors that a parameter is made of; empty where there are none."""
        return [source for source, _ in self._sources.get(name, [])]

    def names(self, stored: Iterable[str]) -> dict[str, str]:
        """The model's names for stored tensors, by those."""
        return {name: self._names.get(name, name) for name in stored}

    def make(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The parameter, made of what `read` gives for its sources: tensors, or such without storage."""
        found = self._sources[name]
        source, pattern = found[0]
        if pattern is None:
            return read(source)
        converter = copy.deepcopy(self._converters[pattern])
        for source, its_pattern in found:
            converter.add_tensor(name, source, cast(str, its_pattern), cast(Any, read(source)))
        made = converter.convert(name, model=self._model, config=self._model.config)
        return cast(torch.Tensor, made[name])
