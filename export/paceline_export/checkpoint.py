"""Read a checkpoint: its configuration, its tokenizer, and its weights one tensor at a time."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
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
from .config_checks import check_against_weights, check_counts, check_sizes
from .gguf_reader import GgufReader, drop_foreign_tokens, one_gguf_reader, open_gguf
from .gguf_rotation import scale_rotation
from .quantize.packed import Packing
from .quantize.scaled import Scaling
from .safetensors_reader import SafetensorsReader
from .source import Source
from .weight_reader import WeightReader
from .weights import read_json

__all__ = ["Checkpoint"]


def _check_gguf(source: Source) -> None:
    """Check that a GGUF file says how many layers it has, and holds what a tokenizer is made of.

    Raises:
        CheckpointError: a part is missing.
    """
    fields = open_gguf(str(source.folder / str(source.gguf_file))).fields
    if not any(key.endswith(".block_count") for key in fields):
        raise CheckpointError(
            f"{source.name} does not say how many layers it has (block_count). Copy or download it again in full."
        )
    kind = fields.get("tokenizer.ggml.model")
    needed = ["tokenizer.ggml.model", "tokenizer.ggml.tokens"]
    if kind is not None and bytes(kind.parts[-1]) == b"gpt2":
        needed.append("tokenizer.ggml.merges")
    if missing := [key for key in needed if key not in fields]:
        raise CheckpointError(
            f"{source.name} has no {' and no '.join(missing)}: its tokenizer is missing or incomplete. Take a GGUF "
            "file that holds its vocabulary too."
        )


def _named_tokenizer(source: Source) -> str:
    """A tokenizer that cannot be read, as a message calls it.

    Raises:
        CheckpointError: it is no JSON.
    """
    path = source.folder / "tokenizer.json"
    if source.gguf_file:
        return "its tokenizer"
    if not path.is_file():
        return f"its tokenizer: {source.folder} has no tokenizer.json, take it from where the checkpoint came from"
    read_json(path)
    return f"its tokenizer ({path})"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is present on disk.

    `end_tokens` are the ids that its settings say end a text; None where no settings came with it, as in a GGUF file.
    `packing` tells how projections are packed that the checkpoint holds quantised, and `scaling` how those are
    scaled that it holds in 8 bits; None where it holds none. `adapter` is merged into the weights as they are read.
    `has_tied_head` says that the checkpoint's LM head is its embedding table; an adapter may make two of them.
    `cut` says that its files hold more layers than the configuration says.
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
    cut: bool = False

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
            check_counts(source.name, stated_sizes.get)
            check_against_weights(source, stated_sizes)
        file = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        config = None
        try:
            with one_gguf_reader():
                config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False, **file)
                if source.gguf_file:
                    scale_rotation(config, source.folder / source.gguf_file)
                    _check_gguf(source)
                tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False, **file)
                if source.gguf_file:
                    drop_foreign_tokens(tokenizer, source.folder / source.gguf_file)
        except CheckpointError:
            raise
        except Exception as error:  # its files may hold anything, and transformers may stumble over it anyhow
            part = _named_tokenizer(source) if config is not None else "this checkpoint"
            hint = "; a size in its configuration is probably 0" if isinstance(error, ArithmeticError) else ""
            raise CheckpointError(f"{source.name}: transformers cannot read {part}: {error}{hint}") from error
        packing = scaling = None
        if not source.gguf_file and (settings := getattr(config, "quantization_config", None)):
            scaling = Scaling.from_config(source.name, settings)
            packing = Packing.from_config(source.name, settings) if scaling is None else None
            del config.quantization_config  # what is built from the configuration holds plain weights
        if not getattr(tokenizer, "is_fast", False):
            raise CheckpointError(f"{source.name}: only tokenizers with a tokenizer.json form are supported.")
        check_sizes(source.name, config)
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
        return dataclasses.replace(self, source=source, config=config, adapter=adapter, cut=True)

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
