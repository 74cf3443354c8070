"""Which files hold a checkpoint's weights, and whether they are whole.

Reads headers only, never the tensors: a truncated download is told in milliseconds. Knows nothing of architectures.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from paceline.bundle import check_safe_path
from paceline.errors import BundleError, CheckpointError

__all__ = [
    "FLOAT_KINDS",
    "check_gguf",
    "check_safetensors",
    "missing_weights",
    "num_tensors",
    "read_json",
    "safetensors_files",
    "stated_shards",
]

FLOAT_KINDS = ("F64", "F32", "F16", "BF16")  # plain floating-point numbers, as Safetensors names them
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MEND = "Copy or download it again in full."


def safetensors_files(folder: Path) -> tuple[Path, ...]:
    """The Safetensors files that hold a folder's weights, in order of their names, each checked against its header.

    Raises:
        CheckpointError: there are none (only pickles, only an adapter, …), a shard is missing, or a file is truncated.
    """
    if (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (folder / _INDEX).is_file():
        names = _shards(folder / _INDEX)
    else:
        raise CheckpointError(f"{folder} {missing_weights(path.name for path in folder.iterdir())}")
    for name in names:
        check_safetensors(folder / name)
    return tuple(folder / name for name in names)


def missing_weights(names: Iterable[str]) -> str:
    """Why a folder or repository with these files, none of them `model.safetensors`, is refused; and how to mend it."""
    names = sorted(names)
    if pickles := [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]:
        return (
            f"has its weights only as pickles ({', '.join(pickles[:3])}), which can run any code when they are loaded; "
            "paceline reads Safetensors and GGUF only. Convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…) writes model.safetensors."
        )
    if "adapter_config.json" in names:
        return "holds only an adapter; name its base model as the source, and this folder with --adapter."
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"has no model.safetensors but GGUF files ({', '.join(ggufs[:3])}); name one .gguf file as the source."
    return f"has neither model.safetensors nor {_INDEX}; paceline reads checkpoints in Safetensors or GGUF."


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a checkpoint's file.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}). {_MEND}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} should hold a JSON object, got {data!r:.80}.")
    return data


def stated_shards(files: Sequence[Path]) -> dict[str, Path]:
    """The file that each tensor is in, as the index beside several files says; empty for one file.

    Raises:
        CheckpointError: the index cannot be read.
    """
    if len(files) < 2:
        return {}
    weight_map = read_json(files[0].parent / _INDEX)["weight_map"]
    return {name: files[0].parent / file for name, file in cast(dict[str, str], weight_map).items()}


def _shards(index: Path) -> list[str]:
    """Names of the shards that an index lists, sorted, each one present."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to files. {_MEND}")
    names = sorted(set(weight_map.values()))
    for name in names:
        try:
            check_safe_path(name)
        except BundleError as error:
            raise CheckpointError(f"{index} names the file {name!r}, which is not a safe relative path.") from error
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the file {name!r}, which is not a .safetensors file.")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.parent}: the shard {name!r} is missing, one of {len(names)}. {_MEND}")
    return names


def check_safetensors(path: Path) -> None:
    """Check a Safetensors file's header and its size.

    Raises:
        CheckpointError: not Safetensors, or bytes are missing or left over; it names both sizes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            raise CheckpointError(
                f"{path} is truncated, or no Safetensors file: its header should take {length} bytes, the file "
                f"has {size}. {_MEND}"
            )
        header = file.read(length)
    try:
        tensors = json.loads(header)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not a Safetensors file: its header cannot be read ({error}). {_MEND}"
        ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = "truncated" if size < expected else "damaged"
        raise CheckpointError(f"{path} is {what}: it has {size} bytes, its header asks for {expected}. {_MEND}")


def num_tensors(path: Path) -> int:
    """The number of tensors in a Safetensors file that `check_safetensors` has found whole."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return len(header) - ("__metadata__" in header)


def check_gguf(path: Path) -> None:
    """Check a GGUF file's header and its size.

    gguf.GGUFReader takes 7 s for a vocabulary of 151,936, and does not say how many bytes are missing.

    Raises:
        CheckpointError: not GGUF, a version or tensor type that is not known, one part of several, truncated, or with
            counts that its tensors cannot have.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                expected = _gguf_size(data)
            except (struct.error, UnicodeDecodeError, RecursionError) as error:
                raise CheckpointError(
                    f"{path} is truncated or damaged: its header does not end within its {size} bytes. {_MEND}"
                ) from error
            except CheckpointError as error:
                raise CheckpointError(f"{path} {error}") from error
    if size < expected:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes, its tensors end at {expected}. {_MEND}")


# GGUF value types: 0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# What a model is built from: no more blocks than tensors, and nothing that is longer than the tensors' longest side.
_COUNTS = (
    *(".block_count", ".embedding_length", ".feed_forward_length", ".expert_count", ".vocab_size"),
    *(".attention.head_count", ".attention.head_count_kv", ".attention.key_length", ".attention.value_length"),
)


class _Cursor:
    """Little-endian reads that move on; a read past the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def take(self, code: str) -> int:
        value: int
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise struct.error("past the end")

    def text(self) -> str:
        length = self.take("Q")
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8")

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.skip(self.take("Q"))
        elif kind == _ARRAY:
            kind, count = self.take("I"), self.take("Q")
            if kind in _SCALARS:
                self.skip(count * struct.calcsize(_SCALARS[kind]))
            else:
                for _ in range(count):
                    self.skip_value(kind)
        elif kind in _SCALARS:
            self.skip(struct.calcsize(_SCALARS[kind]))
        else:
            raise CheckpointError(f"has a metadata value of the unknown type {kind}. {_MEND}")


def _gguf_size(data: mmap.mmap) -> int:
    """Bytes from the start of a GGUF file to the end of its last tensor."""
    from gguf.constants import GGML_QUANT_SIZES  # {type: (values in a block, bytes of a block)}

    cursor = _Cursor(data)
    if (version := cursor.take("I")) not in (2, 3):
        raise CheckpointError(f"has GGUF version {version}; paceline reads versions 2 and 3, little-endian.")
    num_tensors, num_values = cursor.take("Q"), cursor.take("Q")
    if not num_tensors:
        raise CheckpointError("holds no tensors, only metadata, such as a vocabulary; name a file with weights.")
    alignment = 32
    counts: dict[str, int] = {}
    for _ in range(num_values):
        key, kind = cursor.text(), cursor.take("I")
        if key == "general.alignment" and kind == 4:
            alignment = cursor.take("I")
        elif key == "split.count" and kind == 2 and (count := cursor.take("H")) > 1:
            raise CheckpointError(f"is one of {count} parts; merge them first with llama.cpp's gguf-split --merge.")
        elif key.endswith(_COUNTS) and kind in (4, 5, 10, 11):
            counts[key] = cursor.take(_SCALARS[kind])
        elif key != "split.count" or kind != 2:
            cursor.skip_value(kind)
    if alignment < 1:
        raise CheckpointError(f"asks for an alignment of {alignment} bytes. {_MEND}")
    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    end, longest = 0, 1
    for _ in range(num_tensors):
        cursor.text()
        if (num_dims := cursor.take("I")) > 8:
            raise CheckpointError(f"has a tensor of {num_dims} dimensions. {_MEND}")
        dims = [cursor.take("Q") for _ in range(num_dims)]
        num_elements, longest = math.prod(dims), max([longest, *dims])
        kind, offset = cursor.take("I"), cursor.take("Q")
        if kind not in block_sizes:
            raise CheckpointError(f"has a tensor of the unknown type {kind}; a newer gguf package may know it.")
        values, size = block_sizes[kind]
        end = max(end, offset + num_elements // values * size)
    for key, count in counts.items():  # before a model is built from them
        most, what = (num_tensors, "tensors") if key.endswith(".block_count") else (longest, "rows or columns")
        if count > most:
            raise CheckpointError(f"says {key} = {count:,}, and it has {most:,} {what} at most. {_MEND}")
    return -(-cursor.at // alignment) * alignment + end
