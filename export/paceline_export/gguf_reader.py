"""Reads weights, and what else is needed, from a GGUF file."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from paceline.errors import CheckpointError

from .quantize.packed import PackedWeight

__all__ = ["GGUF_KINDS", "GgufReader", "drop_foreign_tokens", "one_gguf_reader", "open_gguf"]

_CHUNK = 1 << 24  # elements
_GGUFReader = gguf.GGUFReader
# Those that gguf unpacks to what they stand for; others are integers, or have a scale in a tensor beside them (NVFP4).
GGUF_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)


class GgufReader:
    """Reads from a GGUF file, memory-mapped, unpacking a tensor when it is asked for."""

    def __init__(self, path: Path, model: torch.nn.Module, config: PreTrainedConfig, tied: Mapping[str, str]) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._path = path
        reader = open_gguf(str(path))
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        self._map: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = {parameter: tensors[name] for name, parameter in self._map.items() if name in tensors}
        self._tied = tied
        self._left_over = {name for name in tensors.keys() - self._map.keys() if not name.startswith("rope_f")}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter.

        Raises:
            CheckpointError: the file does not hold it, or in blocks that cannot be read.
        """
        tensor = self._tensor(name)
        if (kind := tensor.tensor_type.name) not in GGUF_KINDS:
            raise CheckpointError(
                f"The GGUF file holds {tensor.name!r} in blocks of the type {kind}; expected one of "
                f"{', '.join(GGUF_KINDS)}. Take another file of this model, such as Q8_0 or Q4_K_M."
            )
        return _shape(tensor)

    def read(self, name: str) -> torch.Tensor:
        """The parameter as float32.

        Raises:
            CheckpointError: the file does not hold it.
        """
        tensor = self._tensor(name)
        result = self._processor.process(
            weights=_unpack(self._path, tensor), name=tensor.name, tensor_key_mapping=self._map, parsed_parameters={}
        )
        return torch.from_numpy(np.ascontiguousarray(result.weights, np.float32))

    def packed(self, name: str) -> PackedWeight | None:
        """None: what a GGUF file holds in few bits is quantised anew."""
        return None

    def left_over(self) -> dict[str, str]:
        """Tensors that no parameter is made of, with the model's names for the layers that they are in."""
        stack = next((name.partition(".0.")[0] for name in self._map.values() if ".0." in name), "blk")
        return {name: re.sub(r"^blk(?=\.)", stack, name) for name in sorted(self._left_over)}

    def _tensor(self, name: str) -> Any:
        tensor = self._tensors.get(name) or self._tensors.get(self._tied.get(name, name))
        if tensor is None:
            raise CheckpointError(f"The GGUF file holds no tensor for the parameter {name!r}; it may be damaged.")
        return tensor


@functools.lru_cache(maxsize=2)  # a target and its draft
def open_gguf(path: str) -> Any:
    """A `gguf.GGUFReader`, which takes seconds to make where the vocabulary is large."""
    return _GGUFReader(path)


@contextmanager
def one_gguf_reader() -> Iterator[None]:
    """Let transformers read a GGUF's header once: configuration, tokenizer and weights would each parse it anew."""
    gguf.GGUFReader = open_gguf
    try:
        yield
    finally:
        gguf.GGUFReader = _GGUFReader


def drop_foreign_tokens(tokenizer: Any, path: Path) -> None:
    """Take out added tokens that a GGUF does not have.

    transformers adds GPT-2's `<|endoftext|>` to every vocabulary of bytes, and the model has no logits for it.
    """
    count = len(open_gguf(str(path)).fields["tokenizer.ggml.tokens"].data)
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = [token for token in settings["added_tokens"] if token["id"] < count]
    if len(kept) < len(settings["added_tokens"]):
        tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings | {"added_tokens": kept}))


def _shape(tensor: Any) -> tuple[int, ...]:
    """Shape of a GGUF tensor, which the file gives in reverse."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _unpack(path: Path, tensor: Any) -> NDArray[np.float32]:
    """Read and dequantise a GGUF tensor, some rows at a time, since its blocks are held in several copies meanwhile.

    Read, not mapped: pages of the mapping that the file's header was read from would stay this process's memory.
    """
    shape, stored = _shape(tensor), tensor.data
    if len(shape) < 2:
        return np.array(gguf.dequantize(stored, tensor.tensor_type), np.float32).reshape(shape)
    weights = np.empty(shape, np.float32)
    step = max(1, _CHUNK // int(np.prod(shape[1:])))
    with path.open("rb") as file:
        file.seek(int(tensor.data_offset))
        for start in range(0, shape[0], step):
            part = weights[start : start + step]
            blocks = np.fromfile(file, stored.dtype, len(part) * stored[0].size).reshape(len(part), *stored.shape[1:])
            part[...] = gguf.dequantize(blocks, tensor.tensor_type)
    return weights
