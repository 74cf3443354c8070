"""Compare a benchmark with an earlier one: what became slower beyond the intervals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .bootstrap import Estimate, Term, Times, estimate
from .document import Document
from .drift import NEXT, drift_of
from .figures import Runs, decoding, whole
from .measurement import Measurement

__all__ = ["Change", "changes", "differences"]

# One in a hundred comparisons of equal runs lies beyond such an interval by chance.
_LEVEL = 0.99
# Of the drift that is added to it, as in the intervals of a run: further out lie walks that a run hardly supports.
_DRIFT_LEVEL = 0.95
# What would explain that times differ.
_SETTINGS = ("max_new_tokens", "repeats", "seed", "ignore_end", "raw", "provider", "threads", "profile", "knobs")


def first_token(one: Measurement) -> float:
    """Milliseconds from the call to the first token."""
    return 1000 * one.steps_s[0]


# Times, of which more is worse; the last is the time of a token over plain decoding's in the same run.
_FIGURES: dict[str, Callable[[Measurement], float]] = {
    "ms/token": decoding,
    "ms/token, prompt included": whole,
    "first token": first_token,
}
_RELATIVE = "1 / speedup"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, now over before.

    Attributes:
        sampling: of the method.
        method: its name.
        figure: which; more is worse.
        prompts: that both runs have.
        ratio: new over old, with its interval.
        verdict: "slower" or "faster" where the whole interval lies beyond the tolerance, else "".
    """

    sampling: str
    method: str
    figure: str
    prompts: int
    ratio: Estimate
    verdict: str


def changes(old: Document, new: Document, tolerance: float) -> list[Change]:
    """Every time of the methods that both have, on the prompts that both have; by name, category and length.

    Args:
        old: the earlier run.
        new: the later one.
        tolerance: a change of so much either way is never flagged: 0.05 is 5 %.
    """
    found = []
    runs_before = Runs.of(old)
    for sampling, runs in Runs.of(new).items():
        if sampling not in runs_before:
            continue
        pair = _Pair(runs_before[sampling], runs)
        for index in pair.new.methods:
            name = new.methods[index].name
            before = next((other for other in pair.old.methods if old.methods[other].name == name), None)
            if before is None or not pair.prompts or before in pair.old.failed or index in pair.new.failed:
                continue
            for figure, terms in pair.terms(before, index):
                drift = 0.0 if figure == _RELATIVE else pair.drift  # times over plain decoding's drift alike
                ratio = estimate(terms, _LEVEL, fixed_prompts=True, drift=drift)
                assert ratio is not None  # there are prompts
                verdict = _verdict(ratio, tolerance)
                found.append(Change(sampling, name, figure, len(pair.prompts), ratio, verdict))
    return found


def differences(old: Document, new: Document) -> list[str]:
    """What else than time differs between two runs, in words."""
    found = [f"another {name}" for name in ("bundle", "machine") if old.run.get(name) != new.run.get(name)]
    for name in _SETTINGS:
        before, now = (one.run.get("settings", {}).get(name) for one in (old, new))
        if before != now:
            found.append(f"{name} was {before!r}, is {now!r}")
    for name, one in (("the old run", old), ("the new run", new)):
        if not one.complete:
            found.append(f"{name} was broken off")
    return found


class _Pair:
    """Two runs of one sampling, and the prompts that both can time, by index in each."""

    def __init__(self, old: Runs, new: Runs) -> None:
        self.old, self.new = old, new
        before = {old.document.prompts[index]: index for index in old.prompts(None)}
        prompts = new.document.prompts
        self.prompts = [(before[prompts[index]], index) for index in new.prompts(None) if prompts[index] in before]

    def terms(self, before: int, now: int) -> Iterator[tuple[str, list[Term]]]:
        """Each figure, as new over old."""
        for name, figure in _FIGURES.items():
            yield name, [Term(self._new(now, figure), 1), Term(self._old(before, figure), -1)]
        if None not in (self.old.plain, self.new.plain) and now != self.new.plain:
            assert self.old.plain is not None
            assert self.new.plain is not None
            yield (
                _RELATIVE,
                [
                    Term(self._new(now, decoding), 1),
                    Term(self._new(self.new.plain, decoding), -1),
                    Term(self._old(before, decoding), -1),
                    Term(self._old(self.old.plain, decoding), 1),
                ],
            )

    @functools.cached_property
    def drift(self) -> float:
        """How far a time may lie in two runs for the machine's drift alone, as a logarithm.

        Both runs tell it together: the new one's texts are taken for later ones of other methods.
        """
        apart = len(self.old.document.methods)
        later = [replace(one, when=one.when + NEXT, method=one.method + apart) for one in self.new.rounds]
        found = drift_of([*self.old.rounds, *later])
        return found.reach(self.new.turns([new for _, new in self.prompts]), _DRIFT_LEVEL) if found else 0.0

    def _old(self, method: int, figure: Callable[[Measurement], float]) -> Times:
        return self.old.times(method, [old for old, _ in self.prompts], figure, run=0)

    def _new(self, method: int, figure: Callable[[Measurement], float]) -> Times:
        return self.new.times(method, [new for _, new in self.prompts], figure, run=1)


def _verdict(ratio: Estimate, tolerance: float) -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    if ratio.low > 1 + tolerance:
        return "slower"
    return "faster" if ratio.high < 1 / (1 + tolerance) else ""
