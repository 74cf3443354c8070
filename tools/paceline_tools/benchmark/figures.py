"""From measurements to figures. `models/benchmark.md` has every formula; nothing else is printed anywhere."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bootstrap import Estimate, Term, Times, estimate
from .crowd_figures import crowd_figures
from .document import Document
from .drift import Drift, TimedText, drift_of
from .forecast import forecast
from .measurement import Measurement
from .methods import OURS, PLAIN
from .percentiles import percentiles

__all__ = ["Runs", "fewest_tokens", "summarise"]

_FEWEST_TOKENS = 8


class Runs:
    """The measurements of one sampling, by method, and which of them can be timed.

    A prompt's repeat is timed where every method has written at least `fewest_tokens` behind the first: so all methods
    are compared on the same texts, also after Ctrl-C. A peer's method that failed has no times.
    """

    def __init__(self, document: Document, sampling: str) -> None:
        self.document = document
        self.sampling = sampling
        self.methods = [index for index, method in enumerate(document.methods) if method.sampling == sampling]
        self.plain = next((index for index in self.methods if document.methods[index].name == PLAIN), None)
        self.failed = {failure.method for failure in document.failures}
        needed = [index for index in self.methods if index not in self.failed]
        self.by_method: dict[int, list[Measurement]] = defaultdict(list)
        cells: dict[tuple[int, int], dict[int, Measurement]] = defaultdict(dict)
        fewest = fewest_tokens(document)
        for one in document.measurements:
            if one.method in needed:
                self.by_method[one.method].append(one)
                if one.decoded >= fewest and one.decode_s > 0 and one.steps_s[0] > 0:
                    cells[one.prompt, one.repeat][one.method] = one
        ends = itertools.accumulate(one.wall_s for one in document.measurements)
        length = sum(one.wall_s for one in document.measurements) or 1.0
        self._when = {
            (one.prompt, one.method, one.repeat): (end - one.wall_s / 2) / length
            for one, end in zip(document.measurements, ends, strict=True)
        }
        self.rounds: list[TimedText] = []
        self.drift: Drift | None = None
        # Of each prompt, the repeats that can be timed.
        self.timed: dict[int, list[dict[int, Measurement]]] = defaultdict(list)
        for (prompt, _), cell in sorted(cells.items()):
            if len(cell) == len(needed):
                self.timed[prompt].append(cell)

    def prompts(self, category: str | None) -> list[int]:
        """Prompts of a category, or all, that can be timed."""
        prompts = self.document.prompts
        return [index for index in self.timed if category is None or prompts[index].category == category]

    def times(self, method: int, prompts: Sequence[int], figure: Callable[[Measurement], float], run: int = 0) -> Times:
        """A figure of a method, by prompt and repeat."""
        width = max((len(self.timed[prompt]) for prompt in prompts), default=0)
        values = np.full((len(prompts), width), np.nan)
        for row, prompt in enumerate(prompts):
            values[row, : len(self.timed[prompt])] = [figure(cell[method]) for cell in self.timed[prompt]]
        return Times(values, np.array([len(self.timed[prompt]) for prompt in prompts], np.int64), run)

    @classmethod
    def of(cls, document: Document) -> dict[str, Runs]:
        """All samplings, with the drift of the machine: of rounds that do the same work, whatever the text says."""
        found = {sampling: cls(document, sampling) for sampling in document.samplings}
        texts = [
            TimedText(runs._middle(one), method, one.prompt, one.decode_s / one.rounds)
            for runs in found.values()
            for cells in runs.timed.values()
            for cell in cells
            for method, one in cell.items()
            if document.methods[method].engine == OURS and len(set(one.steps_proposed[1:-1])) == 1
        ]
        drift = drift_of(texts)
        for runs in found.values():
            runs.rounds, runs.drift = texts, drift
        return found

    def reach(self, prompts: Sequence[int], level: float = 0.95) -> float:
        """How far a time of any method over these prompts may lie in another run, as a logarithm."""
        return self.drift.reach(self.turns(prompts), level) if self.drift and prompts else 0.0

    def turns(self, prompts: Sequence[int]) -> list[float]:
        """The middle of each turn of these prompts, in lengths of the run."""
        cells = [cell for prompt in prompts for cell in self.timed[prompt]]
        return [statistics.mean(self._middle(one) for one in cell.values()) for cell in cells]

    def _middle(self, one: Measurement) -> float:
        """From the run's first text to the middle of this one, in lengths of the run."""
        return self._when[one.prompt, one.method, one.repeat]

    def texts(self, method: int, category: str | None) -> list[Measurement]:
        """All texts of a method in a category, or in all."""
        prompts = self.document.prompts
        return [one for one in self.by_method[method] if category is None or prompts[one.prompt].category == category]


def fewest_tokens(document: Document) -> int:
    """Texts with fewer tokens behind the first count, but their times are left out of ratios."""
    most = int(document.run["settings"]["max_new_tokens"])
    return max(min(_FEWEST_TOKENS, most - 1), 1)


def decoding(one: Measurement) -> float:
    """Milliseconds of a text per token behind the first ones, the passes over the prompt left out."""
    return 1000 * one.decode_s / one.decoded


def whole(one: Measurement) -> float:
    """Milliseconds of a text per token, from the call to the last token."""
    return 1000 * one.wall_s / one.new_tokens


def summarise(document: Document) -> dict[str, Any]:
    """Every figure, by sampling and method: over all prompts, and by category."""
    by_sampling = {}
    for sampling, runs in Runs.of(document).items():
        by_sampling[sampling] = {
            "methods": {
                document.methods[method].name: {
                    "all": _figures(runs, method, None),
                    "categories": {
                        category: _figures(runs, method, category)
                        for category in (document.categories if len(document.categories) > 1 else ())
                    },
                }
                for method in runs.methods
            },
            "forecast": forecast(document, runs.by_method),
            "drift": math.expm1(runs.reach(runs.prompts(None))),
            "crowds": crowd_figures(document, sampling),
        }
    return {"samplings": by_sampling, "bandwidth_share": _bandwidth_share(document, by_sampling)}


def _figures(runs: Runs, method: int, category: str | None) -> dict[str, Any]:
    ours = runs.document.methods[method].engine == OURS
    texts, prompts = runs.texts(method, category), [] if method in runs.failed else runs.prompts(category)
    ms = runs.times(method, prompts, decoding)
    ms_whole = runs.times(method, prompts, whole)
    drift = runs.reach(prompts)
    per_token = estimate([Term(ms, 1)], drift=drift)
    speedup = speedup_whole = None
    if runs.plain is not None and method != runs.plain:
        speedup = estimate([Term(runs.times(runs.plain, prompts, decoding), 1), Term(ms, -1)])
        speedup_whole = estimate([Term(runs.times(runs.plain, prompts, whole), 1), Term(ms_whole, -1)])
    proposed, accepted = _by_place(texts)
    rounds, decoded = sum(one.rounds for one in texts), sum(one.decoded for one in texts)
    tokens = sum(one.new_tokens for one in texts)
    joules = [one.energy_j for one in texts if one.energy_j is not None]
    return {
        "texts": len(texts),
        "timed_prompts": len(prompts),
        "timed_texts": int(ms.counts.sum()),
        "new_tokens": tokens,
        "rounds": rounds,
        "ms_per_token": _as_dict(per_token),
        "tokens_per_second": per_token and 1000 / per_token.value,
        "ms_per_token_whole": _as_dict(estimate([Term(ms_whole, 1)], drift=drift)),
        "speedup": _as_dict(speedup),
        "speedup_whole": _as_dict(speedup_whole),
        "predicted_speedup": _predicted(runs, method, prompts),
        "first_token_ms": percentiles([1000 * one.steps_s[0] for one in texts]),
        "token_gap_ms": percentiles(*_gaps(texts, per_token=True)),
        "burst_gap_ms": percentiles(*_gaps(texts, per_token=False)),
        "proposed_at": proposed,
        "accepted_at": accepted,
        "acceptance_rate": sum(accepted) / sum(proposed) if proposed else None,
        "block_efficiency": decoded / rounds if rounds and ours else None,
        "accepted_lengths": _histogram(texts),
        "shares": _shares(texts) if ours else None,
        "same_as_plain": _same_as_plain(runs, method, category),
        "energy_j_per_token": sum(joules) / tokens if tokens and len(joules) == len(texts) else None,
    }


def _as_dict(found: Estimate | None) -> dict[str, float | None] | None:
    return asdict(found) if found else None


def _gaps(texts: Sequence[Measurement], *, per_token: bool) -> tuple[list[float], list[int]]:
    """Milliseconds behind the first step, and how often each counts."""
    steps = [
        (1000 * seconds, tokens)
        for one in texts
        for seconds, tokens in zip(one.steps_s[1:], one.steps_tokens[1:], strict=True)
        if tokens
    ]
    if per_token:
        return [ms / tokens for ms, tokens in steps], [tokens for _, tokens in steps]
    return [ms for ms, _ in steps], [1] * len(steps)


def _by_place(texts: Sequence[Measurement]) -> tuple[list[int], list[int]]:
    """Rounds that proposed a first, second, … token, and rounds in which it stood."""
    proposed = np.concatenate([np.array(one.steps_proposed[1:], np.int64) for one in texts] or [_NONE])
    accepted = np.concatenate([np.array(one.steps_accepted[1:], np.int64) for one in texts] or [_NONE])
    places = range(1, int(proposed.max(initial=0)) + 1)
    return [int((proposed >= place).sum()) for place in places], [int((accepted >= place).sum()) for place in places]


_NONE: NDArray[np.int64] = np.zeros(0, np.int64)


def _histogram(texts: Sequence[Measurement]) -> list[int]:
    """Rounds with 0, 1, … accepted tokens, of those that proposed any."""
    counts = [
        accepted
        for one in texts
        for proposed, accepted in zip(one.steps_proposed[1:], one.steps_accepted[1:], strict=True)
        if proposed
    ]
    return np.bincount(counts).tolist() if counts else []


def _shares(texts: Sequence[Measurement]) -> dict[str, float] | None:
    """Of the time from the call to the last token. `outside` is what the decoder's own clocks did not see."""
    wall = sum(one.wall_s for one in texts)
    if not wall:
        return None
    prompt, target, draft = (sum(getattr(one, name) for one in texts) for name in ("prefill_s", "target_s", "draft_s"))
    other = sum(one.decode_s for one in texts) - target - draft
    parts = {"prompt": prompt, "target": target, "draft": draft, "other": other}
    return {**{name: value / wall for name, value in parts.items()}, "outside": 1 - sum(parts.values()) / wall}


def _predicted(runs: Runs, method: int, prompts: Sequence[int]) -> float | None:
    """Geometric mean over prompts of the median of what the planner expected."""
    medians = []
    for prompt in prompts:
        values = [cell[method].predicted_speedup for cell in runs.timed[prompt]]
        known = [value for value in values if value is not None]
        if known:
            medians.append(statistics.median(known))
    return statistics.geometric_mean(medians) if medians else None


def _same_as_plain(runs: Runs, method: int, category: str | None) -> dict[str, int] | None:
    """Of greedy texts: prompts whose first text is plain decoding's, of how many."""
    one = runs.document.methods[method]
    if runs.plain is None or method == runs.plain or one.temperature or one.engine != OURS:
        return None
    plain = {one.prompt: one.text for one in runs.texts(runs.plain, category) if one.repeat == 0}
    ours = {one.prompt: one.text for one in runs.texts(method, category) if one.repeat == 0}
    both = plain.keys() & ours.keys()
    return {"same": sum(plain[prompt] == ours[prompt] for prompt in both), "prompts": len(both)}


def _bandwidth_share(document: Document, by_sampling: dict[str, Any]) -> float | None:
    """What reading the target's weights at the memory's speed would take, over what a plain token takes."""
    speed, size = document.run.get("read_bytes_per_s"), document.run.get("target_bytes")
    found = (one["methods"].get(PLAIN, {}).get("all", {}).get("ms_per_token") for one in by_sampling.values())
    plain = next(itertools.dropwhile(lambda one: one is None, found), None)
    return 1000 * size / speed / plain["value"] if speed and size and plain else None
