"""Print what the loop around the models costs: `python tests/runtime/measure_loop.py BUNDLE`, beside issue 4's bars.

Import and loading are medians over fresh processes, with files that were read just before. Then one process writes
four texts by turns, a step of each: plain and planned decoding, behind a short and a long prompt; the prompts are the
runtime's own source. At last both long texts go on alone, and the memory that they add is compared with the keys and
values that they add.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import paceline
from paceline import Bundle, Generation, SpeculativeDecoder

IMPORT = "import time; t = time.perf_counter(); import paceline; print(time.perf_counter() - t)"
LOAD = """
import sys, time, paceline
t = time.perf_counter()
decoder = paceline.load(sys.argv[1])
print(time.perf_counter() - t)
"""
FRESH_RUNS = 5
WAYS = {"plain": {"num_draft_tokens": 0}, "planned": {}}
MEGABYTE = 1e6


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("bundle", type=Path)
    made.add_argument("--short", type=int, default=256, help="tokens of the short prompt (default: %(default)s)")
    made.add_argument("--long", type=int, default=8192, help="tokens of the long prompt (default: %(default)s)")
    made.add_argument("--steps", type=int, default=64, help="timed steps of each text (default: %(default)s)")
    made.add_argument("--more-tokens", type=int, default=500, help="of each long text, for its memory (default: 500)")
    return made


def line(name: str, figure: str, bar: str = "") -> None:
    print(f"{name:58} {figure:>24}   {bar}", flush=True)


def fresh(code: str, *arguments: str) -> list[float]:
    """Seconds that fresh processes print; the first run only warms the files."""
    runs = []
    for _ in range(FRESH_RUNS + 1):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        runs.append(float(done.stdout))
    return runs[1:]


def resident_bytes() -> int:
    """Memory of this process now, mapped files included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """The most memory that this process has held."""
    for row in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if row.startswith("VmHWM:"):
            return int(row.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def kv_bytes(bundle: Bundle, generation: Generation, *, drafts: bool) -> int:
    """Bytes of keys and values that a text holds by now, in both models."""
    models = [bundle.manifest.target, bundle.manifest.draft if drafts else None]
    positions = generation.stats.prompt_tokens + generation.stats.new_tokens
    return sum(model.kv_bytes_per_position for model in models if model) * positions


def source_ids(decoder: SpeculativeDecoder, count: int) -> list[int]:
    """Token ids of the runtime's own source, which does not repeat itself as a filler would."""
    assert decoder.tokenizer is not None
    ids: list[int] = []
    for path in sorted(Path(paceline.__file__).parent.rglob("*.py")):
        ids += decoder.tokenizer.encode(path.read_text(encoding="utf-8"))
        if len(ids) >= count:
            return ids[:count]
    raise SystemExit(f"The runtime's source has {len(ids)} tokens only; ask for a shorter --long.")


def write(generation: Iterator[object], steps: int) -> None:
    for _ in range(steps):
        next(generation)


def measure_loop(bundle: Bundle, lengths: Sequence[int], steps: int, more_tokens: int) -> None:
    decoder = dataclasses.replace(paceline.load(bundle.root), eos_token_ids=())
    ids = source_ids(decoder, max(lengths))
    write(decoder.generate(ids[:64], max_new_tokens=16), 4)  # the first runs allocate
    after_load = resident_bytes()
    texts: dict[tuple[str, int], Generation] = {}
    for length in lengths:
        for way, arguments in WAYS.items():
            # A step writes at most 13 tokens: the caches have room for all steps, and for what follows.
            tokens = 13 * steps + 13 + more_tokens
            texts[way, length] = decoder.generate(ids[:length], max_new_tokens=tokens, **arguments)  # type: ignore[arg-type]
            write(texts[way, length], 1)
            target_s = texts[way, length].stats.prefill_s
            line(f"time to first token, {way}, prompt of {length}", f"{target_s:.2f} s")
            write(texts[way, length], 1)
            if draft_s := texts[way, length].stats.prefill_s - target_s:
                line(f"… and the draft's pass over the prompt, {way}", f"{draft_s:.2f} s")
    for _ in range(steps):
        for generation in texts.values():
            next(generation)
    for way in WAYS:
        short, long = (texts[way, length].stats.ms_per_token or 0.0 for length in lengths)
        bar = "at most 1.6" if way == "plain" else "other text, other acceptance: no bar"
        line(f"per token, {way}, at {lengths[0]} and at {lengths[1]} tokens", f"{short:.1f} and {long:.1f} ms")
        line(f"per token, {way}, ratio", f"{long / short:.2f}", bar)
    for (way, _), generation in texts.items():
        if generation.stats.prompt_tokens != lengths[1]:
            continue
        before, kv_before = resident_bytes(), kv_bytes(bundle, generation, drafts=way == "planned")
        tokens = generation.stats.new_tokens
        while generation.stats.new_tokens < tokens + more_tokens:
            next(generation)
        grown = resident_bytes() - before
        kv = kv_bytes(bundle, generation, drafts=way == "planned") - kv_before
        line(
            f"memory added by {generation.stats.new_tokens - tokens} tokens, {way}, at {lengths[1]}",
            f"{grown / MEGABYTE:.1f} MB",
            f"their keys and values, if both models wrote all: {kv / MEGABYTE:.1f} MB",
        )
    files = sum(entry.size for name, entry in bundle.manifest.files.items() if name.startswith(("target/", "draft/")))
    caches = sum(kv_bytes(bundle, text, drafts=way == "planned") for (way, _), text in texts.items())
    line("weights on disk, keys and values of the four texts", f"{files / MEGABYTE:.0f} + {caches / MEGABYTE:.0f} MB")
    line("resident after loading and a few tokens", f"{after_load / MEGABYTE:.0f} MB")
    over = resident_bytes() - files - caches
    line("resident at the end", f"{resident_bytes() / MEGABYTE:.0f} MB", f"peak {peak_bytes() / MEGABYTE:.0f} MB")
    line("resident above weights, keys and values", f"{over / MEGABYTE:.0f} MB", "at most 300 MB")


def main() -> None:
    options = parser().parse_args()
    bundle = Bundle.open(options.bundle)
    line("import paceline", f"{statistics.median(fresh(IMPORT)):.2f} s", "at most 0.5 s")
    load = statistics.median(fresh(LOAD, str(options.bundle)))
    line("load the bundle, warm, ONNX Runtime's import included", f"{load:.2f} s", "at most 3 s")
    target = bundle.manifest.target
    room = target.max_length - 13 * options.steps - 13 - options.more_tokens
    if options.short > room:
        raise SystemExit(f"The target's context of {target.max_length} has room for prompts of {room} tokens only.")
    if options.long > room:
        print(f"The target's context of {target.max_length} has room for a prompt of {room} tokens: the long one.")
    measure_loop(bundle, (options.short, min(options.long, room)), options.steps, options.more_tokens)


if __name__ == "__main__":
    try:
        main()
    except paceline.PacelineError as error:
        raise SystemExit(f"Error: {error}") from error
