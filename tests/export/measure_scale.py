"""Measure the memory, disk and time of an export of a random checkpoint of any size; it is deleted afterwards.

    python tests/export/measure_scale.py 7b FOLDER [--zeros] [options of `paceline export`]

Writes a bfloat16 checkpoint of that shape into FOLDER, shard by shard, exports it in a process of its own, and prints
its largest resident size (as `/usr/bin/time -v` says it), how much of it was its own, and the ratio to the checkpoint.
Then the bundle generates 4 tokens. With --zeros the weights are holes in files: the checkpoint takes no disk.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

# hidden_size, intermediate_size, layers, heads, KV heads, head_dim, vocab_size, tied head
SHAPES: dict[str, tuple[type[PreTrainedConfig], int, int, int, int, int, int, int, bool]] = {
    "0.1b": (LlamaConfig, 576, 1536, 30, 9, 3, 64, 49152, True),  # SmolLM2
    "1b": (LlamaConfig, 2048, 8192, 16, 32, 8, 64, 128256, True),  # Llama 3.2
    "3b": (LlamaConfig, 3072, 8192, 28, 24, 8, 128, 128256, True),  # Llama 3.2
    "llama-7b": (LlamaConfig, 4096, 11008, 32, 32, 32, 128, 32000, False),  # Llama 2
    "7b": (Qwen2Config, 3584, 18944, 28, 28, 4, 128, 152064, False),  # Qwen2.5
    "70b": (LlamaConfig, 8192, 28672, 80, 64, 8, 128, 128256, False),  # Llama 3
}
SHARD = 1_500_000_000  # bytes


def configuration(name: str) -> PreTrainedConfig:
    """The configuration of a shape."""
    kind, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, tied = SHAPES[name]
    return kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        bos_token_id=259,
        eos_token_id=260,
        pad_token_id=261,
    )


def parameters(config: PreTrainedConfig) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of a model's parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        yield name, parameter.shape


def write_checkpoint(config: PreTrainedConfig, folder: Path, *, zeros: bool) -> int:
    """Write a model of this configuration with a tiny tokenizer; returns its bytes.

    Weights are cut from one pool of random numbers, since neither memory nor time depend on what they are. With `zeros`
    they are holes in files, which take no disk.
    """
    folder.mkdir(parents=True)
    pool = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    pool_bytes = pool.view(torch.uint8).numpy().tobytes()
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, shape in parameters(config):
        count = 2 * shape.numel()
        if sizes[-1] and sizes[-1] + count > SHARD:
            shards.append({})
            sizes.append(0)
        offsets = [sizes[-1], sizes[-1] + count]
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        sizes[-1] += count
    weight_map: dict[str, str] = {}
    for index, (header, size) in enumerate(zip(shards, sizes, strict=True), 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(header, file)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            if zeros:
                out.truncate(8 + len(text) + size)
            else:
                for start in range(0, size, len(pool_bytes)):
                    out.write(pool_bytes[: min(len(pool_bytes), size - start)])
    index_text = json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(sizes)


def run(*arguments: str) -> tuple[int, float, dict[str, int]]:
    """Run `paceline`; its exit code, the seconds it took, and its largest resident sizes in bytes.

    These are all of it, what is its own, and what is pages of mapped files, each at its largest.
    """
    started = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "paceline_tools", *arguments])
    peaks = {"VmHWM": 0, "RssAnon": 0, "RssFile": 0}
    while (code := child.poll()) is None:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in peaks:
                    peaks[key] = max(peaks[key], 1024 * int(value.split()[0]))
        time.sleep(0.05)
    return code, time.perf_counter() - started, peaks


def main() -> None:
    zeros = "--zeros" in sys.argv
    name, place, *options = [argument for argument in sys.argv[1:] if argument != "--zeros"]
    folder = Path(place)
    checkpoint, bundle = folder / f"random-{name}", folder / f"bundle-{name}"
    if checkpoint.exists() or bundle.exists():
        sys.exit(f"{checkpoint} or {bundle} exists already.")
    try:
        size = write_checkpoint(configuration(name), checkpoint, zeros=zeros)
        shards = len(list(checkpoint.glob("*.safetensors")))
        print(f"checkpoint: {size / 2e9:.2f} billion parameters, {size / 1e9:.2f} GB, {shards} shards", flush=True)
        options = options or ["--calibration", "none", "--no-quality"]
        code, seconds, peaks = run("export", "--target", str(checkpoint), "-o", str(bundle), *options)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"export: exit code {code} after {seconds:.0f} s")
        print(f"largest resident size {peak / 1e9:.2f} GB, {peak / size:.2f} of the checkpoint")
        print(f"its own: {peaks['RssAnon'] / 1e9:.2f} GB; of mapped files: {peaks['RssFile'] / 1e9:.2f} GB")
        if code:
            sys.exit(code)
        sizes = [path.stat().st_size for path in bundle.rglob("*") if path.is_file()]
        print(f"bundle: {sum(sizes) / 1e9:.2f} GB; largest file {max(sizes) / 1e9:.2f} GB", flush=True)
        shutil.rmtree(checkpoint)
        code, seconds, peaks = run("generate", str(bundle), "--prompt", "the", "--max-new-tokens", "4")
        print(f"generate, 4 tokens: exit code {code} after {seconds:.0f} s; largest {peaks['VmHWM'] / 1e9:.2f} GB")
        sys.exit(code)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)


if __name__ == "__main__":
    main()
