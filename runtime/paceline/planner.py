"""How many tokens to draft: as many as raise the expected tokens per second, none where drafting loses.

Every decision is taken before the token that it is about is drawn: a token that was drawn and withheld would bend the
law of the text. What the planner looks at, the past, the clock and the draft's distributions, leaves the law alone.

The rule is that of optimal stopping for a ratio: a round brings one token for the price of a target pass whatever is
drafted, so one more drafted token is worth its price when

    probability that it stands > tokens per second at hand · (seconds of a draft step + seconds of one more row),

and when its distribution is known, before it is drawn, the draft step is paid and only the row counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .errors import InvalidInputError
from .theory import tokens_per_round

__all__ = ["ASSUMED_COSTS", "MOST_DRAFT_TOKENS", "CostMeter", "Costs", "Planner"]

MOST_DRAFT_TOKENS = 12
# Tokens that a round drafts while nothing is known of the costs.
_BLIND = 3
# Bounds of the classes of match lengths that the acceptance of copies is learned for, and its first guesses.
_MATCHES = (3, 5, 9, 17)
_COPY_PRIORS = (0.35, 0.5, 0.65, 0.8, 0.9)
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
        if not self.target_pass or not all(0 < seconds < math.inf for seconds in self.target_pass):
            raise InvalidInputError(f"target_pass must be seconds above 0 for 1, 2, … rows, got {self.target_pass!r}.")
        if not 0 <= self.draft_step < math.inf:
            raise InvalidInputError(f"draft_step must be seconds of at least 0, got {self.draft_step!r}.")

    def target(self, rows: int) -> float:
        """Seconds of a target pass of `rows` rows."""
        known = self.target_pass
        if rows <= len(known):
            return known[rows - 1]
        slope = (known[-1] - known[0]) / (len(known) - 1) if len(known) > 1 else _ASSUMED_ROW * known[0]
        return known[-1] + slope * (rows - len(known))


# Where plans must not depend on the clock: a 0.5B and a 1.5B model in int4 on two cores, in target passes of one row.
ASSUMED_COSTS = Costs(0.3, (1.0, 1.2, 1.45, 1.7, 1.95))


class CostMeter:
    """Learns `Costs` from the runs of a generation."""

    def __init__(self) -> None:
        self._draft_steps = _Average(0.9)
        self._passes: dict[int, _Average] = {}
        self._costs: Costs | None = None

    def observe(self, *, rows: int, target_s: float, draft_steps: int, draft_s: float) -> None:
        """Take in a round: its target pass of `rows` rows, and its draft steps, by their seconds."""
        self._passes.setdefault(rows, _Average(0.9)).add(target_s, 1)
        if draft_steps:
            self._draft_steps.add(draft_s, draft_steps)
        self._costs = self._fit()  # once a round: plans ask for it at every token

    @property
    def costs(self) -> Costs | None:
        """What is known: a straight line through the passes seen; None before the first."""
        return self._costs

    def _fit(self) -> Costs:
        # Least squares by hand, weighted by how much was seen: numpy's takes a third of a millisecond.
        total = sum(one.weight for one in self._passes.values())
        mean_more = sum(one.weight * (rows - 1) for rows, one in self._passes.items()) / total
        mean = sum(one.weight * one.mean for one in self._passes.values()) / total
        spread = sum(one.weight * (rows - 1 - mean_more) ** 2 for rows, one in self._passes.items())
        if spread > 0:
            slope = (
                sum(one.weight * (rows - 1 - mean_more) * (one.mean - mean) for rows, one in self._passes.items())
                / spread
            )
            first = mean - slope * mean_more
        else:
            first = mean / (1 + _ASSUMED_ROW * mean_more)
            slope = _ASSUMED_ROW * first
        # The clock wobbles; a row takes some time, and a pass of one row is most of a pass. A model may not tell any.
        first = max(first, 0.2 * min(one.mean for one in self._passes.values()), 1e-9)
        slope = max(slope, 0.0)
        draft_step = self._draft_steps.mean if self._draft_steps.weight else 0.3 * first
        return Costs(draft_step, tuple(first + slope * more for more in range(8)))


class Planner:
    """Plans the rounds of one generation.

    A drafter that asks before each step and each draw gets an answer for the token at hand; for any other, `begin`
    says how many tokens to draft. With `costs` given, plans depend on the text alone; else the first rounds measure,
    and the clock has a say.
    """

    def __init__(self, most: int = MOST_DRAFT_TOKENS, costs: Costs | None = None, *, asks: bool = True) -> None:
        """Draft at most `most` tokens a round; `asks` says whether the drafter asks for each."""
        self._most = most
        self._given = costs
        self._asks = asks
        self._meter = CostMeter()
        self._classes = _classes([(low + high) / 2 for low, high in pairwise((0.0, *_CONFIDENCES, 1.0))])
        self._copies = _classes(_COPY_PRIORS)
        self._text = _Average(_TEXT_MEMORY)
        self._text.add(_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE, _PRIOR_WEIGHT)
        self._tokens, self._seconds = _Average(_RATE_MEMORY), _Average(_RATE_MEMORY)
        self._pause, self._paused = _FIRST_PAUSE, 0
        self._start_round()

    def _start_round(self) -> None:
        self._probing = False
        self._survival = 1.0
        self._confidences: list[float] = []
        self._steps = 0
        self._copied: int | None = None  # length of the match that the round copies from

    @property
    def costs(self) -> Costs | None:
        """The costs that plans rest on; None before the first round of a generation that measures."""
        return self._given or self._meter.costs

    def begin(self) -> int:
        """Start a round; returns how many tokens it may draft."""
        self._start_round()
        if self._asks:
            return self._most
        if (costs := self.costs) is None:
            return min(_BLIND, self._most)
        acceptance = self._text.mean
        best = max(
            range(self._most + 1),
            key=lambda k: tokens_per_round(acceptance, k) / (k * costs.draft_step + costs.target(k + 1)),
        )
        return best if best or not self._stay_plain() else 1

    def worth_a_step(self) -> bool:
        """Whether to run the draft model for the next token."""
        if self._confidences:
            worth = not self._probing and self._worth(self._survival * self._text.mean, steps=1)
        else:
            worth = self._worth(self._text.mean / _PATIENCE, steps=1) or not self._stay_plain()
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

    def worth_copying(self, match_length: int) -> int:
        """How many tokens to copy from an occurrence that shares so many tokens with the text's end; 0 for none.

        Copies cost rows alone. They are taken where a round with them beats the tokens per second at hand.
        """
        if (costs := self.costs) is None:
            return 0
        acceptance = self._copies[bisect_right(_MATCHES, match_length)].mean
        values = [tokens_per_round(acceptance, k) / costs.target(k + 1) for k in range(self._most + 1)]
        best = max(range(self._most + 1), key=values.__getitem__)
        if not best or values[best] <= self._rate(costs):
            return 0
        self._copied = match_length
        return best

    def end(self, num_proposed: int, num_accepted: int, *, rows: int, target_s: float, draft_s: float) -> None:
        """Take in a round's outcome, its target pass of `rows` rows, and the seconds of its runs."""
        judged = min(num_accepted + 1, num_proposed)
        if self._copied is not None:
            copies = self._copies[bisect_right(_MATCHES, self._copied)]
            for index in range(judged):
                copies.add(float(index < num_accepted), 1)
        else:
            for index in range(judged):
                self._text.add(float(index < num_accepted), 1)
            for index, confidence in enumerate(self._confidences[:judged]):
                self._classes[bisect_right(_CONFIDENCES, confidence)].add(float(index < num_accepted), 1)
        steps = self._steps if self._asks else num_proposed
        if self._probing:
            pays = self._worth(self._text.mean, steps=1)
            self._pause = _FIRST_PAUSE if pays else min(2 * self._pause, _LONGEST_PAUSE)
        self._meter.observe(rows=rows, target_s=target_s, draft_steps=steps, draft_s=draft_s)
        if (costs := self.costs) and self._copied is None:
            self._tokens.add(num_accepted + 1, 1)
            self._seconds.add(costs.target(num_proposed + 1) + steps * costs.draft_step, 1)

    def _stay_plain(self) -> bool:
        """Whether another round goes without a draft, where drafting seems to lose; now and then one looks again."""
        self._paused += 1
        if self._paused < self._pause:
            return True
        self._paused, self._probing = 0, True
        return False

    def _rate(self, costs: Costs) -> float:
        """Tokens per second without copies: of plain decoding at least."""
        rate = 1 / costs.target(1)
        return max(rate, self._tokens.mean / self._seconds.mean) if self._seconds.weight else rate

    def _worth(self, survival: float, *, steps: int) -> bool:
        """Whether a token that stands with this probability is worth its row and `steps` draft steps."""
        costs = self.costs
        if costs is None:
            return len(self._confidences) < _BLIND
        rows = len(self._confidences) + 1
        price = steps * costs.draft_step + costs.target(rows + 1) - costs.target(rows)
        return survival > self._rate(costs) * price


def _classes(priors: Iterable[float]) -> list[_Average]:
    classes = []
    for prior in priors:
        classes.append(_Average(_CLASS_MEMORY))
        classes[-1].add(_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT)
    return classes


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
