"""How far the times of another run may lie from this run's, since a machine's speed drifts over minutes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

__all__ = ["NEXT", "Drift", "TimedText", "drift_of"]

# Times over which the drift forgets, in lengths of the run; last a random walk, which never does, taken to be
# twice as likely as all the others and no drift together.
_MEMORIES = (1 / 32, 1 / 8, 1 / 2, math.inf)
_LIKELY = (1.0, 1.0, 1.0, 8.0)
# Variances of the drift over that of a text's noise, times the number of texts; equally likely.
_RATIOS = tuple(4.0**power for power in range(-1, 8))
# The other run begins so many lengths of this one after this one's beginning.
NEXT = 2.0
# Of more texts, evenly spread ones are taken.
_MOST_TEXTS = 200


@dataclass(frozen=True, slots=True)
class TimedText:
    """One text of a run.

    Attributes:
        when: the middle of its writing, from the run's first text on, in lengths of the run.
        method: that wrote it.
        prompt: of one method and prompt, texts take the same time, but for noise and drift.
        time: of a piece of work, above 0, in any unit.
    """

    when: float
    method: int
    prompt: int
    time: float


@dataclass(frozen=True, slots=True)
class Drift:
    """What a run's own texts say about another run; `models/benchmark.md` has the formulas.

    Attributes:
        memories: over which the drift forgets, by model, in lengths of the run: `[models]`; infinite is a walk.
        ratios: the drift's variance (a walk's over the run) over that of a text's noise: `[models]`; 0 is no drift.
        noise: standard deviation of a text's noise, as a logarithm: `[models]`.
        weights: how likely each model is, 1 in all: `[models]`.
        degrees: of freedom, of Student's t.
    """

    memories: NDArray[np.float64]
    ratios: NDArray[np.float64]
    noise: NDArray[np.float64]
    weights: NDArray[np.float64]
    degrees: int

    def reach(self, when: Sequence[float], level: float) -> float:
        """Within which another run's mean logarithm lies of this run's, with the probability `level`.

        Args:
            when: the moments of the texts whose mean it is, at least one, as `TimedText.when`.
            level: above 0 and below 1.
        """
        here = np.asarray(when)
        there = here + NEXT
        parted = {
            memory: float((_alike(here, here, memory) + _alike(there, there, memory)).mean())
            - 2 * float(_alike(here, there, memory).mean())
            for memory in np.unique(self.memories)
        }
        walked = np.array([parted[memory] for memory in self.memories])  # [models]
        scales = self.noise * np.sqrt(1 / len(here) + self.ratios * walked)
        tail = (1 + level) / 2
        most = float(scales.max() * special.stdtrit(self.degrees, tail))
        if not most:
            return 0.0

        def beyond(reach: float) -> float:
            return float(self.weights @ special.stdtr(self.degrees, reach / scales)) - tail

        return float(optimize.brentq(beyond, 0.0, most * (1 + 1e-9), xtol=1e-9 * most))


def drift_of(texts: Sequence[TimedText]) -> Drift | None:
    """Noise and drift of a run.

    The logarithm of a time is taken for the level of its method and prompt, noise, and a drift. Prompts that a method
    wrote once share a level. How large the drift is beside the noise, and how soon it forgets, is weighed by how well
    it explains the times, with the levels taken out and the size of the noise left open.

    Returns:
        None where there is no text beyond one of each level, or all of a level took the same time.
    """
    often = Counter((text.method, text.prompt) for text in texts)
    if len(texts) > _MOST_TEXTS:
        chosen = set(list(often)[:: math.ceil(len(texts) / _MOST_TEXTS)])
        texts = [text for text in texts if (text.method, text.prompt) in chosen]
    names = [(text.method, text.prompt if often[text.method, text.prompt] > 1 else None) for text in texts]
    levels = list(dict.fromkeys(names))
    degrees = len(texts) - len(levels)
    if not degrees:
        return None
    level = np.array([[name == one for one in levels] for name in names], np.float64)  # [texts, levels]
    without = np.eye(len(texts)) - level @ (level / level.sum(axis=0)).T  # takes each level's mean away
    moments = np.array([text.when for text in texts])
    times = without @ np.log([text.time for text in texts])
    if float(times @ times) < 1e-24:
        return None
    ratios = np.array(_RATIOS) / len(texts)
    models = [(math.inf, 0.0, math.log(sum(_LIKELY[:-1]) / (len(_LIKELY) - 1)), 0.0, float(times @ times))]
    for memory, likely in zip(_MEMORIES, _LIKELY, strict=True):
        variances, axes = np.linalg.eigh(without @ _alike(moments, moments, memory) @ without)
        squares = (axes.T @ times) ** 2
        for ratio in ratios:
            spread = 1 + ratio * np.maximum(variances, 0.0)
            models.append(
                (
                    memory,
                    float(ratio),
                    math.log(likely / len(ratios)),
                    float(np.log(spread).sum()),
                    float((squares / spread).sum()),
                )
            )
    memories, of_drift, before, sizes, sums = np.array(models).T
    logs = before - sizes / 2 - degrees / 2 * np.log(sums)
    weights = np.exp(logs - logs.max())
    return Drift(memories, of_drift, np.sqrt(sums / degrees), weights / weights.sum(), degrees)


def _alike(one: NDArray[np.float64], other: NDArray[np.float64], memory: float) -> NDArray[np.float64]:
    """Covariance of the drift at moments, in lengths of the run: `[one, other]`."""
    if memory == math.inf:
        return np.minimum.outer(one, other)
    return np.exp(-np.abs(np.subtract.outer(one, other)) / memory)
