"""The paper's table and curves for a terminal, and as Markdown, from the summary alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline_tools.tables import duration, number, percent, size, table

from .methods import PLAIN
from .paper_document import PaperDocument, Part
from .report import interval

__all__ = ["markdown", "paper_report"]

_Rows = Sequence[Sequence[str]]
_Table = Callable[[Sequence[str], _Rows], str]


def paper_report(document: PaperDocument, summary: Mapping[str, Any]) -> str:
    """All tables, for a terminal."""
    parts = [
        f"── {_title(part)} ──\n\n{text}"
        for part, found in zip(document.parts, summary["parts"], strict=True)
        for text in [_part(part, found, table)]
    ]
    return "\n\n".join([*parts, "\n".join(_notes(document))])


def markdown(document: PaperDocument, summary: Mapping[str, Any]) -> str:
    """The same tables as a page of Markdown, with the command and the machine."""
    run = document.run
    lines = [
        "# Table 1 and Figure 1 of arXiv 2302.01318, at this scale",
        "",
        f"`{shlex.join(run['command'])}`",
        "",
        *(f"- {line}" for line in _notes(document)),
        "",
    ]
    for part, found in zip(document.parts, summary["parts"], strict=True):
        lines += [f"## {_title(part)}", "", _part(part, found, _pipes), ""]
    return "\n".join(lines)


def _pipes(header: Sequence[str], rows: _Rows) -> str:
    cells = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in cells)


def _title(part: Part) -> str:
    settings = part.settings
    prompts = len(part.document.prompts)
    what = f"{part.task}: {prompts} {'prompt' if prompts == 1 else 'prompts'}"
    if part.stage == "curves":
        what += ", against K"
    nucleus = f"nucleus of temperature {settings['temperature']:g} and top-p {settings['top_p']:g}, and "
    if not settings["temperature"]:  # curves of older runs are of greedy texts alone
        nucleus = ""
    return f"{what}, {nucleus}greedy, at most {settings['max_new_tokens']} tokens"


def _part(part: Part, found: Mapping[str, Any], draw: _Table) -> str:
    if part.stage == "curves":
        return _curve(found, draw)
    return "\n\n".join([_quality_and_speed(part, found, draw), *_remarks(part, found)])


def _quality_and_speed(part: Part, found: Mapping[str, Any], draw: _Table) -> str:
    header = (
        "sampling and method",
        f"{part.metric} (95 %)",
        "SpS − ArS (95 %)",
        "ms/token (95 %)",
        "speedup (95 %)",
        "with prompt",
        "acceptance",
        "tokens/loop",
        "same text",
    )
    rows = []
    for sampling, methods in found["bench"]["samplings"].items():
        for name, figures in methods["methods"].items():
            one, quality = figures["all"], found["quality"][sampling][name]
            same = one["same_as_plain"]
            rows.append(
                (
                    _label(sampling, name),
                    _score(quality["score"]),
                    _score(quality["difference"], signed=True),
                    interval(one["ms_per_token"]),
                    interval(one["speedup"], 2, "×"),
                    interval(one["speedup_whole"], 2, "×"),
                    percent(one["acceptance_rate"]),
                    number(one["block_efficiency"]),
                    f"{same['same']} of {same['prompts']}" if same else "–",
                )
            )
    return draw(header, rows)


def _label(sampling: str, name: str) -> str:
    kind = _kind(sampling)
    return f"ArS {kind}" if name == PLAIN else f"SpS {kind}, {name}"


def _kind(sampling: str) -> str:
    return "greedy" if sampling == "greedy" else "nucleus"


def _score(found: Mapping[str, float | None] | None, *, signed: bool = False) -> str:
    """A score or a difference, in the paper's three decimals, with its interval."""
    if found is None:
        return "–"
    form = "{:+.3f}" if signed else "{:.3f}"
    text = form.format(found["value"])
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text} ({form.format(found['low'])} … {form.format(found['high'])})"


def _remarks(part: Part, found: Mapping[str, Any]) -> list[str]:
    lines = []
    for sampling, methods in found["quality"].items():
        for name, quality in methods.items():
            difference = quality["difference"]
            if difference and difference["low"] is not None and not difference["low"] <= 0 <= difference["high"]:
                lines.append(
                    f"{_label(sampling, name)} differs from ArS by more than its interval. The interval misses a "
                    "difference of nothing once in 20 comparisons, by chance."
                )
    outcomes = {
        _label(sampling, name): quality["outcomes"]
        for sampling, methods in found["quality"].items()
        for name, quality in methods.items()
        if quality["outcomes"].keys() - {"judged"}
    }
    if outcomes:
        lines.append(
            "Answers: "
            + "; ".join(
                f"{label}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
                for label, counts in outcomes.items()
            )
            + "."
        )
    skipped = part.document.skipped
    if skipped:
        lines.append(f"{len(skipped)} prompts were skipped: {skipped[0].reason}.")
    return lines


def _curve(found: Mapping[str, Any], draw: _Table) -> str:
    forecast = {
        (sampling, point["k"]): point["speedup"]
        for sampling, one in found["bench"]["samplings"].items()
        for curve in one["forecast"]
        for point in curve["points"]
    }
    rows = [
        (
            f"{_kind(point['sampling'])}, {point['k']}",
            interval(point["ms_per_token"]),
            interval(point["speedup"], 2, "×"),
            number(forecast.get((point["sampling"], point["k"])) if point["k"] else None, 2, "×"),
            percent(point["acceptance_rate"]),
            percent(point["loop_efficiency"]),
            interval(point["loop_ms"], 1),
        )
        for point in found["curve"]
    ]
    header = (
        "sampling, K",
        "ms/token (95 %)",
        "speedup (95 %)",
        "by the theory",
        "acceptance",
        "tokens/loop ÷ (K + 1)",
        "ms/loop (95 %)",
    )
    return draw(header, rows)


def _notes(document: PaperDocument) -> list[str]:
    run = document.run
    machine, bundle = run["machine"], run["bundle"]
    draft = bundle["draft"]
    models = f"{bundle['target']['source']} ({bundle['target']['precision']})"
    if draft:
        models += f" with {draft['source']} ({draft['precision']})"
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"{models}, paceline {run['paceline']}, {run['started']}, {duration(run['seconds'])}.",
        f"{machine['cpu']}, {machine['cores']} cores; {machine['system']}; Python {machine['python']}, {packages}.",
        f"Loaded in {duration(run['load_s'])}; {size(run['peak_bytes'])} of memory at most.",
        "ArS: plain decoding; SpS: speculative decoding; all methods wrote in turns, in one process. ms/token and "
        "speedup leave the passes over the prompt out. Intervals of times hold the machine's drift, too, which "
        "speedups hardly feel. The paper measured Chinchilla 70B on 16 TPUs.",
    ]
    if not document.complete:
        lines.append(f"THE RUN WAS BROKEN OFF ({run['ended_by']}); these are the texts up to then.")
    if run["shut_in"] is not None:
        missing = [name for name, there in run["shut_in"].items() if not there]
        lines.append(
            "Programs ran in processes of their own, with limits of time and memory"
            + (", without network and with no way to write files." if not missing else "")
            + (f"; this kernel could not shut them off from: {' and '.join(missing)}." if missing else "")
        )
    return lines
