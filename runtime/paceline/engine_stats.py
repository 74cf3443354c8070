"""Counters and gauges of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .scheduler import Outcome
from .stats import Stats

__all__ = ["EngineStats"]


_SUMMED = (
    *("prompt_tokens", "cached_tokens", "rounds", "proposed", "accepted"),
    *("prefill_s", "target_s", "draft_s", "overhead_s"),
)


def _no_outcomes() -> dict[Outcome, int]:
    return {"finished": 0, "failed": 0, "cancelled": 0, "expired": 0}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does now, and what it has done since it was made.

    Attributes:
        running: texts in turns now.
        waiting: texts in the queue now.
        kv_bytes: bytes of KV caches that running texts have reserved.
        kv_budget: the most of them; None is no limit.
        refused: texts that found the queue full.
        ended: texts by how they ended: "finished", "failed", "cancelled", "expired" (their deadline passed).
        new_tokens: emitted, those of running texts included; what follows counts a text when it ends.
        prompt_tokens: fed or taken from the prefix cache.
        cached_tokens: those taken from the prefix cache.
        rounds: target passes after prefill.
        proposed: drafted tokens that were verified.
        accepted: drafted tokens that stood.
        prefill_s: seconds of prefill in both models.
        target_s: seconds of the target model's runs after that.
        draft_s: seconds of the draft model's runs after that.
        overhead_s: seconds of generation outside both.
        shared_passes: runs of models while several texts had their rounds together, see `AsyncEngine`'s `max_batch`.
        shared_texts: texts in them; a text counts once for each run that it was in.
    """

    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    kv_budget: int | None = None
    refused: int = 0
    ended: Mapping[Outcome, int] = field(default_factory=_no_outcomes)
    new_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    overhead_s: float = 0.0
    shared_passes: int = 0
    shared_texts: int = 0

    @property
    def texts_per_pass(self) -> float | None:
        """`shared_texts / shared_passes`; None before the first."""
        return self.shared_texts / self.shared_passes if self.shared_passes else None

    @property
    def acceptance_rate(self) -> float | None:
        """`accepted / proposed`; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    def sums_with(self, stats: Stats) -> dict[str, Any]:
        """The sums over texts that have ended, with one more of them."""
        return {name: getattr(self, name) + getattr(stats, name) for name in _SUMMED}

    def as_dict(self) -> dict[str, Any]:
        """All figures, by their names."""
        return {**asdict(self), "acceptance_rate": self.acceptance_rate, "texts_per_pass": self.texts_per_pass}
