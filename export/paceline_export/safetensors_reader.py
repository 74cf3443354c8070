"""Reads weights from the Safetensors files of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError

from .conversion import Conversions
from .leftovers import is_made_anew
from .quantize.packed import PARTS, PackedWeight, Packing, packed_shape, repack, unpacked
from .quantize.scaled import SCALE_KINDS, SCALE_NAMES, SCALED_KINDS, Scaling, check_scales, unscaled
from .weights import FLOAT_KINDS, stated_shards

__all__ = ["SafetensorsReader", "opened"]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A Safetensors file, mapped, as `safetensors.safe_open` gives it.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with safe_open(str(path), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Copy or download it again in full.") from error


@dataclass(slots=True)
class SafetensorsReader:
    """Reads from the safetensors files of a folder, mapping a file for as long as a tensor is read."""

    files: tuple[Path, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    packing: Packing | None = None
    scaling: Scaling | None = None
    model: Any = None  # of transformers, without storage: says what parameters under other names are made of
    _where: dict[str, Any] = field(init=False, default_factory=dict)
    _paths: dict[str, Path] = field(init=False, default_factory=dict)
    _conversions: Conversions | None = field(init=False, default=None)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __post_init__(self) -> None:
        stated = stated_shards(self.files)
        for path in self.files:
            handle = self._stack.enter_context(opened(path))
            for name in list(handle.keys()):
                if (other := self._paths.get(name)) is not None and stated.get(name) not in (other, path):
                    raise CheckpointError(
                        f"The tensor {name!r} lies in {other} and in {path.name}, and the index of shards does not say "
                        "which one counts. Remove the file that does not belong here, or download the checkpoint again."
                    )
                if other is None or stated[name] == path:
                    self._where[name], self._paths[name] = handle, path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter.

        Raises:
            CheckpointError: no file holds it, or not as a plain floating-point tensor, nor packed as `packing` says.
        """
        if self.packing is not None and (module := self._packed_module(name)) is not None:
            shapes = {part: tuple(self._slice(stored).get_shape()) for part, stored in self._parts(module).items()}
            return packed_shape(self.packing, module, shapes)
        if (made := self._made(name)) is not None:
            made_as, conversions = made
            return tuple(
                conversions.make(made_as, lambda stored: torch.empty(self._shape(stored), device="meta")).shape
            )
        return self._shape(self._stored_name(name))

    def read(self, name: str) -> torch.Tensor:
        """The parameter as float32.

        Raises:
            CheckpointError: no file holds it.
        """
        if (packed := self.packed(name)) is not None:
            return unpacked(packed)
        if (made := self._made(name)) is not None:
            made_as, conversions = made
            return conversions.make(made_as, self._read)
        return self._read(self._stored_name(name))

    def packed(self, name: str) -> PackedWeight | None:
        """The parameter's own levels, zero points and scales, or None where they are not what the checkpoint holds.

        Raises:
            CheckpointError: they cannot be expressed.
        """
        if self.packing is None or (module := self._packed_module(name)) is None:
            return None
        parts = self._parts(module)
        return repack(self.packing, module, {part: self._tensor(stored) for part, stored in parts.items()})

    def left_over(self) -> dict[str, str]:
        """Tensors that no parameter of `model` is made of, with the names that it would have for them.

        Raises:
            CheckpointError: a head that the configuration calls tied is there, and another one than the embedding.
        """
        scales = tuple(f".{part}" for part in SCALE_NAMES) if self.scaling is not None else ()
        parts = tuple(f".{part}" for part in PARTS) if self.packing is not None else ()
        used: set[str] = set()
        for name, _ in self.model.named_parameters():
            if (made := self._made(name)) is not None:
                used.update(made[1].sources(made[0]))
            elif self.packing is None or self._packed_module(name) is None:
                used.add(self._stored_name(name))
        kept = {name.removesuffix(".weight") for name in used}
        kept |= {name.removesuffix(".weight") for name, _ in self.model.named_parameters()} if parts else set()
        belongs = tuple({*scales, *parts})
        found = [
            name
            for name in self._where
            if name not in used
            and not (name.endswith(belongs) and name.rpartition(".")[0] in kept)
            and not self._is_harmless(name)
        ]
        return self._renamed().names(found) if found else {}

    def _is_harmless(self, stored: str) -> bool:
        """Whether a tensor that no parameter is made of can be left out without a word."""
        shape = tuple(self._slice(stored).get_shape())
        if is_made_anew(stored, shape):
            return True
        if stored in self.tied:
            head, embedding = self._tensor(stored), self._tensor(self._stored_name(self.tied[stored]))
            if head.dtype != embedding.dtype:
                head, embedding = head.float(), embedding.float()
            if not torch.equal(head, embedding):
                raise CheckpointError(
                    f"config.json says that {stored!r} is {self.tied[stored]!r} (tie_word_embeddings), and the "
                    "checkpoint holds two that differ. Set tie_word_embeddings to false in config.json if the head "
                    f"belongs to this model; otherwise remove {stored!r}."
                )
            return True
        return stored.endswith(".bias") and len(shape) == 1 and not bool(self._tensor(stored).any())

    def _shape(self, stored: str) -> tuple[int, ...]:
        """Shape of a stored tensor, which is of floating-point numbers, or of others with scales."""
        tensor = self._slice(stored)
        shape = tuple(tensor.get_shape())
        scale = self._scale_name(stored)
        scaled = scale is not None
        if not scaled and tensor.get_dtype() not in FLOAT_KINDS:
            raise CheckpointError(
                f"The tensor {stored!r} is stored as {tensor.get_dtype()}: expected one of {', '.join(FLOAT_KINDS)}. "
                "Quantised weights have scales, which would be lost; export the unquantised checkpoint, or a GGUF file."
            )
        if scaled and len(shape) != 2:
            raise CheckpointError(
                f"The tensor {stored!r} is stored in 8 bits with the shape {shape}; expected rows and columns. Export "
                "the unquantised checkpoint of this model, or a GGUF file."
            )
        if scale is not None and self.scaling is not None:
            check_scales(stored.removesuffix(".weight"), shape, self._slice(scale).get_shape(), self.scaling.block)
        return shape

    def _read(self, stored: str) -> torch.Tensor:
        """A stored tensor as float32, times its scales where it has some."""
        if self.scaling is not None and (scale := self._scale_name(stored)) is not None:
            module = stored.removesuffix(".weight")
            return unscaled(module, self._tensor(stored), self._tensor(scale), self.scaling.block)
        return self._tensor(stored).to(torch.float32)

    def _tensor(self, stored: str) -> torch.Tensor:
        """A tensor as it is stored, over a mapping of its own that ends with it.

        Pages of one mapping for all tensors would count as this process's memory until the last one is read.
        """
        with opened(self._paths[stored]) as handle:
            tensor: torch.Tensor = handle.get_tensor(stored)
            return tensor

    def _scale_name(self, stored: str) -> str | None:
        """The stored name of the scales of a weight of 8 bits; None for a weight that is no such."""
        module = stored.removesuffix(".weight")
        if self.scaling is None or module == stored or self._slice(stored).get_dtype() not in SCALED_KINDS:
            return None
        found = [name for part in SCALE_NAMES if (name := f"{module}.{part}") in self._where]
        if len(found) == 1:
            if (kind := self._slice(found[0]).get_dtype()) not in SCALE_KINDS:
                raise CheckpointError(
                    f"The scales {found[0]!r} are stored as {kind}: expected one of {', '.join(SCALE_KINDS)}. Whole "
                    "numbers may stand for powers of two, and nothing says so; export another checkpoint of this model."
                )
            return found[0]
        raise CheckpointError(
            f"The tensor {stored!r} is stored in 8 bits ({self._slice(stored).get_dtype()}) with "
            f"{'two tensors' if found else 'no tensor'} of scales; expected one of "
            f"{', '.join(f'{module}.{part}' for part in SCALE_NAMES)}. The checkpoint is incomplete or of another kind."
        )

    def _packed_module(self, name: str) -> str | None:
        module = name.removesuffix(".weight")
        if module == name or f"{module}.qweight" not in self._where:
            return None
        if name in self._where:
            raise CheckpointError(
                f"The checkpoint holds {name!r} both plainly and quantised ('{module}.qweight'), so it does not say "
                "which one counts; remove one of them."
            )
        return module

    def _parts(self, module: str) -> dict[str, str]:
        """The stored names of a packed projection's parts, each checked for its kind of numbers.

        Raises:
            CheckpointError: one of them holds others.
        """
        stored = {part: f"{module}.{part}" for part in PARTS if f"{module}.{part}" in self._where}
        for part, name in stored.items():
            kinds = FLOAT_KINDS if part == "scales" else ("I32", "I64") if part == "g_idx" else ("I32",)
            if (dtype := self._slice(name).get_dtype()) not in kinds:
                raise CheckpointError(
                    f"The tensor {name!r} is stored as {dtype}: expected one of {', '.join(kinds)}. Such a packing is "
                    "not supported; export another checkpoint of this model."
                )
        return stored

    def _slice(self, stored: str) -> Any:
        return self._where[stored].get_slice(stored)

    def _made(self, name: str) -> tuple[str, Conversions] | None:
        """The name to make a parameter under that no file holds as it is, and what makes it; None for others."""
        names = (name, self.tied.get(name, name))
        if self.model is None or any(each in self._where for each in names):
            return None
        conversions = self._renamed()
        return next(((each, conversions) for each in names if conversions.sources(each)), None)

    def _renamed(self) -> Conversions:
        """What parameters under other names are made of; it takes a while to find out."""
        if self._conversions is None:
            scales = tuple(f".{part}" for part in SCALE_NAMES) if self.scaling is not None else ()
            self._conversions = Conversions((key for key in self._where if not key.endswith(scales)), self.model)
        return self._conversions

    def _stored_name(self, name: str) -> str:
        for candidate in (name, self.tied.get(name, name)):
            if candidate in self._where:
                return candidate
        module = name.removesuffix(".weight")
        known = {parameter for parameter, _ in self.model.named_parameters()} if self.model is not None else set()
        parts = [stored for part in PARTS if (stored := f"{module}.{part}") in self._where]
        if parts or known & self._where.keys():
            lacking = f"{module}.qweight" if parts else name
            raise CheckpointError(
                f"The checkpoint is incomplete: it holds no tensor {lacking!r}, though it holds "
                f"{parts[0] if parts else min(known & self._where.keys())!r}. A file, or its entry in the index of "
                "shards, is missing, or config.json is another model's: copy or download it again in full."
            )
        raise CheckpointError(
            f"The checkpoint holds no tensor {name!r} (it holds {len(self._where)}, such as "
            f"{next(iter(self._where), 'none')!r}); its files do not belong to this architecture, or paceline does not "
            "support it."
        )
