"""Print what a smaller draft vocabulary costs: `python tests/export/measure_draft_vocab.py BUNDLE TEXTS.jsonl`.

BUNDLE has a draft with all its logits. Its LM head is cut to the most useful 8k to 96k ids, and a step of
each of these drafts is timed, interleaved. Acceptance is teacher-forced: at each position of each text, how much of the
target's distribution the draft meets, the sum of min(p, q) at temperature 1, and whether the best tokens are equal.
A line of TEXTS.jsonl has `category` and `text`, or `turns` (Spec-Bench's format, whose first prompt is the text), or
`prompt` and `text` as ids of which the latter were written by the target.
At last both are put together: how much faster than plain decoding each text would be written greedily, with the best
fixed number of drafted tokens, by the profile of `paceline tune` for this bundle and the ratio of the draft steps.
With `--drafts DIR…` the drafts of other bundles, of other precisions and block sizes, are compared as well; of a
bundle without a draft it is its only model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from paceline.bundle import Bundle, LogitIdsEntry
from paceline.cost_profile import find_costs, setup_of
from paceline.costs import Costs
from paceline.huge_pages import huge_pages
from paceline.ort import OrtModel
from paceline.ort_session import open_session
from paceline.tokenizer import Tokenizer
from paceline_export.draft_vocab import useful_ids
from paceline_export.passes.lm_head import cut_lm_head

SIZES = (8192, 16384, 32768, 65536, 98304)
CONTEXT, STEPS, ROWS = 256, 8, 32


def cut_draft(bundle: Bundle, ids: NDArray[np.int32], folder: Path) -> OrtModel:
    """The bundle's draft with logits for these ids only."""
    entry = bundle.manifest.draft
    assert entry is not None
    model = ir.load(bundle.path(entry.path))
    cut_lm_head(model, ids, embedding="model.embed_tokens.weight")
    folder.mkdir()
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    logits = next(spec for spec in entry.outputs if spec.name == "logits")
    outputs = tuple(
        replace(spec, shape=(*spec.shape[:-1], len(ids))) if spec is logits else spec for spec in entry.outputs
    )
    kept = LogitIdsEntry("draft/logit_ids.npy", entry.vocab_size)
    entry = replace(entry, vocab_size=len(ids), outputs=outputs, logit_ids=kept)
    return OrtModel(open_session(folder / "model.onnx"), entry, ids.astype(np.int64))


def print_steps(drafts: dict[str, OrtModel], repeats: int) -> dict[str, float]:
    """Time a draft step behind `CONTEXT` positions, all drafts in turn; prints medians and returns paired ratios."""
    caches = {name: model.new_cache(CONTEXT + 64) for name, model in drafts.items()}
    times: dict[str, list[float]] = defaultdict(list)
    for name, model in drafts.items():
        model.forward([100] * CONTEXT, caches[name], 1)
    for repeat in range(repeats + 1):
        for name, model in drafts.items():
            started = time.perf_counter()
            for _ in range(STEPS):
                model.forward([200], caches[name], 1)
            if repeat:
                times[name].append((time.perf_counter() - started) / STEPS * 1e3)
            caches[name].rollback(CONTEXT)
    first = next(iter(drafts))
    print(f"\ndraft step behind {CONTEXT} positions, {repeats} interleaved repeats of {STEPS} steps")
    ratios = {}
    for name, values in times.items():
        ratios[name] = ratio = statistics.median(ours / full for ours, full in zip(values, times[first], strict=True))
        print(f"{name:16} median {statistics.median(values):6.2f} ms  least {min(values):6.2f} ms  ratio {ratio:.3f}")
    return ratios


def net_speedup(equal: list[bool], costs: Costs, ratio: float) -> float:
    """Speed of greedy drafting over plain decoding for a text, with the best fixed number of drafted tokens.

    Args:
        equal: for each token, whether the draft's best is the target's, which the text follows.
        costs: of the models.
        ratio: what a draft step takes of theirs.
    """
    best = 1.0
    for most in range(1, 9):
        at, seconds = 0, 0.0
        while at < len(equal):
            count = min(most, len(equal) - at - 1)
            stands = next((i for i in range(count) if not equal[at + i]), count)
            seconds += costs.target(count + 1) + count * ratio * costs.draft_step
            at += stands + 1
        best = max(best, len(equal) * costs.target(1) / seconds)
    return best


def probabilities(model: OrtModel, ids: list[int], width: int, start: int) -> NDArray[np.float32]:
    """Probabilities `[len(ids) - start, width]` behind each position from `start` on."""
    cache, rows = model.new_cache(len(ids)), []
    if start:
        model.forward(ids[:start], cache, 1)
    for at in range(start, len(ids), ROWS):
        piece = ids[at : at + ROWS]
        rows.append(model.forward(piece, cache, len(piece))[:, :width].copy())
    logits = np.concatenate(rows)
    weights: NDArray[np.float32] = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


def texts_of(path: Path, encode: Callable[[str], list[int]]) -> list[tuple[str, list[int], int]]:
    """Category, ids, and the first position that counts, of each line."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "prompt" in row:
            found.append((row["category"], row["prompt"] + row["text"], len(row["prompt"]) - 1))
        else:
            ids = encode(row["text"] if "text" in row else row["turns"][0])
            found.append((row["category"], ids[:CONTEXT], 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--drafts", type=Path, nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    tokenizer, entry = Tokenizer.from_bundle(bundle), bundle.manifest.tokenizer
    fast = PreTrainedTokenizerFast(tokenizer_file=str(bundle.path("tokenizer.json")))
    vocab = entry.vocab_size
    kept = {size: useful_ids(fast, entry.eos_token_ids, size) for size in SIZES if size < vocab}
    others = {}
    draft_bytes = (bundle.root / "draft/model.onnx.data").stat().st_size
    # As `paceline.load` has them; else memory, not the head, would decide which draft is fast.
    with tempfile.TemporaryDirectory() as folder, huge_pages((1 + len(kept) + len(arguments.drafts)) * draft_bytes):
        full = OrtModel.open(bundle, "draft")
        for other_folder in arguments.drafts:
            other = Bundle.open(other_folder)
            others[other_folder.name] = OrtModel.open(other, "draft" if other.manifest.draft else "target")
        drafts = {"full": full}
        drafts |= {f"{size}": cut_draft(bundle, ids, Path(folder) / str(size)) for size, ids in kept.items()}
    ratios = print_steps(drafts | others, arguments.repeats)
    del drafts

    target = OrtModel.open(bundle, "target")
    costs = find_costs(setup_of(bundle), "auto")
    sums: dict[str, dict[str, list[tuple[float, bool]]]] = defaultdict(lambda: defaultdict(list))
    nets: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for category, ids, start in texts_of(arguments.texts, lambda text: tokenizer.encode(text)):
        p = probabilities(target, ids, vocab, start)
        for name, model in {"full": full, **others}.items():
            q = probabilities(model, ids, vocab, start)
            cuts = {name: q, **{f"{size}": q for size in kept if name == "full"}}
            cuts |= {f"{size}, by id": q for size in kept if name == "full"}
            for cut, row in cuts.items():
                there = np.arange(vocab)
                if cut != name:
                    size = int(cut.partition(",")[0])
                    there = there[:size] if cut.endswith("by id") else kept[size].astype(np.int64)
                left = row[:, there]
                meets = np.minimum(p[:, there], left / left.sum(-1, keepdims=True)).sum(-1)
                best = there[left.argmax(-1)]
                equal = (best == p.argmax(-1)).tolist()
                sums[category][cut] += zip(meets.tolist(), equal, strict=True)
                if costs is not None:
                    nets[category][cut].append(net_speedup(equal, costs.at(CONTEXT), ratios[cut.partition(",")[0]]))
        print_row(category, sums[category])
    print("\nacceptance, teacher-forced: sum of min(p, q) / equal best token, in %")
    every: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for category, by_cut in sums.items():
        for cut, values in by_cut.items():
            every[cut] += values
        print_row(category, by_cut)
    print_row("all", every)
    print(
        "\ngreedy over plain, geometric means of texts" if nets else "\nno profile: run `paceline tune` for net figures"
    )
    total: dict[str, list[float]] = defaultdict(list)
    for category, by_net in nets.items():
        for cut, speeds in by_net.items():
            total[cut] += speeds
        print_net(category, by_net)
    if total:
        print_net("all", total)


def print_net(category: str, by_cut: dict[str, list[float]]) -> None:
    figures = "  ".join(f"{cut} {statistics.geometric_mean(speeds):.3f}" for cut, speeds in by_cut.items())
    print(f"{category:20} {len(next(iter(by_cut.values()))):3} texts  {figures}", flush=True)


def print_row(category: str, by_cut: dict[str, list[tuple[float, bool]]]) -> None:
    figures = (
        f"{cut} {statistics.mean(m for m, _ in values) * 100:.1f}/{statistics.mean(b for _, b in values) * 100:.1f}"
        for cut, values in by_cut.items()
    )
    count = len(next(iter(by_cut.values())))
    print(f"{category:20} {count:5} positions  {'  '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
