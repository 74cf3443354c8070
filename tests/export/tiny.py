"""Tiny checkpoints with random weights, written as transformers writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from paceline_export.export import export_bundle
from paceline_export.source import resolve

SPECIAL = ("<s>", "</s>", "<pad>")


def tiny_tokenizer(extra: Sequence[str] = (), *, bos: str = "<s>") -> PreTrainedTokenizerFast:
    """Bytes, a few merges, three special tokens, then `extra`: 262 ids and those of `extra`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary = {text: i for i, text in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>", pad_token="<pad>")
    if extra:
        tokenizer.add_tokens(list(extra))
    return tokenizer


def tiny_checkpoint(
    folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast | None = None, *, seed: int = 0
) -> Path:
    """Save a random model of this configuration with its tokenizer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:  # spread the logits, so that best tokens are told apart
                parameter.mul_(8)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def tiny_pair(folder: Path, precision: str = "fp32", **options: Any) -> Path:
    """Export a target and a smaller draft to a bundle inside `folder`."""
    target = tiny_checkpoint(folder / "target", LlamaConfig(**sizes()))
    draft = tiny_checkpoint(folder / "draft", LlamaConfig(**sizes(num_hidden_layers=1)), seed=1)
    options = {"precision": precision, "quality": False, **options}
    export_bundle(resolve(str(target)), resolve(str(draft)), folder / "bundle", **options)
    return folder / "bundle"


def sizes(**changes: Any) -> dict[str, Any]:
    """Sizes that most configurations of transformers share."""
    return {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 259,
        "eos_token_id": 260,
        "pad_token_id": 261,
    } | changes


# With heads of 64 numbers, for which TensorRT-RTX has a kernel.
TRT_CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**sizes(hidden_size=128, head_dim=64, tie_word_embeddings=True)),
    "mistral": MistralConfig(**sizes(hidden_size=128, head_dim=64, sliding_window=16, num_key_value_heads=4)),
    "cohere": CohereConfig(**sizes(hidden_size=256)),
}


def tiny_trt(folder: Path, config: PreTrainedConfig, precision: str, **options: Any) -> Path:
    """Export a bundle of the flavour `trt`, with the same model as its draft if that is given a precision."""
    source = resolve(str(tiny_checkpoint(folder / "model", config)))
    draft = source if "draft_precision" in options else None
    options = {"flavor": "trt", "precision": precision, "calibration": "none", "quality": False, **options}
    export_bundle(source, draft, folder / "bundle", **options)
    return folder / "bundle"
