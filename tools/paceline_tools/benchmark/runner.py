"""One run of a benchmark: from the command's options to a document."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import paceline
from paceline import Bundle, SamplingParams, SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME, ModelEntry
from paceline.errors import InvalidInputError
from paceline_tools.measure import machine
from paceline_tools.progress import stages

from .document import Document, MeasuredPrompt, SkippedPrompt
from .measurement import Failure, Measurement, Plan, measure
from .meters import EnergyMeter, read_bandwidth
from .methods import Method, all_methods
from .peers import PEERS, PeerChoice, check_knobs, peer_methods, start_peers, stop_peers
from .prompts import Prompt, read_prompts, unique

__all__ = ["run_benchmark"]


def run_benchmark(
    folder: Path,
    *,
    prompts: tuple[str, ...],
    per_category: int | None,
    raw: bool,
    draft_tokens: tuple[int | str, ...],
    drafters: tuple[str, ...],
    rules: tuple[str, ...],
    temperatures: tuple[float, ...],
    seed: int,
    no_seed: bool,
    max_new_tokens: int,
    ignore_end: bool,
    repeats: int,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
    against: tuple[str, ...],
    peer_pythons: tuple[str, ...],
    **knobs: Any,
) -> Document:
    """Load a bundle, write all texts, and say what they took; the arguments are the options of `paceline bench`.

    After Ctrl-C the document holds what was measured until then, and is not complete.

    Raises:
        PacelineError: an argument that cannot be honoured, before anything is measured.
        KeyboardInterrupt: Ctrl-C before there was a text.
    """
    ours = all_methods(draft_tokens, drafters, rules, temperatures)
    pythons = dict(_name_and_path(text) for text in peer_pythons)
    choices = [PeerChoice.parse(text, pythons) for text in against]
    names = [choice.name for choice in choices]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"--against names a peer twice ({', '.join(names)}); take one at a time.")
    if unused := pythons.keys() - names:
        raise InvalidInputError(f"--peer-python is for peers of --against, and {', '.join(unused)} is none here.")
    samplings = {method.sampling: method.temperature for method in ours}
    methods = (*ours, *peer_methods(choices, draft_tokens, samplings))
    plan = Plan(methods, max_new_tokens, repeats, SamplingParams(**knobs), None if no_seed else seed, ignore_end)
    for method in methods:
        plan.sampling(method, 0)  # a temperature out of its range is said before anything is loaded
    if plan.seed is not None:
        SamplingParams(seed=plan.seed + repeats - 1)  # and the last repeat's seed
    if choices:
        check_knobs(plan.knobs)
    texts = unique(prompt for source in prompts for prompt in read_prompts(source, raw=raw, per_category=per_category))
    bundle = Bundle.open(folder)
    started = time.perf_counter()
    decoder = paceline.load(
        folder,
        provider=provider,
        threads=threads,
        profile=None if profile == "none" else profile,
        engines=engine_folder,
    )
    load_s = time.perf_counter() - started
    kept, ids, skipped = _encoded(decoder, texts, raw, max_new_tokens)
    for method in ours:
        _check(decoder, method, plan, ids[0])
    threads_of_all = threads or len(os.sched_getaffinity(0))
    engines = start_peers(choices, threads_of_all, methods)
    peers: dict[str, Any] = {}

    found: list[Measurement | Failure] = []
    begun, started = datetime.datetime.now(datetime.UTC), time.perf_counter()
    complete = False
    try:
        with stages() as on_progress:
            for one in measure(decoder, ids, plan, EnergyMeter(), engines, on_progress):
                found.append(one)  # noqa: PERF402 - what came before Ctrl-C shall stay
        complete = True
    except KeyboardInterrupt:
        if not any(isinstance(one, Measurement) for one in found):
            click.echo("\nBroken off before a text was complete; nothing is saved.", err=True)
            raise
        click.echo("\nBroken off; what was measured is kept.", err=True)
    finally:
        for choice in choices:
            engine = engines[choice.name]
            peers[choice.name] = {
                "versions": engine.versions,
                "models": list(choice.models),
                "resident_bytes": engine.resident_bytes(),
            }
        stop_peers(engines)
    seconds = time.perf_counter() - started
    on_host = provider in ("cpu", "openvino")
    manifest = bundle.manifest
    settings = {
        "prompts": list(prompts),
        "per_category": per_category,
        "raw": raw,
        "max_new_tokens": max_new_tokens,
        "ignore_end": ignore_end,
        "repeats": repeats,
        "seed": plan.seed,
        "knobs": {name: value for name, value in asdict(plan.knobs).items() if name not in ("temperature", "seed")},
        "provider": provider,
        "threads": threads,
        "profile": profile,
    }
    run = {
        "paceline": paceline.__version__,
        "command": ["paceline", *sys.argv[1:]],
        "started": begun.isoformat(timespec="seconds"),
        "seconds": seconds,
        "complete": complete,
        "machine": machine(),
        "bundle": {
            "manifest_sha256": hashlib.sha256((bundle.root / MANIFEST_NAME).read_bytes()).hexdigest(),
            "target": _model(manifest.target),
            "draft": manifest.draft and _model(manifest.draft),
        },
        "settings": settings,
        "peers": peers,
        "load_s": load_s,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "target_bytes": sum(entry.size for name, entry in manifest.files.items() if name.startswith("target/")),
        "read_bytes_per_s": read_bandwidth(threads_of_all) if on_host else None,
    }
    run = json.loads(json.dumps(run))  # as a run that was saved has it
    measurements = tuple(one for one in found if isinstance(one, Measurement))
    failures = tuple(one for one in found if isinstance(one, Failure))
    return Document(run, methods, tuple(kept), tuple(skipped), measurements, failures)


def _name_and_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition(":")
    if name not in PEERS or not path:
        raise InvalidInputError(f"--peer-python {text!r}: NAME:PYTHON is expected, with a name of {', '.join(PEERS)}.")
    return name, path


def _model(entry: ModelEntry) -> dict[str, str]:
    return {"source": entry.source.name, "precision": entry.precision}


def _encoded(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], raw: bool, max_new_tokens: int
) -> tuple[list[MeasuredPrompt], list[list[int]], list[SkippedPrompt]]:
    """The prompts as ids; those that leave no room for the new tokens are skipped."""
    tokenizer = decoder.tokenizer
    assert tokenizer is not None  # load() always gives one
    if not raw and tokenizer.chat_template is None:
        raise InvalidInputError("The bundle has no chat template; give --raw to continue the prompts as they are.")
    context = min(model.max_length for model in (decoder.target, decoder.draft) if model is not None)
    kept, ids, skipped = [], [], []
    for prompt in prompts:
        text = prompt.text
        tokens = tokenizer.encode(text) if raw else tokenizer.encode_chat([{"role": "user", "content": text}])
        if len(tokens) + max_new_tokens > context:
            reason = f"with {max_new_tokens} new tokens they exceed the context of {context}"
            skipped.append(SkippedPrompt(prompt.name, prompt.category, len(tokens), reason))
        else:
            kept.append(MeasuredPrompt(prompt.name, prompt.category, len(tokens)))
            ids.append(tokens)
    if not kept:
        shortest = min(prompt.tokens for prompt in skipped)
        raise InvalidInputError(
            f"All {len(skipped)} prompts were skipped: the shortest has {shortest} tokens, and with --max-new-tokens "
            f"{max_new_tokens} it exceeds the context of {context}; ask for fewer tokens, or give shorter prompts."
        )
    return kept, ids, skipped


def _check(decoder: SpeculativeDecoder, method: Method, plan: Plan, ids: list[int]) -> None:
    """Have the decoder check a method's arguments; nothing runs before a generation's first step."""
    if method.num_draft_tokens and method.drafter is None and decoder.draft is None:
        raise InvalidInputError(
            "The bundle has no draft model to measure: export with --draft, or measure --drafter prompt-lookup."
        )
    decoder.generate(
        ids,
        plan.sampling(method, 0),
        max_new_tokens=plan.max_new_tokens,
        num_draft_tokens=method.num_draft_tokens,
        drafter=method.drafter,
        verification=method.verification,
    )
