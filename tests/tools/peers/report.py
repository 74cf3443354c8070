"""From measurements to speedups: the summary that a run's JSON holds, and its tables.

A measurement is a dictionary: prompt, category, method (`engine:mode`), sampling, repeat, prompt_tokens, and the fields
of `line_server.Figures` with token_ids counted in new_tokens. The figure of a prompt and a method is the median over
repeats of the milliseconds of decoding per token, the pass over the prompt left out; ratios are taken prompt by prompt,
where both sides wrote enough tokens to tell, and joined by geometric means.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline_tools.tables import number, table

from .prompts import CODE, EDIT, RETRIEVAL

__all__ = ["BASE", "DEFAULT", "Figures", "geometric_mean", "summarise", "tables"]

BASE, DEFAULT, DRAFT_MODEL = "paceline:plain", "paceline:auto", "paceline:auto-draft-model"
# A text with fewer tokens behind the first is not looked at.
_FEWEST_TOKENS = 8
# Issue 4's bars: of the default over each peer's best mode, on code and on all.
_PEER_BARS = {
    "llama.cpp": (1.5, 1.15),
    "openvino": (1.3, 1.2),
    "genai": (1.8, None),
    "genai-tuned": (1.2, 1.1),
}


class Figures:
    """Milliseconds per token of one kind of sampling, by method and prompt."""

    def __init__(self, measurements: Iterable[dict[str, Any]]) -> None:
        runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self.category: dict[str, str] = {}
        self.methods: list[str] = []
        for one in measurements:
            self.category.setdefault(one["prompt"], one["category"])
            if one["method"] not in self.methods:
                self.methods.append(one["method"])
            if one["new_tokens"] - one["first_tokens"] >= _FEWEST_TOKENS:
                runs[one["method"], one["prompt"]].append(one)
        self._decoding = {key: _median(found, _ms_decoding) for key, found in runs.items()}
        self._whole = {key: _median(found, _ms_whole) for key, found in runs.items()}
        self._predicted = {key: _median(found, _predicted) for key, found in runs.items()}

    def prompts(self, chosen: Callable[[str], bool]) -> list[str]:
        """Prompts whose category is chosen."""
        return [prompt for prompt, category in self.category.items() if chosen(category)]

    def ms(self, method: str, prompts: Sequence[str], *, whole: bool = False) -> float | None:
        """Geometric mean of milliseconds per token; with the pass over the prompt if `whole`."""
        source = self._whole if whole else self._decoding
        return geometric_mean([source.get((method, prompt)) for prompt in prompts])

    def speedups(self, method: str, base: str, prompts: Sequence[str], *, whole: bool = False) -> dict[str, float]:
        """`base`'s time over `method`'s, by prompt; with the pass over the prompt if `whole`."""
        found = self._whole if whole else self._decoding
        return {
            prompt: base_ms / ms
            for prompt in prompts
            if (ms := found.get((method, prompt))) and (base_ms := found.get((base, prompt)))
        }

    def speedup(self, method: str, base: str, prompts: Sequence[str], *, whole: bool = False) -> float | None:
        """Geometric mean of `speedups`."""
        return geometric_mean(list(self.speedups(method, base, prompts, whole=whole).values()))

    def best(self, methods: Iterable[str], prompts: Sequence[str], *, whole: bool = False) -> str | None:
        """The method that is fastest on these prompts; with the pass over the prompt if `whole`."""
        timed = {method: ms for method in methods if (ms := self.ms(method, prompts, whole=whole))}
        return min(timed, key=timed.__getitem__) if timed else None

    def predicted(self, method: str, prompts: Sequence[str]) -> float | None:
        """Geometric mean of the speedups that paceline's plans expected; None where it tells none."""
        return geometric_mean([self._predicted.get((method, prompt)) for prompt in prompts])


def summarise(measurements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every figure that issue 4 asks for, by kind of sampling."""
    kinds = dict.fromkeys(one["sampling"] for one in measurements)
    return {kind: _summary(Figures(one for one in measurements if one["sampling"] == kind)) for kind in kinds}


def _summary(figures: Figures) -> dict[str, Any]:
    kinds = {
        "code": figures.prompts(lambda category: category in CODE),
        "all": figures.prompts(lambda category: category != EDIT),
    }
    categories = {
        category: figures.prompts(lambda other, wanted=category: other == wanted)  # type: ignore[misc]
        for category in dict.fromkeys(figures.category.values())
    }
    methods = {}
    for method in figures.methods:
        speedups = figures.speedups(method, BASE, list(figures.category))
        least = min(speedups, key=speedups.__getitem__, default=None)
        methods[method] = {
            **{f"ms_{kind}": figures.ms(method, prompts) for kind, prompts in kinds.items()},
            "ms_all_with_prompt": figures.ms(method, kinds["all"], whole=True),
            **{f"speedup_{kind}": figures.speedup(method, BASE, prompts) for kind, prompts in kinds.items()},
            "least": least and speedups[least],
            "least_prompt": least,
        }
    peers = []
    for engine in dict.fromkeys(method.partition(":")[0] for method in figures.methods):
        modes = [method for method in figures.methods if method.startswith(f"{engine}:")]
        for index, (kind, prompts) in enumerate(kinds.items()):
            if engine != "paceline" and (best := figures.best(modes, prompts)):
                ratio = figures.speedup(DEFAULT, best, prompts)
                bar = _PEER_BARS.get(engine, (None, None))[index]
                peers.append({"engine": engine, "kind": kind, "best": best, "ratio": ratio, "bar": bar})
    fixed = [BASE, *(f"paceline:k{k}" for k in range(1, 17))]
    by_category = {}
    for category, prompts in categories.items():
        best_fixed, best_whole = figures.best(fixed, prompts), figures.best(fixed, prompts, whole=True)
        rival = figures.best([BASE, DRAFT_MODEL], prompts)
        by_category[category] = {
            "prompts": len(prompts),
            "speedups": {method: figures.speedup(method, BASE, prompts) for method in figures.methods},
            "best_fixed": best_fixed,
            "auto_over_best_fixed": best_fixed and figures.speedup(DEFAULT, best_fixed, prompts),
            # A fixed number has the draft model read every prompt, which the figures of decoding leave out.
            "whole_over_best_fixed": best_whole and figures.speedup(DEFAULT, best_whole, prompts, whole=True),
            "predicted": figures.predicted(DEFAULT, prompts),
            "rival": rival,
            "hybrid_over_rival": rival and figures.speedup(DEFAULT, rival, prompts),
        }
    return {"methods": methods, "categories": by_category, "peers": peers, "bars": _bars(methods, by_category, peers)}


def _bars(
    methods: dict[str, Any], categories: dict[str, Any], peers: list[dict[str, Any]]
) -> list[tuple[str, float | None, float | None]]:
    """What must hold: a text, the figure, and the least that it must be, or None for a figure without a bar."""
    bars: list[tuple[str, float | None, float | None]] = []
    if auto := methods.get(DEFAULT):
        bars += [
            ("speedup over plain, code", auto["speedup_code"], 1.5),
            ("speedup over plain, all", auto["speedup_all"], 1.15),
            (f"least speedup ({auto['least_prompt']})", auto["least"], 0.95),
        ]
    bars += [(f"over {one['best']}, {one['kind']}", one["ratio"], one["bar"]) for one in peers]
    for category, one in categories.items():
        if category in RETRIEVAL:
            bars.append((f"{category}: hybrid over {one['rival']}", one["hybrid_over_rival"], 1.3))
        if one["best_fixed"]:
            bars.append((f"{category}: auto over {one['best_fixed']}", one["auto_over_best_fixed"], 0.97))
        if one["predicted"] and (measured := one["speedups"].get(DEFAULT)):
            error = abs(one["predicted"] / measured - 1)
            bars.append((f"{category}: 1 - error of the predicted speedup", 1 - error, 0.9))
    return bars


def tables(summary: dict[str, Any]) -> str:
    """The summary as text."""
    parts = []
    for kind, one in summary.items():
        own = [method for method in one["methods"] if method.startswith("paceline:") and method != BASE]
        parts.append(f"{kind}: each method, milliseconds per token and speedup over {BASE}")
        parts.append(
            table(
                ("method", "code, ms", "all, ms", "all, with prompt", "code", "all", "least", "on"),
                [
                    (
                        method,
                        *(number(row[name], 1) for name in ("ms_code", "ms_all", "ms_all_with_prompt")),
                        *(number(row[name]) for name in ("speedup_code", "speedup_all", "least")),
                        row["least_prompt"] or "–",
                    )
                    for method, row in one["methods"].items()
                ],
            )
        )
        parts.append(f"{kind}: speedup over {BASE} by category")
        parts.append(
            table(
                (
                    *("category", "prompts", *(method.partition(":")[2] for method in own), "predicted"),
                    *("auto ÷ best fixed", "with prompt"),
                ),
                [
                    (
                        category,
                        str(row["prompts"]),
                        *(number(row["speedups"][method]) for method in own),
                        number(row["predicted"]),
                        number(row["auto_over_best_fixed"]),
                        number(row["whole_over_best_fixed"]),
                    )
                    for category, row in one["categories"].items()
                ],
            )
        )
        parts.append(f"{kind}: what must hold")
        parts.append(
            table(
                ("figure", "is", "at least", ""),
                [(text, number(value, 3), number(bar), _verdict(value, bar)) for text, value, bar in one["bars"]],
            )
        )
    return "\n\n".join(parts)


def _verdict(value: float | None, bar: float | None) -> str:
    if value is None or bar is None:
        return ""
    return "ok" if value >= bar else "short"


def _ms_decoding(one: dict[str, Any]) -> float:
    return float(1000 * one["decode_s"] / (one["new_tokens"] - one["first_tokens"]))


def _ms_whole(one: dict[str, Any]) -> float:
    return float(1000 * (one["first_s"] + one["decode_s"]) / one["new_tokens"])


def _predicted(one: dict[str, Any]) -> float | None:
    value: float | None = one["extra"].get("stats", {}).get("predicted_speedup")
    return value


def _median(runs: list[dict[str, Any]], figure: Callable[[dict[str, Any]], float | None]) -> float | None:
    values = [value for run in runs if (value := figure(run)) is not None]
    return statistics.median(values) if values else None


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Geometric mean of what is defined and above 0."""
    logarithms = [math.log(value) for value in values if value]
    return math.exp(statistics.mean(logarithms)) if logarithms else None
