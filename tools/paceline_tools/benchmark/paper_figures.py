"""From the measurements and answers of the paper's table to its figures. `models/benchmark.md` has the formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bootstrap import Estimate, Term, estimate, mean
from .figures import Runs, summarise
from .measurement import Measurement
from .methods import Method
from .paper_document import PaperDocument, Part

__all__ = ["summarise_paper"]


def summarise_paper(document: PaperDocument) -> dict[str, Any]:
    """Every figure, part by part: a benchmark's, the quality of a table, and the points of curves."""
    return {
        "parts": [
            {
                "task": part.task,
                "stage": part.stage,
                "bench": summarise(part.document),
                "quality": _quality(part) if part.stage == "table" else None,
                "curve": _curve(part) if part.stage == "curves" else None,
            }
            for part in document.parts
        ]
    }


def _quality(part: Part) -> dict[str, dict[str, Any]]:
    """By sampling and method: the mean score, and its difference to plain decoding's, over the same prompts."""
    found: dict[str, dict[str, Any]] = {}
    for sampling in part.document.samplings:
        runs = Runs(part.document, sampling)
        of_sampling = found.setdefault(sampling, {})
        plain = None if runs.plain is None else _scores(part, runs.plain)
        for index in runs.methods:
            scores = _scores(part, index)
            answers = [one for one in part.answers if one.method == index]
            of_sampling[part.document.methods[index].name] = {
                "answers": len(answers),
                "judged": int(np.isfinite(scores).sum()),
                "score": _within(mean(scores), 0.0, 1.0),
                "difference": None
                if plain is None or index == runs.plain
                else _within(mean(scores - plain), -1.0, 1.0),
                "outcomes": dict(Counter(one.outcome.partition(":")[0] for one in answers).most_common()),
            }
    return found


def _scores(part: Part, method: int) -> NDArray[np.float64]:
    """Scores by prompt and repeat, NaN where there is none: `[prompts, repeats]`."""
    repeats = 1 + max((one.repeat for one in part.answers), default=0)
    scores = np.full((len(part.document.prompts), repeats), np.nan)
    for one in part.answers:
        if one.method == method and one.score is not None:
            scores[one.prompt, one.repeat] = one.score
    return scores


def _curve(part: Part) -> list[dict[str, Any]]:
    """Figure 1's points, plain decoding as K = 0; of each sampling and kind of drafting."""
    points = []
    for sampling, runs in Runs.of(part.document).items():
        prompts = runs.prompts(None)
        for index in runs.methods:
            method = part.document.methods[index]
            if not isinstance(method.num_draft_tokens, int):
                continue
            texts = runs.texts(index, None)
            rounds, decoded = sum(one.rounds for one in texts), sum(one.decoded for one in texts)
            proposed, accepted = (_total(texts, name) for name in ("steps_proposed", "steps_accepted"))
            points.append(
                {
                    "sampling": sampling,
                    "method": method.name,
                    "k": method.num_draft_tokens,
                    "ms_per_token": _over(runs, index, prompts, _ms_per_token),
                    "speedup": _speedup(runs, index, prompts, method),
                    "acceptance_rate": accepted / proposed if proposed else None,
                    "loop_efficiency": decoded / rounds / (method.num_draft_tokens + 1) if rounds else None,
                    "loop_ms": _over(runs, index, prompts, _loop_ms),
                }
            )
    return points


def _ms_per_token(one: Measurement) -> float:
    return 1000 * one.decode_s / one.decoded


def _loop_ms(one: Measurement) -> float:
    return 1000 * one.decode_s / one.rounds


def _total(texts: Sequence[Measurement], name: str) -> int:
    return sum(sum(getattr(one, name)[1:]) for one in texts)


def _over(
    runs: Runs, method: int, prompts: Sequence[int], figure: Callable[[Measurement], float]
) -> dict[str, float | None] | None:
    return _as_dict(estimate([Term(runs.times(method, prompts, figure), 1)], drift=runs.reach(prompts)))


def _speedup(runs: Runs, index: int, prompts: Sequence[int], method: Method) -> dict[str, float | None] | None:
    if runs.plain is None or not method.num_draft_tokens:
        return None
    terms = [Term(runs.times(one, prompts, _ms_per_token), power) for one, power in ((runs.plain, 1), (index, -1))]
    return _as_dict(estimate(terms))


def _within(found: Estimate | None, least: float, most: float) -> dict[str, float | None] | None:
    """A figure whose interval ends where its values do."""
    if found is None or found.low is None or found.high is None:
        return _as_dict(found)
    return asdict(Estimate(found.value, max(found.low, least), min(found.high, most)))


def _as_dict(found: Estimate | None) -> dict[str, float | None] | None:
    return asdict(found) if found else None
