"""Measure what weight formats cost in quality and in time: the frontier that the default was chosen on.

    python tests/export/measure_quality.py qwen2.5-coder-1.5b WORK --prompts spec_bench.jsonl --code HumanEval.jsonl.gz

Each variant of the target is exported to WORK/VARIANT unless it is there. Quality is that of the shipped graph against
full precision; steps are timed against the plainest variant in turns, and given as ratios of medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import paceline_export.export
from paceline.bundle import Bundle
from paceline.huge_pages import huge_pages
from paceline.ort import OrtModel
from paceline_export.calibrate.quality import measure
from paceline_export.calibrate.run import run_layers
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.quantize import PRECISIONS
from paceline_export.source import resolve

# Options of an export; `symmetric`, `attention_bits` and `damping` are not offered to users.
VARIANTS: dict[str, dict[str, Any]] = {
    "int4": {},
    "rounded": {"calibration": "none"},
    "int8": {"precision": "int8"},
    "symmetric": {"symmetric": True},
    "all-4-bits": {"attention_bits": 4},
    "damped-less": {"damping": 0.5},
    "rounded-symmetric": {"calibration": "none", "symmetric": True},
    "rounded-symmetric-all-4-bits": {"calibration": "none", "symmetric": True, "attention_bits": 4},
}
BASELINE = "rounded-symmetric-all-4-bits"
ROWS = (1, 3, 5)
PAST = 256


@contextmanager
def _settings(damping: float | None = None, **stored: Any) -> Iterator[None]:
    """Let exports inside the block use other settings than those on offer."""
    export: Any = paceline_export.export
    before = PRECISIONS["int4"], export.Recipe
    PRECISIONS["int4"] = dataclasses.replace(before[0], **stored)
    if damping is not None:
        export.Recipe = functools.partial(before[1], damping=damping)
    try:
        yield
    finally:
        PRECISIONS["int4"], export.Recipe = before


def _export(source: Any, folder: Path, options: dict[str, Any]) -> None:
    settings = dict(options)
    precision, calibration = settings.pop("precision", "int4"), settings.pop("calibration", None)
    with _settings(**settings):
        report = export_bundle(source, None, folder, precision=precision, calibration=calibration, quality=False)
    print(f"{folder.name}: exported in {report.seconds:.0f} s, peak {report.peak_memory / 1e9:.1f} GB", flush=True)


def _texts(tokenizer: Any, prompts: Path, code: Path, positions: int) -> dict[str, list[torch.Tensor]]:
    """Beginnings of prompts spread over the file, and of HumanEval's problems 0 to 81 with their solutions."""
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    with gzip.open(code, "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file][:82]
    found = {}
    for name, texts in (
        ("prompts", [line["turns"][0][:900] for line in lines]),
        ("code", [problem["prompt"] + problem["canonical_solution"] for problem in problems]),
    ):
        sequences: list[torch.Tensor] = []
        count = 0
        for text in texts[:: max(1, len(texts) * 110 // positions)]:
            sequences.append(torch.tensor(tokenizer(text)["input_ids"][:220]))
            count += len(sequences[-1])
            if count >= positions:
                break
        found[name] = sequences
    return found


def _step(model: OrtModel, rows: int) -> float:
    """Seconds of one step behind `PAST` positions."""
    cache = model.new_cache(PAST + 2 * max(ROWS))
    cache.advance(PAST)
    model.forward([1] * rows, cache, rows)
    cache.rollback(PAST)
    started = time.perf_counter()
    model.forward([1] * rows, cache, rows)
    return time.perf_counter() - started


def _steps(work: Path, name: str, rounds: int) -> list[float]:
    """Ratios of the median step to the baseline's, for each number of rows; none where there is no baseline."""
    if not (work / BASELINE).is_dir():
        return []
    bundles = {other: Bundle.open(work / other) for other in {name, BASELINE}}
    with huge_pages(sum(entry.size for bundle in bundles.values() for entry in bundle.manifest.files.values())):
        models = {other: OrtModel.open(bundle, "target") for other, bundle in bundles.items()}
    ratios = []
    for rows in ROWS:
        times: dict[str, list[float]] = {other: [] for other in models}
        for _ in range(rounds):
            for other, model in models.items():
                times[other].append(_step(model, rows))
        ratios.append(statistics.median(times[name]) / statistics.median(times[BASELINE]))
    return ratios


def main() -> None:
    """Export, compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="recipe, folder, GGUF file or hub id of the target")
    parser.add_argument("work", type=Path, help="folder of the variants' bundles")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with `turns`, as Spec-Bench has them")
    parser.add_argument("--code", type=Path, required=True, help="HumanEval.jsonl.gz; problems 0 to 81 are used")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--positions", type=int, default=1300, help="of each text, about")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each model; 0 times none")
    parser.add_argument("--cache-dir", type=Path, help="where packages are assembled")
    options = parser.parse_args()
    source = resolve(options.source, cache_dir=options.cache_dir)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.variants:
        if not (options.work / name).is_dir():
            _export(source, options.work / name, VARIANTS[name])
    checkpoint = Checkpoint.open(source)
    texts = _texts(checkpoint.tokenizer, options.prompts, options.code, options.positions)
    reader = checkpoint.weights(check_architecture(checkpoint.config))
    reference = run_layers(checkpoint, reader, None, held_out=texts).reference
    if reference is None:
        raise SystemExit("there is no text to measure on")
    print(
        "| weights | KL, prompts | KL, code | argmax, both | perplexity, both (full precision) "
        f"| step at {', '.join(map(str, ROWS))} rows over {BASELINE} |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.variants:
        bundle = Bundle.open(options.work / name)
        entry = bundle.manifest.target
        quality = measure(bundle.path(entry.path), entry, reference)
        both = (quality.prompts, quality.code)
        ratios = _steps(options.work, name, options.rounds) if options.rounds else []
        print(
            f"| {name} | {quality.prompts.kl:.4f} | {quality.code.kl:.4f} "
            f"| {' / '.join(f'{text.argmax_agreement:.3f}' for text in both)} "
            f"| {' / '.join(f'{text.perplexity:.3f} ({text.full_perplexity:.3f})' for text in both)} "
            f"| {', '.join(f'{ratio:.2f}' for ratio in ratios)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
