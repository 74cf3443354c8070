"""Quantised weights that wait on disk until the graph takes them: together they may be larger than memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline_export.quantize.blockwise import Blockwise

__all__ = ["Shelf"]


@dataclass(slots=True)
class Shelf(MutableMapping[str, Blockwise]):
    """Weights by their names, each in a file of the existing `folder` that is read anew whenever it is asked for."""

    folder: Path
    _items: dict[str, tuple[Path, int, int, int, float | None]] = field(init=False, default_factory=dict)
    _files: Iterator[int] = field(init=False, default_factory=itertools.count)

    def __setitem__(self, name: str, weight: Blockwise) -> None:
        known = self._items.get(name)
        path = known[0] if known else self.folder / f"{next(self._files)}.npz"
        arrays = {"packed": weight.packed, "scales": weight.scales}
        if weight.zero_points is not None:
            arrays["zero_points"] = weight.zero_points
        np.savez(path, **arrays)  # type: ignore[arg-type]  # its types take each array for `allow_pickle`
        self._items[name] = (path, weight.columns, weight.bits, weight.block_size, weight.input_scale)

    def __getitem__(self, name: str) -> Blockwise:
        path, columns, bits, block_size, input_scale = self._items[name]
        with np.load(path, allow_pickle=False) as arrays:
            zero_points = arrays.get("zero_points")
            return Blockwise(arrays["packed"], arrays["scales"], zero_points, columns, bits, block_size, input_scale)

    def __delitem__(self, name: str) -> None:
        self._items.pop(name)[0].unlink()

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
