"""One run of a benchmark: from the command's options to a document."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline import Bundle, SamplingParams, SpeculativeDecoder
from paceline.errors import InvalidInputError
from paceline_tools.arguments import folder_name
from paceline_tools.progress import stages

from .crowds import Crowd, measure_crowds
from .document import Document, MeasuredPrompt, SkippedPrompt
from .loaded import Loaded, gather, hold_signals, say_broken
from .measurement import Failure, Measurement, Plan, measure
from .meters import EnergyMeter
from .methods import Method, all_methods
from .peers import PEERS, PeerChoice, check_knobs, peer_methods, start_peers, stop_peers
from .prompts import Prompt, read_prompts, unique

__all__ = ["check", "encoded", "run_benchmark"]


def run_benchmark(
    folder: Path,
    *,
    prompts: tuple[str, ...],
    limit: int | None,
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
    concurrency: tuple[int, ...],
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    profile: str,
    beside: tuple[Path, ...],
    against: tuple[str, ...],
    peer_pythons: tuple[str, ...],
    **knobs: Any,
) -> tuple[Document, BaseException | None]:
    """Load a bundle, write all texts, and say what they took; the arguments are the options of `paceline bench`.

    Returns:
        What was measured, and what ended the run early, if anything did: then the document is not complete.

    Raises:
        PacelineError: an argument that cannot be honoured, before anything is measured.
        BaseException: Ctrl-C or a fault before there was a text.
    """
    others = _labelled(folder, beside)
    ours = all_methods(draft_tokens, drafters, rules, temperatures, ("", *others))
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
    texts = unique(
        prompt for source in prompts for prompt in read_prompts(source, raw=raw, per_category=per_category, limit=limit)
    )
    loaded = Loaded.load(folder, provider, threads, profile, engine_folder)
    decoder = loaded.decoder
    of_others = {label: Loaded.load(path, provider, threads, profile) for label, path in others.items()}
    decoders = {label: one.decoder for label, one in of_others.items()}
    context = min(one.context for one in (loaded, *of_others.values()))
    kept, ids, skipped = encoded(decoder, texts, raw, max_new_tokens, context)
    for method in ours:
        check({"": decoder, **decoders}[method.bundle], method, plan, ids[0])
    engines = start_peers(choices, loaded.threads, methods)
    peers: dict[str, Any] = {}

    found: list[Measurement | Failure] = []
    crowds: list[Crowd] = []
    meter = EnergyMeter(gpu=not loaded.on_host)
    begun, started = datetime.datetime.now(datetime.UTC), time.perf_counter()
    try:
        with stages() as on_progress:
            broken = gather(measure(decoder, ids, plan, meter, engines, on_progress, beside=decoders), found)
        at_once = [size for size in concurrency if size > 1]
        if at_once and not broken:
            with stages() as on_progress:
                broken = gather(measure_crowds(decoder, ids, plan, at_once, on_progress, decoders), crowds)
        hold_signals()
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
    if broken:
        say_broken(broken, any(isinstance(one, Measurement) for one in found))
    settings = {
        "prompts": list(prompts),
        "limit": limit,
        "per_category": per_category,
        "raw": raw,
        "max_new_tokens": max_new_tokens,
        "ignore_end": ignore_end,
        "repeats": repeats,
        "concurrency": list(concurrency),
        "seed": plan.seed,
        "knobs": {name: value for name, value in asdict(plan.knobs).items() if name not in ("temperature", "seed")},
        "provider": provider,
        "threads": threads,
        "profile": profile,
    }
    run = loaded.run(begun, seconds, broken, settings, peers)
    run["beside"] = {label: {**one.about(), "load_s": one.load_s} for label, one in of_others.items()}
    measurements = tuple(one for one in found if isinstance(one, Measurement))
    failures = tuple(one for one in found if isinstance(one, Failure))
    return Document(run, methods, tuple(kept), tuple(skipped), measurements, failures, tuple(crowds)), broken


def _name_and_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition(":")
    if name not in PEERS or not path:
        raise InvalidInputError(f"--peer-python {text!r}: NAME:PYTHON is expected, with a name of {', '.join(PEERS)}.")
    return name, path


def _labelled(folder: Path, beside: Sequence[Path]) -> dict[str, Path]:
    """Other bundles of the same checkpoint, by their folders' names.

    Raises:
        InvalidInputError: two of a name, or of another checkpoint or tokenizer.
    """
    if not beside:
        return {}
    found: dict[str, Path] = {}
    first = Bundle.open(folder).manifest
    for path in beside:
        label = folder_name(path)
        if label in found or path.resolve() == folder.resolve():
            raise InvalidInputError(f"--beside {path}: a bundle of this name is there already; take each once.")
        found[label] = path
        manifest = Bundle.open(path).manifest
        for what, ours, theirs in (
            ("checkpoint", first.target.source.sha256, manifest.target.source.sha256),
            ("tokenizer", first.files["tokenizer.json"].sha256, manifest.files["tokenizer.json"].sha256),
        ):
            if ours != theirs:
                raise InvalidInputError(
                    f"--beside {path}: its {what} is another than that of {folder}; bundles of one checkpoint are "
                    "expected, such as in another precision."
                )
    return found


def encoded(
    decoder: SpeculativeDecoder, prompts: Sequence[Prompt], raw: bool, max_new_tokens: int, context: int
) -> tuple[list[MeasuredPrompt], list[list[int]], list[SkippedPrompt]]:
    """The prompts as ids; those that leave no room for the new tokens are skipped.

    Raises:
        InvalidInputError: the bundle has no chat template, and the prompts are not raw; or all prompts are skipped.
    """
    tokenizer = decoder.tokenizer
    assert tokenizer is not None  # load() always gives one
    if not raw and tokenizer.chat_template is None:
        raise InvalidInputError("The bundle has no chat template; give --raw to continue the prompts as they are.")
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


def check(decoder: SpeculativeDecoder, method: Method, plan: Plan, ids: list[int]) -> None:
    """Have the decoder check a method's arguments; nothing runs before a generation's first step."""
    if method.num_draft_tokens and method.drafter is None and decoder.draft is None:
        raise InvalidInputError(
            "The bundle has no draft model to measure: export with --draft, or measure --drafter prompt-lookup."
        )
    plan.generation(decoder, ids, method, 0)
