"""Writes a tiny GGUF file of a qwen2 model with random weights, its tokenizer and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from tiny import tiny_tokenizer

WIDTH = 256  # a block of the largest kinds
TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{{ eos_token }}{% endfor %}"
Blocks = NDArray[np.uint8]


def weights(*, tied: bool, layers: int = 1, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights by their names in a GGUF file; keys and values have half as many heads."""
    random = np.random.default_rng(seed)

    def matrix(rows: int) -> NDArray[np.float32]:
        return (random.standard_normal((rows, WIDTH)) * 0.1).astype(np.float32)

    found = {"token_embd.weight": matrix(262), "output_norm.weight": np.ones(WIDTH, np.float32)}
    if not tied:
        found["output.weight"] = matrix(262)
    for i in range(layers):
        for name, rows in (("attn_q", WIDTH), ("attn_k", WIDTH // 2), ("attn_v", WIDTH // 2)):
            found[f"blk.{i}.{name}.weight"] = matrix(rows)
            found[f"blk.{i}.{name}.bias"] = matrix(1)[0, :rows]
        for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            found[f"blk.{i}.{name}.weight"] = matrix(WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            found[f"blk.{i}.{name}.weight"] = np.ones(WIDTH, np.float32)
    return found


def write(
    path: Path,
    tensors: dict[str, NDArray[np.float32]],
    blocks: dict[str, tuple[Blocks, Kind]],
    scaling: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """Write a file of float32 tensors, except those that are given as blocks.

    `scaling` is that of the rotation, `keys` are more of the tokenizer's metadata.
    """
    writer = gguf.GGUFWriter(path, "qwen2")
    for name, value in (
        ("context_length", 256),
        ("embedding_length", WIDTH),
        ("feed_forward_length", WIDTH),
        ("block_count", sum(name.endswith("attn_q.weight") for name in tensors)),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("vocab_size", 262),
    ):
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen2.rope.freq_base", 10000.0)
    for name, value in (scaling or {}).items():
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](f"qwen2.rope.scaling.{name}", value)
    backend = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"] | {token["content"]: token["id"] for token in backend["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>", "<pad>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    for name in ("bos", "eos", "padding"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", {"bos": 259, "eos": 260, "padding": 261}[name])
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    for name, tensor in tensors.items():
        if name in blocks:
            packed, kind = blocks[name]
            writer.add_tensor(name, packed, raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
