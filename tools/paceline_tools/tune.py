"""`paceline tune`: measures once what runs of a bundle's models take on this machine, for plans of drafts."""

from __future__ import annotations

import datetime
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

import paceline
from paceline import Bundle
from paceline.cost_profile import PROFILE_FORMAT, CostProfile, default_folder, setup_of
from paceline.costs import Costs
from paceline.errors import InvalidInputError
from paceline.ort import OrtKVCache, OrtModel
from paceline.planner import MOST_DRAFT_TOKENS
from paceline.theory import best_num_draft_tokens, speedup
from paceline.translated import TranslatedModel
from paceline.trt import TrtKVCache, TrtModel

from .arguments import FOLDER, OUTPUT_FILE, engines_option, provider_option, threads_option
from .progress import stages
from .tables import duration, number, table

__all__ = ["command"]

LENGTHS = (128, 2048, 8192)
ROWS = range(1, MOST_DRAFT_TOKENS + 2)
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Columns of the table of predicted speedups.
_SHOWN = (1, 2, 3, 4, 5, 6, 8, MOST_DRAFT_TOKENS)
# A kind of run: the model, the rows of the run, the length of the cache before it.
Kind = tuple[str, int, int]
_Model = OrtModel | TrtModel


class Lengths(click.ParamType[tuple[int, ...]]):
    """Lengths of a cache, with commas between them."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Check the lengths."""
        if isinstance(value, tuple):
            return value
        try:
            lengths = tuple(sorted({int(part) for part in value.split(",")}))
        except ValueError:
            lengths = (0,)
        if lengths[0] < 1:
            self.fail(f"got {value!r}; lengths of at least 1 with commas between them are expected.", param, ctx)
        return lengths


@click.command("tune")
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--lengths",
    metavar="N,N…",
    type=Lengths(),
    help="Lengths of the KV cache to measure at.  [default: 128, 2048 and 8192, as far as the context goes]",
)
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=3),
    default=7,
    show_default=True,
    help="Measured runs of each kind; the profile holds their medians.",
)
@provider_option
@engines_option
@threads_option
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    help="Write the profile here.  [default: the user's cache folder, where commands find it]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
def command(
    folder: Path,
    lengths: tuple[int, ...] | None,
    repeats: int,
    provider: str,
    engine_folder: Path | None,
    threads: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure what runs of the models in the bundle DIR take on this machine, and predict speedups.

    The target's pass by its number of rows, and the draft model's step, at several lengths of the KV cache. The times
    are stored outside the bundle as a profile. From then on drafts are planned by it, for this bundle, machine, number
    of threads and version of ONNX Runtime.
    """
    bundle = Bundle.open(folder)
    lengths = _checked_lengths(bundle, lengths)
    # Loaded as for a generation: where the weights lie in memory decides what a pass takes.
    decoder = paceline.load(folder, provider=provider, threads=threads, profile=None, engines=engine_folder)
    target, draft = cast(_Model, decoder.target), own_model(decoder)
    started = time.perf_counter()
    with stages() as on_progress:
        times = measure(target, draft, lengths, repeats, on_progress)
    setup = setup_of(bundle, provider, engine_folder)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    spreads = {kind: _spread(values) for kind, values in times.items()}

    def passes(figures: dict[Kind, float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(figures["target", rows, length] for rows in ROWS) for length in lengths)

    def steps(figures: dict[Kind, float]) -> tuple[float, ...] | None:
        return None if draft is None else tuple(figures["draft", 1, length] for length in lengths)

    profile = CostProfile(
        PROFILE_FORMAT,
        setup,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        repeats,
        lengths,
        passes(medians),
        passes(spreads),
        steps(medians),
        steps(spreads),
    )
    path = output or default_folder() / setup.file_name
    failed: OSError | None = None
    try:
        profile.write(path)
    except OSError as error:  # what was measured is printed all the same
        failed = error
    if as_json:
        predictions = list(_predictions(profile)) if profile.draft_step else []
        stored = None if failed else str(path)
        click.echo(json.dumps({"path": stored, "profile": asdict(profile), "predictions": predictions}))
    else:
        click.echo(_text(profile, time.perf_counter() - started))
    if failed:
        raise click.ClickException(
            f"{path} cannot be written ({failed.strerror or failed}), so the measurements are only printed. Name "
            "another file with -o."
        ) from failed
    if not as_json:
        click.echo(f"\nStored in {path}.")


def own_model(decoder: paceline.SpeculativeDecoder) -> _Model | None:
    """The draft model itself, over its own ids."""
    draft = decoder.draft
    return cast(_Model | None, draft.inner if isinstance(draft, TranslatedModel) else draft)


def measure(
    target: _Model,
    draft: _Model | None,
    lengths: Sequence[int],
    repeats: int,
    on_progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> dict[Kind, list[float]]:
    """Seconds of `repeats` runs of each kind, interleaved: every repeat runs all kinds, in turn forwards and backwards.

    A step of the draft model goes before each target pass, as in a round, so that neither finds its weights in the
    processor's caches. One round over all kinds goes before, to warm up.
    """
    rng = np.random.default_rng(0)
    longest = max(lengths)
    on_progress("fill the KV caches", 0.0)
    models: dict[str, tuple[_Model, OrtKVCache | TrtKVCache]] = {}
    for name, model in (("target", target), ("draft", draft)):
        if model is not None:
            cache = model.new_cache(longest + len(ROWS))
            cache.pretend(longest, rng)
            models[name] = model, cache

    times: dict[Kind, list[float]] = defaultdict(list)

    def run(kind: Kind) -> float:
        name, rows, length = kind
        model, cache = models[name]
        cache.rollback(min(length, cache.length))
        cache.advance(length - cache.length)
        tokens = rng.integers(0, model.vocab_size, rows).tolist()
        before = cache.seconds
        model.forward(tokens, cache, rows)
        return cache.seconds - before

    kinds = [("target", rows, length) for length in lengths for rows in ROWS]
    for repeat in range(repeats + 1):
        on_progress("measure" if repeat else "warm up", repeat / (repeats + 1))
        for name, rows, length in kinds if repeat % 2 else reversed(kinds):
            step: Kind = ("draft", 1, length)
            if "draft" in models:
                seconds = run(step)
                if repeat:
                    times[step].append(seconds)
            seconds = run((name, rows, length))
            if repeat:
                times[name, rows, length].append(seconds)
    return times


def _checked_lengths(bundle: Bundle, lengths: tuple[int, ...] | None) -> tuple[int, ...]:
    """The lengths that both models' contexts have room for, with a pass behind them."""
    manifest = bundle.manifest
    context = min(model.max_length for model in (manifest.target, manifest.draft) if model is not None)
    room = context - len(ROWS)
    if lengths is None:
        return tuple(length for length in LENGTHS if length <= room) or (max(room // 2, 1),)
    if lengths[-1] > room:
        raise InvalidInputError(
            f"--lengths goes to {lengths[-1]}, but the models' contexts hold {context} positions and a pass needs "
            f"{len(ROWS)} of them: use at most {room}."
        )
    return lengths


def _spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def _predictions(profile: CostProfile) -> Iterator[dict[str, Any]]:
    """Speedups by length, acceptance rate and number of drafted tokens, by `paceline.theory`."""
    costs = profile.costs()
    for length in profile.lengths:
        at = costs.at(length)
        first = at.target(1)

        def v(k: int, at: Costs = at, first: float = first) -> float:
            return at.target(k + 1) / first

        for acceptance in ACCEPTANCES:
            best, gain = best_num_draft_tokens(
                acceptance, at.draft_step / first, verification_cost=v, most=MOST_DRAFT_TOKENS
            )
            speedups = {
                k: speedup(acceptance, k, at.draft_step / first, verification_cost=v)
                for k in range(1, MOST_DRAFT_TOKENS + 1)
            }
            yield {
                "length": length,
                "acceptance": acceptance,
                "best": best,
                "best_speedup": gain,
                "speedups": speedups,
            }


def _text(profile: CostProfile, seconds: float) -> str:
    def cell(time_s: float, spread: float) -> str:
        return f"{1000 * time_s:.2f} ± {1000 * spread:.2f}"

    rows = [
        (f"target, {count} row{'s' if count > 1 else ''}", *map(cell, times, spreads))
        for count, times, spreads in zip(
            ROWS, zip(*profile.target_pass, strict=True), zip(*profile.target_spread, strict=True), strict=True
        )
    ]
    if profile.draft_step is not None and profile.draft_spread is not None:
        rows.append(("draft, a step", *map(cell, profile.draft_step, profile.draft_spread)))
    setup = profile.setup
    threads = f"{setup.threads} threads" if setup.threads else "a thread per core"
    parts = [
        table(("ms by length of the cache", *map(str, profile.lengths)), rows),
        f"Medians of {profile.repeats} interleaved runs ± half the distance between their quartiles, in "
        f"{duration(seconds)}, on {setup.device}, {setup.cores} cores, {threads}, ONNX Runtime {setup.onnxruntime}.",
    ]
    if profile.draft_step is None:
        parts.append("The bundle has no draft model; copies by prompt lookup are planned by these times.")
        return "\n\n".join(parts)
    by_length: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for prediction in _predictions(profile):
        by_length[prediction["length"]].append(prediction)
    for length, predictions in by_length.items():
        header = ("stand", *(f"K = {k}" for k in _SHOWN), "best")
        cells = [
            (
                f"{100 * one['acceptance']:.0f} %",
                *(number(one["speedups"][k]) for k in _SHOWN),
                f"{one['best_speedup']:.2f} at {one['best']}",
            )
            for one in predictions
        ]
        parts.append(f"Predicted speedup over plain decoding at length {length}:\n{table(header, cells)}")
    parts.append(
        "By the share of drafted tokens that stand, and K tokens drafted per round; `paceline plan` prints the "
        "formula. Sampling and bookkeeping are left out, and with auto K follows the text."
    )
    return "\n\n".join(parts)
