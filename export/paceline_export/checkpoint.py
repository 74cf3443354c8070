"""Read a checkpoint: its configuration, its tokenizer, and its weights one tensor at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError

from .adapter import AdaptedReader, Adapter
from .conversion import Conversions
from .quantize.packed import PARTS, PackedWeight, Packing, packed_shape, repack, unpacked
from .quantize.scaled import SCALE_KINDS, SCALE_NAMES, SCALED_KINDS, Scaling, unscaled
from .source import Source
from .weights import FLOAT_KINDS, num_tensors, read_json

_CHUNK = 1 << 24  # elements
_GGUFReader = gguf.GGUFReader
# Those that gguf unpacks to what they stand for; others are integers, or have a scale in a tensor beside them (NVFP4).
_GGUF_KINDS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)

__all__ = ["Checkpoint", "WeightReader"]


class WeightReader(Protocol):
    """Reads weights by the name of the model's parameter."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter, without reading it; raises CheckpointError where there is none."""

    def read(self, name: str) -> torch.Tensor:
        """The parameter as a float32 tensor of its own."""

    def packed(self, name: str) -> PackedWeight | None:
        """The parameter in few bits, where the checkpoint holds it quantised in blocks; None elsewhere."""


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
        for path in self.files:
            try:
                handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}). Copy or download it again in full.") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))
            self._paths.update(dict.fromkeys(handle.keys(), path))

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

    def _shape(self, stored: str) -> tuple[int, ...]:
        """Shape of a stored tensor, which is of floating-point numbers, or of others with scales."""
        tensor = self._slice(stored)
        shape = tuple(tensor.get_shape())
        scaled = self._scale_name(stored) is not None
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
        with safe_open(str(self._paths[stored]), framework="pt") as handle:
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
        if self._conversions is None:
            scales = tuple(f".{part}" for part in SCALE_NAMES) if self.scaling is not None else ()
            self._conversions = Conversions((key for key in self._where if not key.endswith(scales)), self.model)
        conversions = self._conversions
        return next(((each, conversions) for each in names if conversions.sources(each)), None)

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


class GgufReader:
    """Reads from a GGUF file, memory-mapped, unpacking a tensor when it is asked for."""

    def __init__(self, path: Path, model: torch.nn.Module, config: PreTrainedConfig, tied: Mapping[str, str]) -> None:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._path = path
        reader = _gguf_file(str(path))
        architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        self._map: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._tensors = {parameter: tensors[name] for name, parameter in self._map.items() if name in tensors}
        self._tied = tied

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the parameter.

        Raises:
            CheckpointError: the file does not hold it, or in blocks that cannot be read.
        """
        tensor = self._tensor(name)
        if (kind := tensor.tensor_type.name) not in _GGUF_KINDS:
            raise CheckpointError(
                f"The GGUF file holds {tensor.name!r} in blocks of the type {kind}; expected one of "
                f"{', '.join(_GGUF_KINDS)}. Take another file of this model, such as Q8_0 or Q4_K_M."
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

    def _tensor(self, name: str) -> Any:
        tensor = self._tensors.get(name) or self._tensors.get(self._tied.get(name, name))
        if tensor is None:
            raise CheckpointError(f"The GGUF file holds no tensor for the parameter {name!r}; it may be damaged.")
        return tensor


@functools.lru_cache(maxsize=2)  # a target and its draft
def _gguf_file(path: str) -> Any:
    """A `gguf.GGUFReader`, which takes seconds to make where the vocabulary is large."""
    return _GGUFReader(path)


@contextmanager
def _one_gguf_reader() -> Iterator[None]:
    """Let transformers read a GGUF's header once: configuration, tokenizer and weights would each parse it anew."""
    gguf.GGUFReader = _gguf_file
    try:
        yield
    finally:
        gguf.GGUFReader = _GGUFReader


def _tokenizer_part(source: Source) -> str:
    """What a checkpoint's tokenizer is read from, as a message calls it.

    Raises:
        CheckpointError: it is missing, or no JSON.
    """
    if source.gguf_file:
        fields = _gguf_file(str(source.folder / source.gguf_file)).fields
        kind = fields.get("tokenizer.ggml.model")
        needed = ["tokenizer.ggml.model", "tokenizer.ggml.tokens"]
        if kind is not None and bytes(kind.parts[-1]) == b"gpt2":
            needed.append("tokenizer.ggml.merges")
        if missing := [key for key in needed if key not in fields]:
            raise CheckpointError(
                f"{source.name} has no {' and no '.join(missing)}: its tokenizer is missing or incomplete. Take a GGUF "
                "file that holds its vocabulary too."
            )
        return "its tokenizer"
    path = source.folder / "tokenizer.json"
    if path.is_file():
        read_json(path)
        return f"its tokenizer ({path})"
    return f"its tokenizer: {source.folder} has no tokenizer.json, take it from where the checkpoint came from"


def _drop_foreign_tokens(tokenizer: Any, path: Path) -> None:
    """Take out added tokens that a GGUF does not have.

    transformers adds GPT-2's `<|endoftext|>` to every vocabulary of bytes, and the model has no logits for it.
    """
    count = len(_gguf_file(str(path)).fields["tokenizer.ggml.tokens"].data)
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is present on disk.

    `end_tokens` are the ids that its settings say end a text; None where no settings came with it, as in a GGUF file.
    `packing` tells how projections are packed that the checkpoint holds quantised, and `scaling` how those are
    scaled that it holds in 8 bits; None where it holds none. `adapter` is merged into the weights as they are read.
    `has_tied_head` says that the checkpoint's LM head is its embedding table; an adapter may make two of them.
    """

    source: Source
    config: PreTrainedConfig
    tokenizer: Any  # a fast tokenizer of transformers
    generation_config: Mapping[str, Any]
    end_tokens: frozenset[int] | None
    packing: Packing | None = None
    scaling: Scaling | None = None
    adapter: Adapter | None = None
    has_tied_head: bool = False

    @classmethod
    def open(cls, source: Source, adapter: Path | None = None) -> Checkpoint:
        """Read configuration and tokenizer; weights stay on disk.

        Args:
            source: of the checkpoint.
            adapter: folder of a LoRA adapter that was trained on it, in the format of the package `peft`.

        Raises:
            CheckpointError: an unknown architecture, sizes that no decoder has, no fast tokenizer, settings that
                make no sense, or an adapter that cannot be merged.
        """
        opened = Adapter.open(adapter) if adapter is not None else None
        if not source.gguf_file:  # before transformers divides by what stands there
            stated_sizes = read_json(source.folder / "config.json")
            _check_counts(source.name, stated_sizes.get)
            _check_against_weights(source, stated_sizes)
        file = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        part = "this checkpoint"
        try:
            with _one_gguf_reader():
                config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, **file)
                part = _tokenizer_part(source)
                tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False, **file)
                if source.gguf_file:
                    _drop_foreign_tokens(tokenizer, source.folder / source.gguf_file)
        except CheckpointError:
            raise
        except Exception as error:  # its files may hold anything, and transformers may stumble over it anyhow
            hint = "; a size in its configuration is probably 0" if isinstance(error, ArithmeticError) else ""
            raise CheckpointError(f"{source.name}: transformers cannot read {part}: {error}{hint}") from error
        packing = scaling = None
        if not source.gguf_file and (settings := getattr(config, "quantization_config", None)):
            scaling = Scaling.from_config(source.name, settings)
            packing = Packing.from_config(source.name, settings) if scaling is None else None
            del config.quantization_config  # what is built from the configuration holds plain weights
        if not getattr(tokenizer, "is_fast", False):
            raise CheckpointError(f"{source.name}: only tokenizers with a tokenizer.json form are supported.")
        _check_sizes(source.name, config)
        template = tokenizer.chat_template
        templates = template.values() if isinstance(template, dict) else [template or ""]
        if not all(isinstance(text, str) and not re.search(r"[\ud800-\udfff]", text) for text in templates):
            raise CheckpointError(
                f"{source.name}: the chat_template of its tokenizer is {template!r:.80}; expected a text that "
                "UTF-8 can hold, or such texts by name. Take tokenizer_config.json from where the checkpoint came from."
            )
        names = template if isinstance(template, dict) else ()
        if odd := [name for name in names if not re.fullmatch(r"[\w.-]{1,64}", name)]:
            raise CheckpointError(
                f"{source.name}: a chat template of its tokenizer is named {odd[0]!r:.80}; expected letters, digits, "
                "'_', '-' and '.', since it becomes the name of a file. Rename it in tokenizer_config.json."
            )
        path = source.folder / "generation_config.json"
        if path.is_file():
            generation = read_json(path)
            stated = _end_tokens(path, generation)
        else:
            generation = GenerationConfig.from_model_config(config).to_diff_dict()
            # transformers takes these, too; a GGUF keeps one end token of several, so there they say too little.
            stated = None if source.gguf_file else _end_tokens(source.folder / "config.json", generation)
        if opened is not None and packing is not None:
            raise CheckpointError(
                f"{source.name} is quantised already ({packing.method}), and merging {opened.name} would quantise it "
                "anew. Name the unquantised checkpoint of this model as the source."
            )
        has_tied_head = bool(config.tie_word_embeddings)
        if opened is not None and has_tied_head and opened.changes.keys() & _tied_names(config):
            config.tie_word_embeddings = False
        return cls(source, config, tokenizer, generation, stated, packing, scaling, opened, has_tied_head)

    @classmethod
    def of_bundle(cls, bundle: Bundle, draft: Checkpoint | None = None) -> Checkpoint:
        """What a bundle knows of its target's checkpoint: configuration and tokenizer, but no weights to read.

        Where several ids end a text, the tokenizer's own is that of `draft` if it is among them.
        """
        entry, tokenizer = bundle.manifest.target, bundle.manifest.tokenizer
        ends = list(tokenizer.eos_token_ids)
        if draft is not None and (own := draft.tokenizer.eos_token_id) in ends:
            ends = [own]
        ends = [end for end in ends if end != tokenizer.pad_token_id] or ends
        backend = tokenizers.Tokenizer.from_file(str(bundle.path("tokenizer.json")))

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else backend.id_to_token(token_id)

        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token=text(tokenizer.bos_token_id),
            eos_token=text(ends[0] if ends else None),
            pad_token=text(tokenizer.pad_token_id),
        )
        config = AutoConfig.from_pretrained(bundle.path(f"{Path(entry.path).parent.as_posix()}/config.json"))
        source = Source(entry.source.name, entry.source.kind, bundle.root, None, (bundle.path(entry.path),))
        return cls(source, config, wrapped, {}, frozenset(tokenizer.eos_token_ids))

    def first_layers(self, count: int) -> Checkpoint:
        """A shallower model of the same weights: the first `count` layers, then the model's own norm and head.

        Raises:
            InvalidInputError: the model has not more layers than that.
        """
        whole = getattr(self.config, "num_hidden_layers", None)
        if not isinstance(whole, int) or not 1 <= count < whole:
            raise InvalidInputError(
                f"{self.source.name} has {whole} layers, so a draft of its first {count} is not possible; choose from "
                f"1 to {(whole or 1) - 1}."
            )
        config = copy.deepcopy(self.config)
        config.num_hidden_layers = count
        for name, value in config.to_dict().items():  # lists with an entry for each layer, such as layer_types
            if isinstance(value, list) and len(value) == whole:
                setattr(config, name, getattr(config, name)[:count])
        if isinstance(window := getattr(config, "max_window_layers", None), int):
            config.max_window_layers = min(window, count)
        source = dataclasses.replace(self.source, name=f"{self.source.name}, first {count} of {whole} layers")
        adapter = self.adapter.first_layers(count) if self.adapter is not None else None
        return dataclasses.replace(self, source=source, config=config, adapter=adapter)

    def weights(self, model: torch.nn.Module) -> WeightReader:
        """A reader for the parameters of `model`, which needs no storage of its own."""
        tied = dict(getattr(model, "_tied_weights_keys", None) or {}) if self.has_tied_head else {}
        reader: WeightReader
        if self.source.gguf_file:
            reader = GgufReader(self.source.folder / self.source.gguf_file, model, self.config, tied)
        else:
            reader = SafetensorsReader(self.source.weight_files, tied, self.packing, self.scaling, model)
        return reader if self.adapter is None else AdaptedReader(reader, self.adapter, model)


def _tied_names(config: PreTrainedConfig) -> set[str]:
    """Names of the parameters that are one where a model of this configuration has a tied head."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names = getattr(kind, "_tied_weights_keys", None) or {}
    return {*names, *names.values()}


_COUNTS = (
    *("num_hidden_layers", "max_position_embeddings", "max_seq_len", "seq_length", "vocab_size"),
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
)


def _check_counts(name: str, stated: Callable[[str], Any]) -> None:
    """Check the numbers that a decoder is built from, where they are stated; transformers takes many as they are.

    Raises:
        CheckpointError: one of them is not a positive whole number.
    """
    for setting in _COUNTS:
        value = stated(setting)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise _no_decoder(name, f"{setting}={value!r:.80}", "a whole number of at least 1")


_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)


def _check_against_weights(source: Source, settings: Mapping[str, Any]) -> None:
    """Check that a checkpoint's files can hold what its configuration asks for, before a model of it is built.

    Raises:
        CheckpointError: more layers than tensors, or a size beyond the number of weights.
    """
    tensors = sum(num_tensors(path) for path in source.weight_files)
    weights = 8 * sum(path.stat().st_size for path in source.weight_files)  # of a bit each at least
    for names, most, what in ((_LAYERS, tensors, "tensors"), (_SIZES, weights, "weights")):
        for setting in names:
            value = settings.get(setting)
            if isinstance(value, int) and value > most:
                raise _no_decoder(
                    source.name, f"{setting}={value!r:.40}", f"at most {most:,}, since its files hold no more {what}"
                )


def _check_epsilons(name: str, config: PreTrainedConfig) -> None:
    """Check what norms add to a variance before they divide by its root.

    Raises:
        CheckpointError: it is no finite number of at least 0.
    """
    for setting, value in config.to_dict().items():
        if not re.fullmatch(r"(.*_)?(layer_?)?norm_(eps|epsilon)|epsilon", setting) or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise _no_decoder(name, f"{setting}={value!r:.40}", "a small number of at least 0, such as 1e-06")


_ROTATION = ("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


def _check_rotation(name: str, config: PreTrainedConfig) -> None:
    """Check the numbers of a rotation, or of one for each kind of layer; transformers only warns of others.

    Raises:
        CheckpointError: one of them is none.
    """
    stated = getattr(config, "rope_parameters", None)
    kinds = [stated, *stated.values()] if isinstance(stated, dict) else []
    for kind in kinds:
        for setting in _ROTATION if isinstance(kind, dict) else ():
            value = kind.get(setting)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
                raise _no_decoder(name, f"{setting}={value!r:.40} in its rope_parameters", "a number")


def _check_sizes(name: str, config: PreTrainedConfig) -> None:
    """Check the numbers that a decoder is built from, and that they go together.

    Raises:
        CheckpointError: they do not, or one of them is not a positive whole number, or there is no vocabulary.
    """
    _check_counts(name, lambda setting: getattr(config, setting, None))
    _check_epsilons(name, config)
    _check_rotation(name, config)
    if getattr(config, "vocab_size", None) is None:
        raise CheckpointError(
            f"{name} is no plain decoder of text: its configuration ({config.model_type!r}) has no vocab_size "
            "of its own. paceline exports plain decoders only."
        )
    hidden, heads, kv_heads, head_size = (
        getattr(config, setting, None)
        for setting in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads is None or hidden is None:
        return  # not a transformer; the trace says why it is not supported
    if kv_heads is not None and heads % kv_heads:
        raise _no_decoder(
            name, f"num_attention_heads={heads} and num_key_value_heads={kv_heads}", "as many or a whole multiple"
        )
    if head_size is None and hidden % heads:
        raise _no_decoder(
            name, f"hidden_size={hidden} and num_attention_heads={heads}", "a whole multiple, or a head_dim"
        )


def _no_decoder(name: str, setting: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: its configuration has {setting}; expected {expected}. Take config.json from where the checkpoint "
        "came from."
    )


def _end_tokens(path: Path, settings: Mapping[str, Any]) -> frozenset[int] | None:
    """The ids that settings of generation say end a text, or None where they say nothing.

    Raises:
        CheckpointError: what they say is neither a token id nor a list of them.
    """
    stated = settings.get("eos_token_id")
    if stated is None or stated == []:
        return None
    ids = stated if isinstance(stated, list) else [stated]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{path}: eos_token_id is {stated!r:.80}; expected a token id, which is a whole number of at least 0, or a "
            "list of them. Correct it there, or take the file from where the checkpoint came from."
        )
    return frozenset(ids)
