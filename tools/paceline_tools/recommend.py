"""`paceline recommend`: which of several drafts pays for a target, measured on prompts of yours."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import paceline
from paceline import Bundle, SamplingParams
from paceline.bundle import AdapterEntry, Manifest, SourceEntry, file_sha256
from paceline.decoder import DEFAULT_VERIFICATION
from paceline.errors import CheckpointError, InvalidInputError
from paceline.theory import best_num_draft_tokens, tokens_per_round

from .arguments import CACHE_DIR, FOLDER, SOURCE, NumberRange, own_layers, provider_option, raw_option, threads_option
from .benchmark.forecast import acceptance_by_place, pass_and_rest
from .benchmark.measurement import Measurement, Plan, measure
from .benchmark.meters import EnergyMeter
from .benchmark.methods import PLAIN, Method
from .benchmark.prompts import SETS, Prompt, read_prompts, unique
from .benchmark.runner import encoded
from .progress import stages
from .tables import number, percent, table

__all__ = ["Finding", "command", "judge"]

# A draft pays where it is expected to bring more than this: below, the clock cannot tell.
PAYS = 1.03


@dataclass(frozen=True, slots=True)
class Finding:
    """What one draft was measured to do for the target. Costs are over a round of plain decoding.

    Attributes:
        draft: its source, and how it drafts where its tokenizer is another one.
        bundle: where it lies; None where it was exported for the occasion.
        acceptance: by place: the share of drafted tokens that stand if those before them do.
        draft_cost: of the draft's time, for each drafted token.
        pass_cost: of a target pass that verifies as many drafted tokens as were measured.
        overhead: of the rest of a round.
        num_draft_tokens: as many as are expected to be best; 0 where drafting does not pay.
        predicted: speedup over plain decoding that is expected with so many.
        measured: speedup with as many drafted tokens as were measured, over the same texts.
        tokens_per_round: expected with `num_draft_tokens`.
    """

    draft: str
    bundle: str | None
    acceptance: tuple[float, ...]
    draft_cost: float
    pass_cost: float
    overhead: float
    num_draft_tokens: int
    predicted: float
    measured: float
    tokens_per_round: float


@click.command("recommend")
@click.argument("folders", metavar="DIR…", nargs=-1, required=True, type=FOLDER)
@click.option(
    "--draft",
    "drafts",
    metavar="SRC",
    type=SOURCE,
    multiple=True,
    help="A further draft for the target of the first DIR, exported for the occasion, with any tokenizer. May be "
    "repeated.",
)
@click.option(
    "--draft-precision",
    type=click.Choice(["fp32", "fp16", "int8", "int4"]),
    default="int4",
    show_default=True,
    help="How the weights of further drafts are stored.",
)
@click.option(
    "--prompts",
    metavar="WHAT",
    multiple=True,
    default=("demo",),
    show_default=True,
    help=f"As in `paceline bench`: {', '.join(SETS)}, a text file, a file of JSON lines, or -. May be repeated.",
)
@click.option("--per-category", metavar="N", type=click.IntRange(min=1), help="Take N prompts of each category.")
@raw_option
@click.option(
    "--draft-tokens",
    metavar="K",
    type=click.IntRange(1, 15),
    default=5,
    show_default=True,
    help="Tokens that are drafted per round while measuring; the recommendation is at most this.",
)
@click.option("--temperature", type=NumberRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of sampled texts.")
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Most tokens of each text.",
)
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Texts of each prompt, plain and drafted each.",
)
@provider_option
@threads_option
@click.option("--cache-dir", type=CACHE_DIR, help="Where packages of further drafts are assembled.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
@click.pass_context
def command(
    context: click.Context,
    /,
    folders: tuple[Path, ...],
    drafts: tuple[str, ...],
    draft_precision: str,
    prompts: tuple[str, ...],
    per_category: int | None,
    raw: bool,
    draft_tokens: int,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    repeats: int,
    provider: str,
    threads: int | None,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Say which draft pays for a target: those of the bundles in DIR, which share it, and further ones.

    Each draft writes the texts with K tokens per round, in turns with plain decoding. What it accepts by place, and
    what its steps, the target's passes and the rest of a round take, give the best number of drafted tokens and the
    speedup to expect. Read it as what this machine does now: a busy one moves all costs.
    """
    for name, option in (("draft_precision", "--draft-precision"), ("cache_dir", "--cache-dir")):
        if not drafts and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} is for drafts of --draft, and there is none.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise click.UsageError("DIR names a bundle twice; take each once.")
    bundles = [Bundle.open(folder) for folder in folders]
    _check_same_target(bundles)
    for bundle in bundles:
        if bundle.manifest.draft is None and (len(bundles) > 1 or not drafts):
            raise InvalidInputError(f"{bundle.root} has no draft model; name drafts with --draft.")
    more = [_further(bundles[0], draft, cache_dir) for draft in drafts]
    texts = unique(prompt for source in prompts for prompt in read_prompts(source, raw=raw, per_category=per_category))
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    methods = tuple(
        Method(
            PLAIN if k == 0 else f"K = {k}",
            sampling,
            temperature,
            k,
            "draft-model" if k else None,
            DEFAULT_VERIFICATION,
        )
        for k in (0, draft_tokens)
    )
    plan = Plan(methods, max_new_tokens, repeats, SamplingParams(), seed, ignore_end=False)
    with ExitStack() as stack:
        on_progress = stack.enter_context(stages())
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-recommend-")))
        ready = [bundle for bundle in bundles if bundle.manifest.draft is not None]
        further = _exported(bundles[0], more, draft_precision, work, on_progress)
        findings = []
        for index, bundle in enumerate(chain(ready, further)):
            name = _name(bundle.manifest)

            def report(stage: str, done: float, name: str = name, index: int = index) -> None:
                on_progress(f"measure {name}", (index + done) / (len(ready) + len(more)))

            found = _measured(bundle, texts, raw, plan, provider, threads, report)
            findings.append(judge(name, str(bundle.root) if index < len(ready) else None, found, draft_tokens))
    findings.sort(key=lambda one: -one.predicted)
    settings = {
        "bundles": [str(folder) for folder in folders],
        "prompts": list(prompts),
        "num_prompts": len(texts),
        "draft_tokens": draft_tokens,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
    }
    if as_json:
        best = findings[0].draft if findings[0].predicted >= PAYS else None
        document = {"recommended": best, "drafts": [asdict(one) for one in findings], "settings": settings}
        click.echo(json.dumps(document, ensure_ascii=False, indent=1))
        return
    click.echo(_text(findings, draft_tokens, len(texts), sampling))


def judge(name: str, bundle: str | None, texts: Sequence[Measurement], most: int) -> Finding:
    """From measured texts, plain ones (method 0) and those with `most` drafted tokens (method 1), to what to expect.

    The formula is `paceline.theory.speedup`'s: costs are means over all texts, v(K) is on the line between plain
    decoding's passes and those that were measured, acceptance by place is that of all texts.
    """
    plain, drafted = ([one for one in texts if one.method == method] for method in (0, 1))
    plain_pass, plain_rest = pass_and_rest(plain)
    target_pass, rest = pass_and_rest(drafted)
    unit = plain_pass + plain_rest
    proposed = sum(sum(one.steps_proposed) for one in drafted)
    if not unit or not sum(one.rounds for one in drafted):
        raise InvalidInputError(f"{name}: every text ended with its first token, so nothing can be said; give others.")
    rates = acceptance_by_place(drafted, [0.0] * most)
    # A draft that proposes fewer tokens than it may, or none, makes its passes shorter.
    rounds = sum(one.rounds for one in drafted)
    mean = proposed / rounds
    cost = sum(one.draft_s for one in drafted) / proposed / unit if proposed else 0.0

    def pass_cost(k: int) -> float:
        slope = (target_pass - plain_pass) / mean if mean else 0.0
        return max(plain_pass + slope * k, plain_pass, 1e-9) / unit

    overhead = max(rest, 0.0) / unit
    best, gain = best_num_draft_tokens(rates, cost, verification_cost=pass_cost, overhead=overhead, most=most)
    seconds = [
        sum(one.decode_s for one in one_way) / sum(one.decoded for one in one_way) for one_way in (plain, drafted)
    ]
    return Finding(
        name,
        bundle,
        tuple(rates),
        cost,
        pass_cost(most),
        overhead,
        best,
        gain,
        seconds[0] / seconds[1],
        tokens_per_round(rates, best),
    )


def _check_same_target(bundles: Sequence[Bundle]) -> None:
    hashes = [bundle.manifest.graph_sha256(bundle.manifest.target) for bundle in bundles]
    for bundle, found in zip(bundles, hashes, strict=True):
        if found != hashes[0]:
            raise InvalidInputError(
                f"{bundle.root} and {bundles[0].root} hold different targets, so their drafts cannot be compared. "
                f"`paceline export --target {bundles[0].root} --draft SRC` makes a bundle with the same one."
            )


def _name(manifest: Manifest) -> str:
    assert manifest.draft is not None
    own = manifest.draft_tokenizer
    return f"{manifest.draft.source.name}, {manifest.draft.precision}" + (f", by {own.method}" if own else "")


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft of `--draft`, on this machine: its source, the layers that are cut from it, and an adapter of it."""

    name: str
    source: Any  # of paceline_export, which is imported when it is needed
    layers: int | None = None
    adapter: Path | None = None


def _further(bundle: Bundle, draft: str, cache_dir: Path | None) -> _Draft:
    """Where a draft of `--draft` comes from, brought to this machine."""
    from paceline_export.source import resolve

    layers = own_layers(draft)
    if layers is None:
        return _Draft(draft, resolve(draft, cache_dir=cache_dir, progress=False))
    if layers >= (whole := bundle.manifest.target.num_layers):
        raise InvalidInputError(
            f"--draft {draft}: the target has {whole} layers; choose from self:1 to self:{whole - 1}."
        )
    entry, adapter = bundle.manifest.target.source, None
    if entry.adapter is not None:  # the target's first layers are those of the merged weights
        adapter = _beside(bundle, draft, entry.adapter, lambda path: file_sha256(path / "adapter_model.safetensors"))
    place = entry.name
    if entry.kind not in ("recipe", "hub"):
        place = str(_beside(bundle, draft, entry, lambda path: resolve(str(path)).sha256()))
    return _Draft(draft, resolve(place, cache_dir=cache_dir, progress=False), layers, adapter)


def _beside(bundle: Bundle, draft: str, entry: SourceEntry | AdapterEntry, sha256: Callable[[Path], str]) -> Path:
    """What a bundle's target was made of and is on this disk: of the name in the manifest, and with the same weights.

    The manifest keeps a name and a hash, no path. The current folder is looked into, and the one that the bundle is in.

    Raises:
        InvalidInputError: it is in neither.
    """
    what = "the checkpoint" if isinstance(entry, SourceEntry) else "the adapter"
    folders = (Path(), bundle.root.resolve().parent)
    places = dict.fromkeys(folder.resolve() / Path(entry.name).name for folder in folders)
    others = []
    for path in places:
        if path.exists():
            with suppress(CheckpointError, OSError):  # another folder of this name
                if sha256(path) == entry.sha256:
                    return path
            others.append(str(path))
    source = bundle.manifest.target.source
    place = source.name if source.kind in ("recipe", "hub") else f"PATH/{source.name}"
    adapted = f" --adapter PATH/{source.adapter.name}" if source.adapter is not None else ""
    raise InvalidInputError(
        f"--draft {draft} needs {what} that the target of {bundle.root} was made of, {entry.name}, and "
        + (
            f"other weights are in {' and '.join(others)}. "
            if others
            else "there is none of this name in this folder. "
        )
        + f"Run this command in the folder that {entry.name} is in, or export the draft yourself: paceline export "
        f"--target {place}{adapted} --draft {draft} -o NEW, and name NEW as DIR."
    )


def _exported(
    bundle: Bundle,
    drafts: Sequence[_Draft],
    precision: str,
    work: Path,
    on_progress: Callable[[str, float], None],
) -> Iterator[Bundle]:
    """Bundles with the target of another one and further drafts; each is removed when the next is asked for."""
    if not drafts:
        return

    from paceline_export.export import export_bundle

    for index, draft in enumerate(drafts):
        on_progress(f"export {draft.name}", 0.0)
        export_bundle(
            bundle,
            draft.source,
            work / str(index),
            flavor=bundle.manifest.target.flavor,
            precision=precision,
            draft_layers=draft.layers,
            draft_adapter=draft.adapter,
            quality=False,
        )
        yield Bundle.open(work / str(index))
        shutil.rmtree(work / str(index))  # it holds a copy of the target


def _measured(
    bundle: Bundle,
    prompts: Sequence[Prompt],
    raw: bool,
    plan: Plan,
    provider: str,
    threads: int | None,
    on_progress: Callable[[str, float], None],
) -> list[Measurement]:
    """Texts by plain decoding and with the bundle's draft, in turns."""
    decoder = paceline.load(bundle.root, provider=provider, threads=threads, profile=None)
    _, ids, _ = encoded(decoder, prompts, raw, plan.max_new_tokens, decoder.target.max_length)
    found = measure(decoder, ids, plan, EnergyMeter(), {}, on_progress)
    return [one for one in found if isinstance(one, Measurement)]


def _text(findings: Sequence[Finding], most: int, num_prompts: int, sampling: str) -> str:
    header = ("draft", "stands, by place", "draft step", f"pass of {most + 1}", "best K", "predicted", f"K = {most}")
    rows = [
        (
            one.draft,
            " ".join(percent(rate) for rate in one.acceptance[:3]),
            number(one.draft_cost),
            number(one.pass_cost),
            str(one.num_draft_tokens),
            number(one.predicted, 2, "×"),
            number(one.measured, 2, "×"),
        )
        for one in findings
    ]
    best = findings[0]
    if best.predicted >= PAYS:
        verdict = (
            f"Take {best.draft}: {best.num_draft_tokens} drafted tokens a round should write "
            f"{best.predicted:.2f} times as fast as plain decoding."
        )
    else:
        verdict = (
            f"None pays: the best, {best.draft}, is expected to write {best.predicted:.2f} times as fast as plain "
            "decoding; leave drafts out, or copy by prompt lookup."
        )
    return "\n".join(
        (
            table(header, rows),
            "",
            f"{num_prompts} prompts, {sampling}. Costs are over a round of plain decoding; a draft's step holds what "
            "it takes for a token that it proposes. Predicted: with the best K. Last column: measured.",
            "",
            verdict,
        )
    )
