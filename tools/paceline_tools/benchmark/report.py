"""The tables of a benchmark for a terminal, from its summary alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_tools.tables import duration, number, percent, size, table

from .compare import Change
from .document import Document
from .figures import fewest_tokens
from .methods import method_name

__all__ = ["compared", "interval", "report"]

_SHARES = ("prompt", "target", "draft", "other", "outside")


def report(document: Document, summary: Mapping[str, Any]) -> str:
    """All tables."""
    parts = []
    for sampling, found in summary["samplings"].items():
        methods: Mapping[str, Any] = found["methods"]
        parts += [f"── {sampling} ──", _speed(methods), _latency(methods), _shares(methods)]
        if len(document.categories) > 1:
            parts.append(_by_category(document, methods))
        if found["forecast"]:
            parts.append(_forecast(methods, found["forecast"]))
        if found["crowds"]:
            parts.append(_crowds(found["crowds"]))
    parts.append(_notes(document, summary))
    return "\n\n".join(parts)


def interval(found: Mapping[str, float | None] | None, digits: int = 2, unit: str = "") -> str:
    """A figure with its interval: `1.43× (1.38–1.49)`."""
    if found is None:
        return "–"
    text = number(found["value"], digits, unit)
    if found["low"] is None:
        return text
    return f"{text} ({number(found['low'], digits)}–{number(found['high'], digits)})"


def compared(changes: Sequence[Change], differences: Sequence[str], tolerance: float) -> str:
    """What changed against an earlier run."""
    rows = [
        (
            f"{change.sampling}: {change.method}",
            change.figure,
            str(change.prompts),
            interval({"value": change.ratio.value, "low": change.ratio.low, "high": change.ratio.high}, 3),
            change.verdict or ("–" if change.ratio.low is None else "same"),
        )
        for change in changes
    ]
    slower = sum(change.verdict == "slower" for change in changes)
    lines = []
    if differences:
        lines.append(f"The runs differ in more than time: {'; '.join(differences)}.")
    if not rows:
        lines.append("The runs have no method with prompts in common, so nothing is compared.")
        return "\n".join(lines)
    lines += [table(("new / old", "figure", "prompts", "ratio (99 %)", ""), rows), ""]
    lines.append(
        f"{slower or 'No'} regression{'' if slower == 1 else 's'}: times whose whole interval lies more than "
        f"{100 * tolerance:g} % above the old ones."
    )
    return "\n".join(lines)


def _speed(methods: Mapping[str, Any]) -> str:
    header = (
        "method",
        "ms/token (95 %)",
        "tokens/s",
        "speedup (95 %)",
        "with prompt",
        "predicted",
        "acceptance",
        "tokens/pass",
        "same text",
    )
    rows = []
    for name, found in methods.items():
        one = found["all"]
        same = one["same_as_plain"]
        rows.append(
            (
                name,
                interval(one["ms_per_token"]),
                number(one["tokens_per_second"], 1),
                interval(one["speedup"], 2, "×"),
                interval(one["speedup_whole"], 2, "×"),
                number(one["predicted_speedup"], 2, "×"),
                percent(one["acceptance_rate"]),
                number(one["block_efficiency"]),
                f"{same['same']} of {same['prompts']}" if same else "–",
            )
        )
    return table(header, rows)


def _latency(methods: Mapping[str, Any]) -> str:
    header = ("ms, p50 / p90 / p99", "first token", "between tokens", "between bursts")
    rows = [
        (name, *(_percentiles(found["all"][key]) for key in ("first_token_ms", "token_gap_ms", "burst_gap_ms")))
        for name, found in methods.items()
    ]
    return table(header, rows)


def _percentiles(found: Mapping[str, float] | None) -> str:
    return " / ".join(number(value, 1) for value in found.values()) if found else "–"


def _shares(methods: Mapping[str, Any]) -> str:
    header = ("share of the time", "prompt", "target", "draft", "other", "outside", "J/token")
    rows = []
    for name, found in methods.items():
        shares = found["all"]["shares"] or dict.fromkeys(_SHARES)
        energy = number(found["all"]["energy_j_per_token"])
        rows.append((name, *(percent(shares[share]) for share in _SHARES), energy))
    return table(header, rows)


def _by_category(document: Document, methods: Mapping[str, Any]) -> str:
    names = [name for name, found in methods.items() if found["all"]["speedup"] is not None]
    rows = []
    for category in document.categories:
        found = [methods[name]["categories"][category] for name in names]
        prompts = str(found[0]["timed_prompts"]) if found else "–"
        rows.append((category, prompts, *(interval(one["speedup"]) for one in found)))
    return table(("speedup by category", "prompts", *names), rows)


def _forecast(methods: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for curve in curves:
        for point in curve["points"]:
            name = method_name(point["k"], curve["drafter"], curve["verification"])
            measured = methods.get(name)
            rows.append(
                (
                    name,
                    number(point["speedup"], 2, "×"),
                    interval(measured["all"]["speedup"], 2, "×") if measured else "–",
                )
            )
    return table(("speedup by the theory", "predicted", "measured"), rows)


def _crowds(crowds: Sequence[Mapping[str, Any]]) -> str:
    header = (
        "at once, method",
        "tokens/s of all",
        "ms/token of all (95 %)",
        "speedup (95 %)",
        "first token, ms",
        "between tokens, ms",
    )
    rows = [
        (
            f"{one['concurrency']}: {one['method']}",
            number(one["tokens_per_second"], 1),
            interval(one["ms_per_token"]),
            interval(one["speedup"], 2, "×"),
            _percentiles(one["first_token_ms"]),
            _percentiles(one["token_gap_ms"]),
        )
        for one in crowds
    ]
    return table(header, rows)


def _notes(document: Document, summary: Mapping[str, Any]) -> str:
    run, settings = document.run, document.run["settings"]
    texts = len(document.measurements)
    timed = [one["all"] for found in summary["samplings"].values() for one in found["methods"].values()]
    left_out = sum(one["texts"] - one["timed_texts"] for one in timed)
    by = run.get("ended_by") or "Ctrl-C"
    ending = "" if document.complete else f" THE RUN WAS BROKEN OFF ({by}); these are the texts up to then."
    lines = [
        f"{texts} texts of {len(document.prompts)} prompts, {settings['repeats']} repeats, at most "
        f"{settings['max_new_tokens']} new tokens, in turns; warm-up apart; {duration(run['seconds'])}.{ending}"
    ]
    if left_out:
        lines.append(
            f"{left_out} texts are left out of ms/token and speedup: in their turn some method wrote fewer than "
            f"{fewest_tokens(document)} tokens behind the first step, or none."
        )
    for failure in document.failures:
        method = document.methods[failure.method]
        lines.append(f"{method.name} ({method.sampling}) FAILED and was left out: {failure.reason}")
    for name, peer in run.get("peers", {}).items():
        versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
        lines.append(f"{name}: {versions}; {size(peer['resident_bytes'])} resident; {' and '.join(peer['models'])}.")
    for name, other in run.get("beside", {}).items():
        target, draft = other["target"], other["draft"]
        models = f"{target['source']} ({target['precision']})"
        models += f" with {draft['source']} ({draft['precision']})" if draft else ""
        lines.append(
            f"{name}: {models}, loaded in {duration(other['load_s'])}; its speedup is over this bundle's plain."
        )
    drifts = [found["drift"] for found in summary["samplings"].values()]
    if any(drifts):
        lines.append(
            f"Times of another run may lie {percent(max(drifts))} away for noise and drift alone, as this run's rounds "
            "tell; intervals of ms/token hold that, speedups are hardly touched by it."
        )
    if document.skipped:
        lines.append(f"{len(document.skipped)} prompts were skipped: {document.skipped[0].reason}.")
    share = summary["bandwidth_share"]
    if share is not None:
        lines.append(
            f"Plain decoding reaches {percent(share)} of what reading the target's {size(run['target_bytes'])} "
            f"from memory at {size(run['read_bytes_per_s'])}/s allows."
        )
    lines.append(
        f"Loaded in {duration(run['load_s'])}; {size(run['peak_bytes'])} of memory at most; {run['machine']['cpu']}, "
        f"{run['machine']['cores']} cores."
    )
    outside = max((abs(one["shares"]["outside"]) for one in timed if one["shares"]), default=0.0)
    if outside > 0.02:
        lines.append(f"The shares leave {percent(outside)} of a method's time unexplained: the machine is very busy.")
    return "\n".join(lines)
