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
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from .costs import ASSUMED_COSTS, Average, CostCorrection, CostMeter, Costs, CostsByLength
from .theory import tokens_per_round

__all__ = ["MOST_DRAFT_TOKENS", "Planner"]

# With it the target's pass has 16 rows, a tile of tensor cores. Longer drafts pay where 98 % stand and rows are free.
MOST_DRAFT_TOKENS = 15
# Tokens that a round drafts while nothing is known of the costs: few, so that a later round shows what rows cost.
_BLIND = 1
# How often the next token of a copy falls, over texts of all kinds, by classes of the match's length and their bounds.
_MATCHES = (3, 5, 9, 17)
_COPIES_FALL = (0.65, 0.55, 0.35, 0.15, 0.02)
# How much more often they fall in a text: before anything is seen, as if so many had fallen, and been expected to.
_FALLEN = 1.0
# Bounds of the classes of confidence that acceptance is learned for.
_CONFIDENCES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
# Before anything is seen: as if so many tokens of a class had been judged, and so many of any class.
_PRIOR_WEIGHT = 5.0
_PRIOR_ACCEPTANCE = 0.75
# What a judged token counts after the next was judged: a memory of some 200 for the classes, of 40 for the text.
_CLASS_MEMORY = 0.995
_TEXT_MEMORY = 0.975
_RATE_MEMORY = 0.9
# Plain rounds before a token of a drafter that does not ask shows whether drafting pays after all.
_PAUSE = 32
# What the draft model takes for each token that it has missed, in steps: they are fed with the next step, as rows. Two
# rows take what one does.
_MISSED_TOKEN = 0.25
# It catches up when the rounds that went without it have cost this share of what catching up does: whether the text
# stays worth it is not known, and so neither choice loses much more than need be (as with skis, rented or bought).
_RENT = 0.25
# More tokens than this are not counted on, however long the text may become.
_LIKELY_TOKENS = 256
# Acceptance in texts that drafting is made for, such as code.
_EASY = 0.9
# Costs are looked up anew when the text has grown by so many tokens.
_SAME_LENGTH = 64


class Planner:
    """Plans the rounds of one generation.

    A drafter that asks before each step and each draw gets an answer for the token at hand; for any other, `begin`
    says how many tokens to draft. With `costs` given, or `repeatable`, plans depend on the text alone; else the first
    rounds measure, and the clock has a say.

    Attributes:
        repeatable: whether plans keep the clock out, and whatever else another run of the same text may not have.
        asks: whether the drafter asks for each token. The target's confidences tell of a draft model's acceptance, so
            they are wanted then.
    """

    def __init__(
        self,
        most: int = MOST_DRAFT_TOKENS,
        costs: Costs | CostsByLength | None = None,
        *,
        asks: bool = True,
        copies: bool = False,
        repeatable: bool = False,
        max_new_tokens: int | None = None,
    ) -> None:
        """Draft at most `most` tokens a round.

        Args:
            most: at least 1.
            costs: what runs of the models take; None measures it, or assumes it where plans must be `repeatable`. Those
                of a profile are corrected by what runs take now, unless plans must be `repeatable`; the first round
                then drafts nothing.
            asks: whether the drafter asks for each token.
            copies: whether the drafter has no model, so that its steps cost nothing.
            repeatable: keep the clock out of the plans.
            max_new_tokens: of the text, if known: what the draft model has to catch up with must pay before its end.
        """
        self._most = most
        self.repeatable = repeatable
        self._given: Costs | CostsByLength | CostCorrection | None = costs
        self.asks = asks
        self._copies_alone = copies
        self._meter = CostMeter()
        self.costs_from = ("assumed" if repeatable else "measured") if costs is None else "given"
        # A profile's times are corrected by the clock, where that may have a say.
        self._correction: CostCorrection | None = None
        if isinstance(costs, CostsByLength):
            self.costs_from = costs.origin
            if costs.from_profile and not repeatable:
                self._given = self._correction = CostCorrection(costs)
        # What plans rest on; the meter's follow it from round to round.
        self._costs = self._of_drafter(costs.at(0) if costs else ASSUMED_COSTS if repeatable else None)
        self._costs_length = 0
        middles = [(low + high) / 2 for low, high in pairwise((0.0, *_CONFIDENCES, 1.0))]
        self._classes, self._by_target = _classes(middles), _classes(middles)
        # Of copied tokens: how many fell, and how many were expected to.
        self._fallen, self._expected_to_fall = Average(_TEXT_MEMORY), Average(_TEXT_MEMORY)
        self._text = Average(_TEXT_MEMORY)
        self._text.add(_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE, _PRIOR_WEIGHT)
        self._tokens, self._seconds = Average(_RATE_MEMORY), Average(_RATE_MEMORY)
        self._paused = 0
        # For the predicted speedup: tokens that the rounds were expected to bring, their runs, and the text's length.
        self._expected = 0.0
        self._all_steps = 0.0
        self._passes: Counter[int] = Counter()
        self._lengths = self._length = 0
        self._lost = 0.0  # tokens that rounds without the draft model have cost since it last ran
        self._to_come = math.inf if max_new_tokens is None else max_new_tokens  # tokens, at most
        self._start_round()

    def _start_round(self) -> None:
        self._survival = 1.0
        self._survivals: list[float] = []  # probability that all drafted tokens up to each stand
        self._confidences: list[float] = []
        self._steps = 0
        self._catching_up = 0.0  # what the draft model's missed tokens took, in steps
        self._withheld: float | None = None  # acceptance of a token that was not worth drawing
        self._copied: int | None = None  # length of the match that the round copies from
        self._acceptance = 0.0  # of each token of a round whose length was fixed at once

    @property
    def costs(self) -> Costs | None:
        """The costs that plans rest on; None before the first round of a generation that measures."""
        return self._costs

    @property
    def predicted_speedup(self) -> float | None:
        """The planner's own forecast of speculative over plain decoding, over the rounds so far; None before the first.

        Tokens that each round was expected to bring when it was planned, over the seconds of its runs, times the
        seconds of a plain pass: T · t(1) / (S · d + sum of t(rows of the round)), where T is the sum over rounds of
        1 + the sum over drafted tokens of the probability, by the acceptance learned before, that they all stand up
        to it; S counts draft steps of d seconds, and t are the target's passes, at the mean length of the text. Costs
        are the given ones, else those measured, also where plans rest on assumed ones. What a round takes outside the
        models is left out.
        """
        rounds = self._passes.total()
        if not rounds:
            return None
        costs = self._of_drafter(self._given.at(self._lengths // rounds) if self._given else self._meter.costs)
        if costs is None:
            return None
        seconds = self._all_steps * costs.draft_step
        seconds += sum(count * costs.target(rows) for rows, count in self._passes.items())
        return self._expected * costs.target(1) / seconds

    def begin(self, length: int = 0) -> int:
        """Start a round behind a text of `length` tokens; returns how many tokens it may draft."""
        self._start_round()
        self._length = length
        self._lengths += length
        if self._given and (self._correction or abs(length - self._costs_length) >= _SAME_LENGTH):
            self._costs, self._costs_length = self._of_drafter(self._given.at(length)), length
        if self._correction and not self._passes:
            return 0  # what plain decoding takes in this process is what drafting is weighed against
        if self.asks:
            return self._most
        self._acceptance = self._text.mean
        if (costs := self._costs) is None:
            return min(_BLIND, self._most)
        best, _ = self._best([self._acceptance] * self._most, costs, costs.draft_step)
        return best if best or not self._stay_plain() else 1

    def worth_a_prefill(self, missed: int) -> bool:
        """Whether the draft model should read the prompt, of which it lacks `missed` tokens, before the text goes on.

        A short text behind a long prompt cannot bring that in, even where it is easy. What is not read now is missed
        text, which the draft model catches up with once that pays.
        """
        return self._pays(_MISSED_TOKEN * missed, _EASY)

    def worth_a_step(self, rows: int = 1) -> bool:
        """Whether to run the draft model for the next token.

        Args:
            rows: tokens that it would be fed: the last one, and those before it that it has missed.
        """
        catching_up = _MISSED_TOKEN * max(rows - 2, 0)
        if self._confidences:
            worth = self._margin(self._survival * self._text.mean, steps=1) > 0
        else:
            margin = self._margin(self._text.mean, steps=1)
            gain = max(margin, self._gain(self._text.mean)) if margin > 0 else margin
            self._lost = max(self._lost + gain, 0.0)
            worth = (
                margin > 0
                and self._lost >= _RENT * self._tokens_in(catching_up)
                and self._pays(catching_up, self._text.mean)
            )
        if worth:
            self._steps += 1
            self._catching_up += catching_up
        return worth

    def worth_drawing(self, confidence: float) -> bool:
        """Whether to draw the next token, whose distribution has its maximum at `confidence`; it is then drafted."""
        acceptance = self._classes[bisect_right(_CONFIDENCES, confidence)].mean
        survival = self._survival * acceptance
        if self._margin(survival, steps=0) <= 0:
            self._withheld = acceptance
            return False
        self._survival = survival
        self._survivals.append(survival)
        self._confidences.append(confidence)
        return True

    def replan(self, confidences: Sequence[float]) -> None:
        """Take the tokens that the round drafts as these, where they are others than those that were asked about.

        Args:
            confidences: of each token that is submitted, as in `worth_drawing`.
        """
        self._confidences = list(confidences)
        acceptances = (self._classes[bisect_right(_CONFIDENCES, confidence)].mean for confidence in confidences)
        self._survivals = list(accumulate(acceptances, operator.mul))
        self._survival = self._survivals[-1] if self._survivals else 1.0

    def worth_copying(self, match_length: int) -> int:
        """How many tokens to copy from an occurrence that shares so many tokens with the text's end; 0 for none.

        Copies cost rows alone. They are taken where a round with them beats the tokens per second at hand.
        """
        if (costs := self._costs) is None:
            return 0
        # Each copied token that stands makes the match longer by one, and so the next one likelier.
        factor = (self._fallen.total + _FALLEN) / (self._expected_to_fall.total + _FALLEN)
        acceptances = [1 - min(factor * _falls(match_length + place), 1.0) for place in range(self._most)]
        best, rate = self._best(acceptances, costs, 0.0)
        if not best or rate <= self._rate(costs):
            return 0
        self._copied = match_length
        self._survivals = list(accumulate(acceptances[:best], operator.mul))
        return best

    def end(
        self,
        num_proposed: int,
        num_accepted: int,
        *,
        rows: int,
        target_s: float,
        draft_s: float,
        confidences: Sequence[float] = (),
    ) -> None:
        """Take in a round's outcome.

        Args:
            num_proposed: drafted tokens.
            num_accepted: how many of them stood.
            rows: of the target's pass.
            target_s: seconds of that pass.
            draft_s: seconds of the draft model's steps.
            confidences: the target's for the accepted tokens and the one behind them, if known: largest probabilities
                at temperature 1. Where the target is sure the draft model mostly agrees, so they tell of tokens that
                were not drafted, too.
        """
        judged = min(num_accepted + 1, num_proposed)
        if self._copied is not None:
            for index in range(judged):
                self._fallen.add(float(index >= num_accepted), 1)
                self._expected_to_fall.add(_falls(self._copied + index), 1)
            judged = 0  # of the draft model's tokens
        for index in range(judged):
            self._text.add(float(index < num_accepted), 1)
        for index, confidence in enumerate(self._confidences[:judged]):
            self._classes[bisect_right(_CONFIDENCES, confidence)].add(float(index < num_accepted), 1)
        for index, confidence in enumerate(confidences):
            like = self._by_target[bisect_right(_CONFIDENCES, confidence)]
            if index < judged:
                like.add(float(index < num_accepted), 1)
            elif self._withheld is None:
                self._text.add(like.mean, 1)
        if self._withheld is not None and judged == num_accepted:
            self._text.add(self._withheld, 1)  # the draft's own confidence says more
        steps = self._steps if self.asks else num_proposed
        seen = 0 if self._catching_up else steps  # else what it takes to catch up would count as a step
        if self._correction:
            self._correction.observe(self._length, rows=rows, target_s=target_s, draft_steps=seen, draft_s=draft_s)
        elif not self._given:
            self._meter.observe(rows=rows, target_s=target_s, draft_steps=seen, draft_s=draft_s)
            if self.costs_from == "measured":
                self._costs = self._of_drafter(self._meter.costs)
        self._to_come -= num_accepted + 1
        self._all_steps += steps + self._catching_up
        if steps:
            self._lost = 0.0
        self._passes[num_proposed + 1] += 1
        self._expected += self._expected_tokens(num_proposed)
        if (costs := self._costs) and self._copied is None:
            self._tokens.add(num_accepted + 1, 1)
            self._seconds.add(costs.target(num_proposed + 1) + steps * costs.draft_step, 1)

    def _tokens_in(self, steps: float) -> float:
        """Tokens that could be written in the time of so many draft steps."""
        costs = self._costs or ASSUMED_COSTS
        return self._rate(costs) * costs.draft_step * steps

    def _pays(self, catching_up: float, acceptance: float) -> bool:
        """Whether drafting, where tokens stand so often, saves so many draft steps before the text ends."""
        if not catching_up:
            return True
        costs = self._costs or ASSUMED_COSTS
        _, rate = self._best([acceptance] * self._most, costs, costs.draft_step)
        saved = min(self._to_come, _LIKELY_TOKENS) * (costs.target(1) - 1 / rate)
        return catching_up * costs.draft_step <= saved

    def _gain(self, acceptance: float) -> float:
        """Tokens that drafting, where tokens stand so often, saves for each that is written."""
        costs = self._costs or ASSUMED_COSTS
        _, rate = self._best([acceptance] * self._most, costs, costs.draft_step)
        return 1 - 1 / (rate * costs.target(1))

    def _of_drafter(self, costs: Costs | None) -> Costs | None:
        """Costs as this drafter has them: those of a draft model are nothing to copies."""
        return replace(costs, draft_step=0.0) if costs and self._copies_alone else costs

    def _expected_tokens(self, num_proposed: int) -> float:
        """Tokens that the round was expected to bring, by what was known before its tokens were judged."""
        if self.asks:
            return 1 + sum(self._survivals[:num_proposed])
        return tokens_per_round(self._acceptance, num_proposed)

    def _best(self, acceptances: Iterable[float], costs: Costs, draft_step: float) -> tuple[int, float]:
        """The number of tokens to draft that brings the most tokens per second, and these.

        Args:
            acceptances: of each token, if those before it stand; as many as may be drafted.
            costs: of runs.
            draft_step: seconds of drafting a token.
        """
        best, most = 0, 1 / costs.target(1)
        tokens = survival = 1.0
        for k, acceptance in enumerate(acceptances, 1):
            survival *= acceptance
            tokens += survival
            rate = tokens / (k * draft_step + costs.target(k + 1))
            if rate > most:
                best, most = k, rate
        return best, most

    def _stay_plain(self) -> bool:
        """Whether another round goes without a draft, where drafting seems to lose; now and then one looks again."""
        self._paused += 1
        if self._paused < _PAUSE:
            return True
        self._paused = 0
        return False

    def _rate(self, costs: Costs) -> float:
        """Tokens per second without copies: of plain decoding at least."""
        rate = 1 / costs.target(1)
        return max(rate, self._tokens.mean / self._seconds.mean) if self._seconds.weight else rate

    def _margin(self, survival: float, *, steps: int) -> float:
        """Tokens that one more, which stands with this probability, brings beyond what its row and `steps` steps take.

        Where rows cost in steps, as kernels that work in tiles have it, it may be worth them together with tokens that
        come behind it, each of which is taken to stand as often as the text's do: the most that so many bring.
        """
        costs = self._costs
        if costs is None:
            return 1.0 if len(self._confidences) < _BLIND else -1.0
        rate, acceptance = self._rate(costs), self._text.mean
        rows = len(self._confidences) + 1
        price = steps * costs.draft_step - costs.target(rows)
        gain, most = 0.0, -math.inf
        for all_rows in range(rows + 1, self._most + 2):
            gain += survival
            most = max(most, gain - rate * (price + costs.target(all_rows)))
            survival *= acceptance
            price += costs.draft_step
        return most


def _falls(match_length: int) -> float:
    """How often the next token of a copy falls whose match has so many tokens, over texts of all kinds."""
    return _COPIES_FALL[bisect_right(_MATCHES, match_length)]


def _classes(priors: Iterable[float]) -> list[Average]:
    classes = []
    for prior in priors:
        classes.append(Average(_CLASS_MEMORY))
        classes[-1].add(_PRIOR_WEIGHT * prior, _PRIOR_WEIGHT)
    return classes
