"""What must be seen on a GPU once: `python -m paceline_tools.gpu_acceptance --help`, run by `tools/gpu_acceptance.sh`.

For each bundle and provider it compares the models with the same graphs on the CPU, looks whether KV caches are updated
in place and whether logits stay on the GPU, tests the law and greedy texts, counts CUDA graphs, and measures plain and
speculative decoding beside what the GPU's memory allows. It writes one JSON and one Markdown file.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

import paceline
from paceline import Bundle, SamplingParams, SpeculativeDecoder, cuda
from paceline.bundle import ModelEntry
from paceline.cuda_array import CudaArray
from paceline.cuda_graph import CudaGraph
from paceline.device_array import DeviceArray, on_host
from paceline.errors import PacelineError
from paceline.files import write_whole
from paceline.ort import OrtModel
from paceline.providers import PROVIDERS, find_provider
from paceline.trt import TrtKVCache, TrtModel
from paceline.trt_engine import Engine

from .arguments import OUTPUT_FILE
from .invariants import Difference, tolerance_of
from .measure import compare, machine
from .proof import prove
from .tables import number, table

__all__ = ["accept", "command", "markdown"]

PROMPTS = ("The capital of France is", "def mean(values: list[float]) -> float:\n")
# Rows that are compared: a prompt, single steps, a verification, and another behind a rollback.
_PROMPT_ROWS, _STEPS, _VERIFY = 48, 3, 4
_COPIED = 1 << 28  # bytes that are copied to measure the bandwidth of memory

_Model = OrtModel | TrtModel


def accept(
    folder: Path, provider: str, *, num_draft_tokens: int, max_new_tokens: int, repeats: int, samples: int
) -> dict[str, Any]:
    """Everything that is looked at for a bundle and a provider: figures, and under `failed` what does not hold.

    Raises:
        PacelineError: the bundle or the provider cannot be used at all.
    """
    bundle, device = Bundle.open(folder), find_provider(provider).device
    tolerance = tolerance_of(bundle.manifest.target)
    decoder = paceline.load(folder, provider=provider, profile=None)
    tokenizer = decoder.tokenizer
    assert tokenizer is not None  # a bundle has one
    prompts = {f"prompt {index}": tokenizer.encode(text) for index, text in enumerate(PROMPTS, 1)}
    figures: dict[str, Any] = {"bundle": bundle_facts(bundle), "provider": provider}
    failed: list[str] = []

    def check(name: str, value: Any, passed: bool) -> None:
        figures[name] = value
        if not passed:
            failed.append(name)

    if device is not None:
        for which in ("target", "draft"):
            model = cast(_Model | None, getattr(decoder, which))
            if model is not None:
                differences = parity(model, OrtModel.open(bundle, which))
                worst = max(one.tv for one in differences.values())
                check(f"parity, {which}", {k: asdict(v) for k, v in differences.items()}, worst <= tolerance.cache)
        check("in place", *in_place(cast(_Model, decoder.target)))
        check("copied to the host", *copies(folder, provider, prompts["prompt 1"], num_draft_tokens))
    if find_provider(provider).engine is not None:
        check("CUDA graphs", *cuda_graphs(decoder, prompts["prompt 1"], num_draft_tokens))
    proof = prove(
        decoder,
        prompts,
        SamplingParams(1.0, seed=0),
        num_draft_tokens=num_draft_tokens,
        samples=samples,
        alpha=1e-3,
        tolerance=tolerance,
    )
    check("law, greedy texts and caches", proof.as_dict(), proof.passed)
    comparison = compare(
        decoder,
        prompts["prompt 2"],
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
    )
    divergence = comparison.divergence
    near = divergence is None or (divergence.between_the_best and divergence.gap <= tolerance.gap)
    check("speed", comparison.as_dict(), near)
    if device == "cuda":
        figures["roofline"] = roofline(bundle, cast(_Model, decoder.target))
    figures["failed"] = failed
    return figures


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """What was run."""
    manifest = bundle.manifest
    models = {"target": manifest.target, "draft": manifest.draft}
    return {
        name: {
            "source": model.source.name,
            "flavor": model.flavor,
            "precision": model.precision,
            "graph_sha256": manifest.graph_sha256(model),
        }
        for name, model in models.items()
        if model is not None
    }


def parity(model: _Model, reference: OrtModel) -> dict[str, Difference]:
    """The largest difference of the next token's law in each phase, to the same graph on the CPU."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.entry.num_input_ids, _PROMPT_ROWS + _STEPS + 2 * _VERIFY).tolist()
    length = min(model.max_length, reference.max_length, len(ids))
    caches = [(one, one.new_cache(length)) for one in (model, reference)]

    def differ(tokens: Sequence[int], num_logits: int) -> Difference:
        ours, theirs = (one.forward(tokens, cache, num_logits) for one, cache in caches)
        return Difference.largest([Difference.between(*rows) for rows in zip(ours, theirs, strict=True)])

    end = _PROMPT_ROWS + _STEPS
    found = {"prefill": differ(ids[:_PROMPT_ROWS], min(_VERIFY, _PROMPT_ROWS))}
    found["single steps"] = Difference.largest([differ([token], 1) for token in ids[_PROMPT_ROWS:end]])
    found["verification"] = differ(ids[end : end + _VERIFY], _VERIFY)
    for _, cache in caches:
        cache.rollback(end + 1)
    found["after rollback"] = differ(ids[end + _VERIFY :], _VERIFY)
    return found


def in_place(model: _Model) -> tuple[dict[str, Any], bool]:
    """Whether rounds leave buffers where they are, and write behind the length alone."""
    cache = model.new_cache(64)
    buffers = cache.memory.buffers if isinstance(cache, TrtKVCache) else cache.buffers
    model.forward(range(1, 9), cache, 1)
    before, addresses = [on_host(one) for one in (buffers[0], buffers[-1])], [one.pointer for one in buffers]
    for _ in range(4):  # more than once, so that graphs are launched, too
        cache.rollback(5)
        model.forward([9, 10, 11], cache, 3)
    kept = written = True
    for old, buffer in zip(before, (buffers[0], buffers[-1]), strict=True):
        new = on_host(buffer)
        kept = kept and bool((new[:, :, :5] == old[:, :, :5]).all())
        written = written and bool((new[:, :, 5:8] != old[:, :, 5:8]).any())
    stayed = addresses == [one.pointer for one in buffers]
    figures = {"positions kept": kept, "positions written": written, "buffers stayed": stayed}
    return figures, all(figures.values())


@contextmanager
def counted(owner: type, name: str, note: Callable[[Any], None]) -> Iterator[None]:
    """Note each call of a method, by the object that it is of."""
    method = getattr(owner, name)

    def noting(self: Any, *arguments: Any) -> Any:
        note(self)
        return method(self, *arguments)

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, method)


def copies(folder: Path, provider: str, prompt: Sequence[int], num_draft_tokens: int) -> tuple[dict[str, Any], bool]:
    """Bytes that a generation by the sampler's graphs brings from the device: ids, and no row of logits."""
    decoder = paceline.load(folder, provider=provider, sampler="graph", profile=None)
    sizes: list[int] = []
    with (
        counted(DeviceArray, "numpy", lambda array: sizes.append(array.nbytes)),
        counted(CudaArray, "numpy", lambda array: sizes.append(array.nbytes)),
    ):
        rounds = list(decoder.generate(prompt, num_draft_tokens=num_draft_tokens, max_new_tokens=32))
    figures = {
        "rounds": len(rounds),
        "copies": len(sizes),
        "largest": max(sizes),
        "row of logits": 4 * decoder.vocab_size,
    }
    return figures, len(sizes) == len(rounds) and max(sizes) <= 8 * (num_draft_tokens + 1)


def cuda_graphs(
    decoder: SpeculativeDecoder, prompt: Sequence[int], num_draft_tokens: int
) -> tuple[dict[str, int], bool]:
    """Passes of a generation that were launched as graphs, and those that were not."""
    launched: list[Any] = []
    single: list[Any] = []
    with counted(CudaGraph, "launch", launched.append), counted(Engine, "run", single.append):
        list(decoder.generate(prompt, num_draft_tokens=num_draft_tokens, max_new_tokens=48))
    return {"launched": len(launched), "one by one": len(single)}, len(launched) > len(single)


def roofline(bundle: Bundle, model: _Model) -> dict[str, float]:
    """Plain tokens per second that the GPU's memory allows: its bandwidth over the bytes that a step reads."""
    manifest = bundle.manifest
    entry: ModelEntry = manifest.target
    beside = (name for name in manifest.files if name == entry.path or name.startswith(f"{entry.path}."))
    weights = sum(manifest.files[name].size for name in beside)
    static = entry.flavor == "trt"  # attention reads all positions of such caches, and those of the text of others
    positions = model.max_length if static else 256
    num_bytes = weights + positions * entry.kv_bytes_per_position
    source, target = (CudaArray.empty("cuda", (_COPIED,), np.uint8) for _ in range(2))
    times = []
    for _ in range(6):
        cuda.call("cudaStreamSynchronize", ctypes.c_void_p(cuda.shared_stream()))
        started = time.perf_counter()
        for _ in range(8):
            target.copy_from(source)
        cuda.call("cudaStreamSynchronize", ctypes.c_void_p(cuda.shared_stream()))
        times.append(time.perf_counter() - started)
    bandwidth = 8 * 2 * _COPIED / min(times)  # each byte is read and written
    return {
        "bytes_per_step": num_bytes,
        "bytes_per_second": bandwidth,
        "plain_tokens_per_second": bandwidth / num_bytes,
    }


def markdown(document: dict[str, Any]) -> str:
    """The document for readers."""
    header = ("bundle, provider", "holds", "plain", "speculative", "speedup", "accepted", "roofline, plain")
    rows, notes = [], []
    for run in document["runs"]:
        target = run.get("bundle", {}).get("target", {})
        name = f"{target.get('source', run['folder'])} {target.get('flavor', '')} {target.get('precision', '')}".strip()
        name = f"{name}, {run['provider']}"
        if "error" in run:
            rows.append((name, "no", "–", "–", "–", "–", "–"))
            notes.append(f"- {name}: {run['error']}")
            continue
        speed, bound = run["speed"], run.get("roofline", {})
        rows.append(
            (
                name,
                "no" if run["failed"] else "yes",
                number(speed["plain_tokens_per_second"], 1, "/s"),
                number(speed["speculative_tokens_per_second"], 1, "/s"),
                number(speed["speedup"], 2),
                number(speed["acceptance_rate"], 2),
                number(bound.get("plain_tokens_per_second"), 1, "/s"),
            )
        )
        notes += [f"- {name}: {part} does not hold" for part in run["failed"]]
    lines = [
        f"# Acceptance on {document['device']}, {document['made_at']}",
        "",
        f"`{document['command']}`",
        "",
        "```",
        table(header, rows),
        "```",
    ]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


@click.command()
@click.option("--run", "runs", required=True, multiple=True, metavar="DIR=PROVIDER", help="A bundle and what runs it.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Of both files, without suffix.")
@click.option("--draft-tokens", default=4, show_default=True, help="Tokens to draft per round.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Of each measured text.")
@click.option("--repeats", default=3, show_default=True, help="Measured texts, plain and speculative each.")
@click.option("--samples", default=400, show_default=True, help="Continuations for the law, of each prompt.")
@click.pass_context
def command(
    context: click.Context,
    runs: tuple[str, ...],
    output: Path,
    draft_tokens: int,
    max_new_tokens: int,
    repeats: int,
    samples: int,
) -> None:
    """See on this machine that bundles run as they should; the exit code is 1 when something does not hold."""
    output.parent.mkdir(parents=True, exist_ok=True)
    json_file, markdown_file = (
        OUTPUT_FILE.convert(output.with_suffix(suffix), None, context) for suffix in (".json", ".md")
    )
    pairs = [run.rpartition("=") for run in runs]
    for folder, _, provider in pairs:
        if not folder or provider not in PROVIDERS:
            raise click.UsageError(f"--run expects DIR=PROVIDER with a provider of {', '.join(PROVIDERS)}.")
    found = []
    for folder, _, provider in pairs:
        click.echo(f"{folder} with {provider}", err=True)
        try:
            figures = accept(
                Path(folder),
                provider,
                num_draft_tokens=draft_tokens,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                samples=samples,
            )
        except PacelineError as error:
            figures = {"provider": provider, "error": str(error), "failed": ["to start"]}
        found.append({"folder": Path(folder).name, **figures})
    on_gpu = any(PROVIDERS[provider].device == "cuda" for _, _, provider in pairs)
    try:
        device = cuda.device_name() if on_gpu else "a CPU"
    except PacelineError:
        device = "a machine without a usable GPU"
    document = {
        "device": device,
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(
            ["python -m paceline_tools.gpu_acceptance", *(f"--run {Path(f).name}={p}" for f, _, p in pairs)]
        ),
        "machine": machine(),
        "runs": found,
    }
    write_whole(json_file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_whole(markdown_file, markdown(document))
    click.echo(markdown(document))
    if any(run["failed"] for run in found):
        context.exit(1)


if __name__ == "__main__":
    command()
