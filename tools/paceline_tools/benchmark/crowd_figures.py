"""From texts that were written at once to figures. `models/benchmark.md` has the formulas."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .bootstrap import Estimate, Term, Times, estimate
from .crowds import Crowd
from .document import Document
from .drift import TimedText, drift_of
from .methods import PLAIN
from .percentiles import percentiles

__all__ = ["crowd_figures"]


def crowd_figures(document: Document, sampling: str) -> list[dict[str, Any]]:
    """For each number of texts at once and each method: tokens per second in all, speedup, and what readers wait."""
    found: dict[int, dict[int, list[Crowd]]] = defaultdict(lambda: defaultdict(list))
    for one in document.crowds:
        if document.methods[one.method].sampling == sampling:
            found[len(one.prompts)][one.method].append(one)
    rows = []
    for size, by_method in sorted(found.items()):
        # Groups and repeats that every method has written.
        keys = set.intersection(*({(one.prompts, one.repeat) for one in ones} for ones in by_method.values()))
        times = {method: _times(ones, keys) for method, ones in by_method.items()}
        plain = next((method for method in by_method if document.methods[method].name == PLAIN), None)
        drift = 0.0 if plain is None else _drift(document, plain, keys)
        for method, crowds in sorted(by_method.items()):
            ms = estimate([Term(times[method], 1)], drift=drift) if keys else None
            speedup = None
            if keys and plain is not None and method != plain:
                speedup = estimate([Term(times[plain], 1), Term(times[method], -1)])
            steps = [
                (1000 * seconds, tokens)
                for one in crowds
                for text_s, text_tokens in zip(one.steps_s, one.steps_tokens, strict=True)
                for seconds, tokens in list(zip(text_s, text_tokens, strict=True))[1:]
                if tokens
            ]
            rows.append(
                {
                    "concurrency": size,
                    "method": document.methods[method].name,
                    "groups": len(crowds),
                    "ms_per_token": _as_dict(ms),
                    "tokens_per_second": ms and 1000 / ms.value,
                    "speedup": _as_dict(speedup),
                    "first_token_ms": percentiles([1000 * text[0] for one in crowds for text in one.steps_s]),
                    "token_gap_ms": percentiles([s / n for s, n in steps], [n for _, n in steps]),
                }
            )
    return rows


def _drift(document: Document, plain: int, keys: set[tuple[tuple[int, ...], int]]) -> float:
    """How far the time of a token may lie in another run, as a logarithm: what plain decoding's groups say."""
    groups = list(dict.fromkeys(prompts for prompts, _ in keys))
    ends = itertools.accumulate(one.wall_s for one in document.crowds)
    length = sum(one.wall_s for one in document.crowds)
    texts = [
        TimedText((end - one.wall_s / 2) / length, plain, groups.index(one.prompts), one.wall_s / one.new_tokens)
        for one, end in zip(document.crowds, ends, strict=True)
        if one.method == plain and (one.prompts, one.repeat) in keys
    ]
    found = drift_of(texts)
    return found.reach([text.when for text in texts], 0.95) if found else 0.0


def _times(crowds: Sequence[Crowd], keys: set[tuple[tuple[int, ...], int]]) -> Times:
    """Milliseconds of wall time per token of all texts, by group and repeat."""
    by_group: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for one in sorted(crowds, key=lambda one: (one.prompts, one.repeat)):
        if (one.prompts, one.repeat) in keys:
            by_group[one.prompts].append(1000 * one.wall_s / one.new_tokens)
    width = max(map(len, by_group.values()), default=0)
    values = np.full((len(by_group), width), np.nan)
    for row, found in enumerate(by_group.values()):
        values[row, : len(found)] = found
    return Times(values, np.array([len(found) for found in by_group.values()], np.int64))


def _as_dict(found: Estimate | None) -> dict[str, float | None] | None:
    return asdict(found) if found else None
