"""`paceline bench`: plain and speculative decoding on prompts of yours, interleaved, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from paceline.drafters import DRAFTERS
from paceline.verify import VERIFICATION_RULES

from .arguments import (
    FOLDER,
    NUMBERS,
    OUTPUT_FILE,
    NumberRange,
    engines_option,
    profile_option,
    provider_option,
    raw_option,
    threads_option,
)
from .benchmark.compare import changes, differences
from .benchmark.document import Document
from .benchmark.figures import summarise
from .benchmark.option_types import CountList, DraftTokensList
from .benchmark.page import page
from .benchmark.paper import run_paper
from .benchmark.paper_document import PaperDocument
from .benchmark.paper_figures import summarise_paper
from .benchmark.paper_options import paper_arguments, paper_options, refuse_paper_options
from .benchmark.paper_report import markdown, paper_report
from .benchmark.peers import PEERS
from .benchmark.prompts import SETS
from .benchmark.report import compared, report
from .benchmark.runner import run_benchmark
from .files import write_or_rescue
from .sampling_options import sampling_options

__all__ = ["command"]

_INTERRUPTED = 130
_OUTPUTS = {"json_file": "--json", "html_file": "--html", "markdown_file": "--markdown"}


@click.command("bench")
@click.argument("folder", metavar="DIR", type=FOLDER, required=False)
@click.option(
    "--prompts",
    metavar="WHAT",
    multiple=True,
    default=("demo",),
    show_default=True,
    help=f"{', '.join(SETS)} (with a colon and a file: humaneval:FILE, spec-bench:FILE), a text file, a file of JSON "
    "lines, or - for stdin. May be repeated.",
)
@click.option(
    "--limit", metavar="N", type=click.IntRange(min=1), help="Look at no more than the first N prompts of each source."
)
@click.option(
    "--per-category",
    metavar="N",
    type=click.IntRange(min=1),
    help="Of each source, take N prompts of each category, evenly spread.",
)
@raw_option
@click.option(
    "--draft-tokens",
    metavar="K|auto,…",
    type=DraftTokensList(),
    default="auto",
    show_default=True,
    help="Tokens to draft per round, with commas: each is measured beside plain decoding; auto plans each round.",
)
@click.option(
    "--drafter",
    "drafters",
    type=click.Choice(list(DRAFTERS)),
    multiple=True,
    help="What drafts; each is measured. May be repeated.  [default: what is expected to be fastest]",
)
@click.option(
    "--verification",
    "rules",
    type=click.Choice(list(VERIFICATION_RULES)),
    multiple=True,
    help="The rule by which drafted tokens stand; each is measured. May be repeated.  [default: block]",
)
@click.option(
    "--temperature",
    "temperatures",
    metavar="T[,T…]",
    type=NUMBERS,
    default="0",
    show_default=True,
    help="Each is measured, with a plain decoding of its own; 0 is greedy.",
)
@sampling_options(temperature=None)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Of the first repeat of sampled texts; their plans then leave the clock alone.",
)
@click.option("--no-seed", is_flag=True, help="Fresh random numbers, and plans by the clock.")
@click.option(
    "--max-new-tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Most tokens of each text.",
)
@click.option("--ignore-end", is_flag=True, help="Write on behind end tokens, so that all texts are of one length.")
@click.option(
    "--repeats",
    metavar="N",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Texts of each prompt and method; an even number is fair to both orders.",
)
@click.option(
    "--concurrency",
    metavar="N[,N…]",
    type=CountList(),
    default="1",
    show_default=True,
    help="Beside one text at a time, also write so many at once, as `paceline serve` does.",
)
@provider_option
@engines_option
@threads_option
@profile_option
@click.option(
    "--beside",
    metavar="DIR",
    type=FOLDER,
    multiple=True,
    help="Measure another bundle of the checkpoint in the same turns, such as in another precision. May be repeated.",
)
@click.option(
    "--against",
    metavar="NAME:TARGET[:DRAFT]",
    multiple=True,
    help=f"Measure a peer in the same turns: {', '.join(PEERS)}, with its own export of the model. May be repeated.",
)
@click.option(
    "--peer-python",
    "peer_pythons",
    metavar="NAME:PYTHON",
    multiple=True,
    help="The Python that has the peer's package.  [default: this one]",
)
@paper_options
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write everything that was measured, too.")
@click.option("--html", "html_file", type=OUTPUT_FILE, help="Write a page with charts, too.")
@click.option(
    "--compare",
    "old_file",
    metavar="OLD.json",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with an earlier run; exit code 1 where something became slower, or nothing is in both runs.",
)
@click.option(
    "--tolerance",
    metavar="X",
    type=NumberRange(min=0, max=10),
    default=0.05,
    show_default=True,
    help="With --compare: what is never flagged; 0.05 is 5 %.",
)
@click.option(
    "--from",
    "from_file",
    metavar="RUN.json",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: show, draw and compare a run that was saved.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    folder: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    old_file: Path | None,
    from_file: Path | None,
    tolerance: float,
    paper: bool,
    **options: Any,
) -> None:
    """Measure plain and speculative decoding with the bundle in DIR.

    Every method writes a text for each prompt and repeat, in turns, in one process. Printed are medians over repeats
    and geometric means over prompts, with bootstrap intervals. Ctrl-C ends the run: what is there is saved and shown,
    with exit code 130; so it is after a fault, with exit code 1.
    """
    given = _check_options(context, folder, from_file)
    if paper:
        _paper(context, folder, from_file, json_file, paper_arguments(given, context.params))
        return
    refuse_paper_options(given)
    for name in ("markdown_file", "curve", "curve_prompts", "run_code"):
        del options[name]
    old = Document.read(old_file) if old_file else None
    broken: BaseException | None = None
    if from_file:
        document = Document.read(from_file)
    else:
        assert folder is not None
        document, broken = run_benchmark(folder, **options)
    summary = summarise(document)
    found = changes(old, document, tolerance) if old else []
    outputs = {json_file: lambda: document.to_json(summary), html_file: lambda: page(document, summary)}
    _finish(outputs, lambda: report(document, summary))
    if old:
        click.echo(f"\n── against {old_file} ──\n\n{compared(found, differences(old, document), tolerance)}")
    _end(context, broken)
    if old and (not found or any(change.verdict == "slower" for change in found)):
        context.exit(1)


def _paper(
    context: click.Context,
    folder: Path | None,
    from_file: Path | None,
    json_file: Path | None,
    arguments: dict[str, Any],
) -> None:
    markdown_file = arguments.pop("markdown_file")
    for name in ("folder", "from_file", "json_file"):
        del arguments[name]
    broken: BaseException | None = None
    if from_file:
        document = PaperDocument.read(from_file)
    else:
        assert folder is not None
        document, broken = run_paper(folder, **arguments)
    summary = summarise_paper(document)
    outputs = {json_file: lambda: document.to_json(summary), markdown_file: lambda: markdown(document, summary)}
    _finish(outputs, lambda: paper_report(document, summary))
    _end(context, broken)


def _finish(outputs: Mapping[Path | None, Callable[[], str]], show: Callable[[], str]) -> None:
    """Write the files that are asked for, and show the tables: also where one of them cannot be written."""
    failures: list[OSError] = []
    for path, text in outputs.items():
        try:
            if path is not None:
                write_or_rescue(path, text())
        except OSError as error:  # as where a disk is full: minutes of work shall not be lost
            failures.append(error)
    click.echo(show())
    for failure in failures[1:]:
        click.echo(f"Error: {failure.filename}: {failure.strerror}.", err=True)
    if failures:
        raise failures[0]


def _end(context: click.Context, broken: BaseException | None) -> None:
    """Raise what ended a run early; Ctrl-C becomes its exit code."""
    if isinstance(broken, KeyboardInterrupt):
        context.exit(_INTERRUPTED)
    if broken is not None:
        raise broken


def _check_options(context: click.Context, folder: Path | None, from_file: Path | None) -> dict[str, str]:
    """Refuse what contradicts itself or could not be honoured; the options that were given, by parameter."""
    if (folder is None) == (from_file is None):
        raise click.UsageError("Give the folder of a bundle, or --from with a run that was saved.")
    given = {
        parameter.name or "": parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    }
    for name, option in given.items() if from_file else ():
        if name not in ("from_file", "json_file", "html_file", "old_file", "tolerance", "paper", "markdown_file"):
            raise click.UsageError(f"--from measures nothing, so {option} cannot be honoured; leave it out.")
    if {"seed", "no_seed"} <= given.keys():
        raise click.UsageError("--seed and --no-seed exclude each other; give one of them.")
    if "tolerance" in given and "old_file" not in given:
        raise click.UsageError("--tolerance is for --compare; give an earlier run, too.")
    params = context.params
    outputs = [params[name] for name in _OUTPUTS if params[name] is not None]
    if len(set(outputs)) < len(outputs):
        names = " and ".join(option for name, option in _OUTPUTS.items() if params[name] is not None)
        raise click.UsageError(f"{names} name the same file; name two.")
    _check_outputs(params)
    return given


def _check_outputs(params: Mapping[str, Any]) -> None:
    """Refuse to write over what this run reads."""
    sources = [part for source in params["prompts"] for part in (source, source.partition(":")[2])]
    read = [params["from_file"], params["profile"], *sources]
    files = {Path(one).resolve() for one in read if one and one != "-"}
    for parameter, option in _OUTPUTS.items():
        output = params[parameter]
        if output is None:
            continue
        name, path = f"{option} {output}", output.resolve()
        if path in files:
            raise click.UsageError(f"{name} is a file that this run reads and would be lost; name another.")
