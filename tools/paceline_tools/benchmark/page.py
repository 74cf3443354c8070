"""The page of a benchmark: `page.html.jinja` filled with charts. It holds everything and asks for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from paceline_tools.tables import duration, number, percent, size

from .charts import COLOURS, Range, Series, columns, lines, ranges, stacks
from .document import Document
from .figures import Runs
from .methods import PLAIN
from .report import interval

__all__ = ["Chart", "charts", "page"]

_PARTS = {
    "prompt": "passes over the prompt",
    "target": "target's passes",
    "draft": "draft's steps",
    "other": "sampling, bookkeeping",
}
_MOST_POINTS = 160


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, its legend, what it says in words, and its figures as a table."""

    title: str
    text: str
    svg: Markup
    legend: Sequence[tuple[str, int]]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(document: Document, summary: Mapping[str, Any]) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "interval": interval,
        "number": number,
        "percent": percent,
        "size": size,
        "duration": duration,
    }
    samplings = {
        sampling: {
            "methods": found["methods"],
            "crowds": found["crowds"],
            "charts": list(charts(document, sampling, found)),
        }
        for sampling, found in summary["samplings"].items()
    }
    return environment.get_template("page.html.jinja").render(
        document=document, run=document.run, summary=summary, samplings=samplings, best=_best(summary)
    )


def charts(document: Document, sampling: str, found: Mapping[str, Any]) -> Iterator[Chart]:
    """The charts of one sampling, those that have something to show."""
    methods: Mapping[str, Any] = found["methods"]
    colour = {name: index % COLOURS for index, name in enumerate(methods)}
    speculative = [name for name in methods if name != PLAIN and methods[name]["all"]["speedup"]]
    drafting = [name for name in methods if methods[name]["all"]["proposed_at"]]
    if speculative:
        yield _speedups(document, methods, speculative, colour)
    if found["forecast"]:
        yield from _against_k(document, methods, found["forecast"], colour)
    if drafting:
        yield _places(methods, drafting, colour)
        yield _lengths(methods, drafting, colour)
    runs = Runs(document, sampling)
    gaps = {document.methods[index].name: _bursts(runs, index) for index in runs.methods}
    gaps = {name: values for name, values in gaps.items() if values}
    if gaps:
        yield _latency(methods, gaps, colour)
    if any(methods[name]["all"]["shares"] for name in methods):
        yield _time(methods)


def _best(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The method with the largest speedup."""
    known = [
        {"sampling": sampling, "method": name, **one["all"]}
        for sampling, found in summary["samplings"].items()
        for name, one in found["methods"].items()
        if one["all"]["speedup"]
    ]
    return max(known, key=lambda one: one["speedup"]["value"], default=None)


def _speedups(document: Document, methods: Mapping[str, Any], names: Sequence[str], colour: Mapping[str, int]) -> Chart:
    kinds = {"all prompts": [methods[name]["all"] for name in names]}
    for category in document.categories if len(document.categories) > 1 else ():
        kinds[category] = [methods[name]["categories"][category] for name in names]
    rows, cells = [], []
    for kind, figures in kinds.items():
        known = [(name, one["speedup"]) for name, one in zip(names, figures, strict=True) if one["speedup"]]
        if known:
            rows.append((kind, [Range(name, colour[name], **found) for name, found in known]))
        cells.append([kind, str(figures[0]["timed_prompts"]), *(interval(one["speedup"]) for one in figures)])
    title = "Speedup by category" if len(kinds) > 1 else "Speedup"
    return Chart(
        title,
        "Over plain decoding (1×), passes over the prompt left out. Lines are 95 % intervals.",
        ranges(title, rows, "times plain decoding's speed", unit="×", base=1.0),
        [(name, colour[name]) for name in names],
        ["prompts", "number", *names],
        cells,
    )


def _against_k(
    document: Document, methods: Mapping[str, Any], curves: Sequence[Mapping[str, Any]], colour: Mapping[str, int]
) -> Iterator[Chart]:
    for curve in curves:
        family = (curve["drafter"], curve["verification"])
        by_k = {
            method.fixed: method.name
            for method in document.methods
            if method.fixed and (method.drafter, method.verification) == family and method.name in methods
        }
        measured = {k: methods[by_k[k]]["all"]["speedup"] for k in sorted(by_k) if methods[by_k[k]]["all"]["speedup"]}
        if not measured:
            continue
        tone = colour[by_k[min(measured)]]
        points = [(float(point["k"]), point["speedup"]) for point in curve["points"]]
        whiskers = [None if one["low"] is None else (one["low"], one["high"]) for one in measured.values()]
        series = [
            Series("predicted", tone, points, dashed=True, dots=False),
            Series("measured", tone, [(float(k), one["value"]) for k, one in measured.items()], whiskers),
        ]
        kind = ", ".join(word for word in (curve["drafter"], f"{curve['verification']} rule") if word)
        yield Chart(
            f"Speedup against K ({kind})" if len(curves) > 1 else "Speedup against K",
            "K tokens are drafted per round. Dashed: what the theory gives for the acceptance and the costs that were "
            "measured here. Solid: measured, with 95 % intervals.",
            lines("Speedup against K", series, "drafted tokens per round, K", "speedup", unit="×", base=1.0),
            [],
            ["K", "predicted", "measured"],
            [[f"{k:g}", number(predicted, 2, "×"), interval(measured.get(int(k)), 2, "×")] for k, predicted in points],
        )


def _places(methods: Mapping[str, Any], names: Sequence[str], colour: Mapping[str, int]) -> Chart:
    series, cells = [], []
    for name in names:
        one = methods[name]["all"]
        rates = [100 * stood / asked for stood, asked in zip(one["accepted_at"], one["proposed_at"], strict=True)]
        series.append(Series(name, colour[name], [(float(place), rate) for place, rate in enumerate(rates, 1)]))
        cells += [
            [name, str(place), str(asked), percent(stood / asked)]
            for place, (stood, asked) in enumerate(zip(one["accepted_at"], one["proposed_at"], strict=True), 1)
        ]
    return Chart(
        "Acceptance by place",
        "Of the rounds that drafted a first, second, … token: how often it stood. All before it stood, too.",
        lines("Acceptance by place", series, "place in the draft", "stood", unit=" %"),
        [(name, colour[name]) for name in names],
        ["method", "place", "drafted", "stood"],
        cells,
    )


def _lengths(methods: Mapping[str, Any], names: Sequence[str], colour: Mapping[str, int]) -> Chart:
    series, cells = [], []
    for name in names:
        counts = methods[name]["all"]["accepted_lengths"]
        total = sum(counts)
        series.append(Series(name, colour[name], [(float(n), 100 * c / total) for n, c in enumerate(counts)]))
        cells += [[name, str(n), str(count), percent(count / total)] for n, count in enumerate(counts)]
    return Chart(
        "Accepted tokens per round",
        "Of the rounds that drafted: how many of the drafted tokens stood. One more token follows in each round.",
        columns("Accepted tokens per round", series, "accepted tokens", "rounds", unit=" %"),
        [(name, colour[name]) for name in names],
        ["method", "accepted", "rounds", "share"],
        cells,
    )


def _bursts(runs: Runs, method: int) -> list[float]:
    """Milliseconds of all steps behind the first, ascending."""
    return sorted(1000 * seconds for one in runs.by_method[method] for seconds in one.steps_s[1:])


def _latency(methods: Mapping[str, Any], gaps: Mapping[str, Sequence[float]], colour: Mapping[str, int]) -> Chart:
    # What few steps take would squeeze the rest.
    most = max(float(np.percentile(values, 99)) for values in gaps.values())
    series = []
    for name, values in gaps.items():
        shares = np.linspace(0, 100, min(_MOST_POINTS, len(values)))
        found = np.percentile(values, shares, method="inverted_cdf")
        points = [(float(ms), float(share)) for ms, share in zip(found, shares, strict=True) if ms <= most]
        series.append(Series(name, colour[name], points, dots=False))
    return Chart(
        "Time between bursts",
        "The share of steps that took at most so long; a step of speculative decoding brings several tokens at once. "
        "The slowest hundredth is cut off.",
        lines("Time between bursts", series, "milliseconds", "steps", unit=" %"),
        [(name, colour[name]) for name in gaps],
        ["ms", *(f"{what} {share}" for what in ("burst", "token") for share in ("p50", "p90", "p99"))],
        [
            [
                name,
                *(
                    number(value, 1)
                    for key in ("burst_gap_ms", "token_gap_ms")
                    for value in methods[name]["all"][key].values()
                ),
            ]
            for name in gaps
        ],
    )


def _time(methods: Mapping[str, Any]) -> Chart:
    shares = {name: found for name in methods if (found := methods[name]["all"]["shares"])}
    return Chart(
        "Where the time goes",
        "From the call to the last token.",
        stacks(
            "Where the time goes",
            [(name, [(text, one[part]) for part, text in _PARTS.items()]) for name, one in shares.items()],
            "share of the time",
        ),
        [(text, index) for index, text in enumerate(_PARTS.values())],
        ["method", *_PARTS.values(), "outside"],
        [[name, *(percent(one[part]) for part in (*_PARTS, "outside"))] for name, one in shares.items()],
    )
