"""How many tokens to draft: as many as raise the expected tokens per second, none where drafting loses.

Every decision is taken before the token that it is about is drawn: a token that was drawn and withheld would bend the
law of the text. What the planner looks at, the past, the clock and the draft's distributions, leaves the law alone.

The rule is that of optimal stopping for a ratio: a round brings one token for the price of a target pass whatever is
drafted, so one more drafted token is worth its price when

    probability that it stands > tokens per second at hand · (seconds of a draft step + seconds of one more row),

and when its distribution is known, before it is drawn, the draft step is paid and only the row counts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .errors import InvalidInputError

__all__ = ["CostMeter", "Costs", "Planner"]

# Bounds of the classes of confidence that acceptance is learned for.
_CONFIDENCES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
# Before anything is seen: as if so many tokens of a class had been judged, and so many of any class.
_PRIOR_WEIGHT = 3.0
_PRIOR_ACCEPTANCE = 0.75
# What a judged token counts after the next was judged: a memory of some 200 for the classes, of 30 for the text.
_CLASS_MEMORY = 0.995
_TEXT_MEMORY = 0.97
_RATE_MEMORY = 0.9
# Drafting goes on until it loses clearly: near the point where it breaks even a wrong guess costs next to nothing.
_PATIENCE = 0.9
# Plain rounds before a drafted token shows whether drafting pays again; doubled each time that it does not.
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
# Of a pass of one row, while no pass of several rows has been seen.
_ASSUMED_ROW = 0.2


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that runs of the models take.

    Attributes:
        draft_step: of the draft model, one row.
        target_pass: of the target, with 1, 2, … rows; beyond, the last step goes on.

    Raises:
        InvalidInputError: no pass, or a time that is not above 0.
    """

    draft_step: float
    target_pass: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.target_pass or not all(0 < seconds < np.inf for seconds in self.target_pass):
            raise InvalidInputError(f"target_pass must be seconds above 0 for 1, 2, … rows, got {self.target_pass!r}.")
        if not 0 <= self.draft_step < np.inf:
            raise InvalidInputError(f"draft_step must be seconds of at least 0, got {self.draft_step!r}.")

    def target(self, rows: int) -> float:
        """Seconds of a target pass of `rows` rows."""
        known = self.target_pass
        if rows <= len(known):
            return known[rows - 1]
        slope = (known[-1] - known[0]) / (len(known) - 1) if len(known) > 1 else _ASSUMED_ROW * known[0]
        return known[-1] + slope * (rows - len(known))


class CostMeter:
    """Learns `Costs` from the runs of a generation."""

    def __init__(self) -> None:
        self._draft_steps = _Average(0.9)
        self._passes: dict[int, _Average] = {}

    def observe(self, *, rows: int, target_s: float, draft_steps: int, draft_s: float) -> None:
        """Take in a round: its target pass of `rows` rows, and its draft steps, by their seconds."""
        self._passes.setdefault(rows, _Average(0.9)).add(target_s, 1)
        if draft_steps:
            self._draft_steps.add(draft_s, draft_steps)

    @property
    def costs(self) -> Costs | None:
        """What is known: a straight line through the passes seen; None before the first."""
        if not self._passes:
            return None
        rows = np.array(sorted(self._passes), np.float64)
        seconds = np.array([self._passes[int(count)].mean for count in rows])
        weights = np.sqrt([self._passes[int(count)].weight for count in rows])
        if len(rows) > 1:
            slope, first = np.polyfit(rows - 1, seconds, 1, w=weights)
        else:
            first = seconds[0] / (1 + _ASSUMED_ROW * (rows[0] - 1))
            slope = _ASSUMED_ROW * first
        # The clock wobbles; a row takes some time, and a pass of one row is most of a pass.
        first = max(first, 0.2 * float(seconds.min()))
        slope = max(slope, 0.0)
        draft_step = self._draft_steps.mean if self._draft_steps.weight else 0.3 * first
        return Costs(float(draft_step), tuple(float(first + slope * more) for more in range(8)))


class Planner:
    """Plans the rounds of one generation.

    With `costs` given, plans depend on the text alone; else the first rounds measure, and the clock has a say.
    """

    def __init__(self, most: int = 8, costs: Costs | None = None) -> None:
        """Draft at most `most` tokens a round."""
        self._most = most
        self._given = costs
        self._meter = CostMeter()
        self._classes = [_Average(_CLASS_MEMORY) for _ in range(len(_CONFIDENCES) + 1)]
        bounds = (0.0, *_CONFIDENCES, 1.0)
        for one, (low, high) in zip(self._classes, pairwise(bounds), strict=True):
            one.add(_PRIOR_WEIGHT * (low + high) / 2, _PRIOR_WEIGHT)
        self._text = _Average(_TEXT_MEMORY)
        self._text.add(_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE, _PRIOR_WEIGHT)
        self._tokens, self._seconds = _Average(_RATE_MEMORY), _Average(_RATE_MEMORY)
        self._pause, self._plain_rounds = _FIRST_PAUSE, 0
        self._probing = False
        self._survival = 1.0
        self._confidences: list[float] = []
        self._steps = 0

    @property
    def costs(self) -> Costs | None:
        """The costs that plans rest on; None before the first round of a generation that measures."""
        return self._given or self._meter.costs

    def begin(self) -> int:
        """Start a round; returns how many tokens it may draft."""
        self._survival, self._confidences, self._steps, self._probing = 1.0, [], 0, False
        if self._worth(self._text.mean / _PATIENCE, steps=1):
            return self._most
        self._plain_rounds += 1
        if self._plain_rounds < self._pause:
            return 0
        self._plain_rounds, self._probing = 0, True
        return 1

    def worth_a_step(self) -> bool:
        """Whether to run the draft model for the next token."""
        worth = not self._confidences or self._worth(self._survival * self._text.mean, steps=1)
        self._steps += worth
        return worth

    def worth_drawing(self, confidence: float) -> bool:
        """Whether to draw the next token, whose distribution has its maximum at `confidence`; it is then drafted."""
        acceptance = self._classes[bisect_right(_CONFIDENCES, confidence)].mean
        survival = self._survival * acceptance
        if not (self._probing or self._worth(survival, steps=0)):
            self._text.add(acceptance, 1)  # as good as judged: a step that brought nothing must not go unnoticed
            return False
        self._survival = survival
        self._confidences.append(confidence)
        return True

    def end(self, num_accepted: int, num_emitted: int, *, rows: int, target_s: float, draft_s: float) -> None:
        """Take in a round's outcome, and the seconds of its runs."""
        for index, confidence in enumerate(self._confidences[: num_accepted + 1]):
            stood = float(index < num_accepted)
            self._classes[bisect_right(_CONFIDENCES, confidence)].add(stood, 1)
            self._text.add(stood, 1)
        if self._probing:
            pays = self._worth(self._text.mean, steps=1)
            self._pause = _FIRST_PAUSE if pays else min(2 * self._pause, _LONGEST_PAUSE)
        self._meter.observe(rows=rows, target_s=target_s, draft_steps=self._steps, draft_s=draft_s)
        if costs := self.costs:
            self._tokens.add(num_emitted, 1)
            self._seconds.add(costs.target(rows) + self._steps * costs.draft_step, 1)

    def _worth(self, survival: float, *, steps: int) -> bool:
        """Whether a token that stands with this probability is worth its row and `steps` draft steps."""
        costs = self.costs
        if costs is None:
            return True
        rate = 1 / costs.target(1)
        if self._seconds.weight:
            rate = max(rate, self._tokens.mean / self._seconds.mean)
        rows = len(self._confidences) + 1
        price = steps * costs.draft_step + costs.target(rows + 1) - costs.target(rows)
        return survival > rate * price


class _Average:
    """A mean that forgets: each unit of weight makes what came before count `memory` times as much."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sum = 0.0
        self.weight = 0.0

    def add(self, total: float, weight: float) -> None:
        """Take in `weight` values whose sum is `total`."""
        fade = self._memory**weight
        self._sum = fade * self._sum + total
        self.weight = fade * self.weight + weight

    @property
    def mean(self) -> float:
        return self._sum / self.weight
