"""Counters and timings of one generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Stats"]


@dataclass(frozen=True, slots=True)
class Stats:
    """What one generation has done so far.

    Attributes:
        prompt_tokens: length of the prompt.
        new_tokens: tokens emitted.
        prefill_tokens: how many of them came from the target's pass over the prompt: one, and those that sampling
            parameters or a constraint forced before it. The others come from rounds.
        rounds: target passes after the one over the prompt.
        proposed_at: `proposed_at[i]` rounds proposed an (i + 1)-th drafted token.
        accepted_at: in `accepted_at[i]` rounds the (i + 1)-th drafted token was accepted. A verdict counts in full,
            also where a stop or a limit then cut the round's tokens.
        prefill_s: seconds to process the prompt in both models, the first token's sampling included.
        decode_s: seconds inside the generator after that; what the consumer does between steps does not count.
        target_s: the part of `decode_s` in the target model's own runs.
        draft_s: the part of `decode_s` in the draft model's own runs.
        cached_tokens: tokens of the prompt that a prefix cache knew: the target's pass over the prompt left them out.
        predicted_speedup: what the planner expected of its rounds over plain decoding; its formula stands at
            `paceline.planner.Planner.predicted_speedup`. None where nothing was planned.
        costs_from: what the plans rested on: "measured", "assumed", "given", or a profile's name and time; None where
            nothing was planned.
    """

    prompt_tokens: int
    new_tokens: int = 0
    prefill_tokens: int = 0
    rounds: int = 0
    proposed_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    prefill_s: float = 0.0
    decode_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    cached_tokens: int = 0
    predicted_speedup: float | None = None
    costs_from: str | None = None

    @property
    def proposed(self) -> int:
        """Drafted tokens that were verified."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """`accepted / proposed`; None when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def block_efficiency(self) -> float | None:
        """Tokens emitted per target pass, the pass over the prompt and its tokens left out; None before a round.

        Plain decoding has 1; K drafted tokens a round give at most K + 1.
        """
        return (self.new_tokens - self.prefill_tokens) / self.rounds if self.rounds else None

    @property
    def overhead_s(self) -> float:
        """The part of `decode_s` outside both models' runs: sampling, verification, detokenisation, bookkeeping."""
        return max(self.decode_s - self.target_s - self.draft_s, 0.0)

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds of `decode_s` per token emitted in it, by rounds; None before the first round."""
        decoded = self.new_tokens - self.prefill_tokens
        return 1000 * self.decode_s / decoded if decoded > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted by rounds per second of `decode_s`; None before the first round."""
        decoded = self.new_tokens - self.prefill_tokens
        return decoded / self.decode_s if decoded > 0 and self.decode_s > 0 else None

    def after_prefill(self, num_emitted: int) -> Stats:
        """These with the tokens of the target's pass over the prompt counted."""
        return replace(self, new_tokens=num_emitted, prefill_tokens=num_emitted)

    def after_round(self, num_proposed: int, num_accepted: int, num_emitted: int) -> Stats:
        """These with one more round counted."""
        return replace(
            self,
            new_tokens=self.new_tokens + num_emitted,
            rounds=self.rounds + 1,
            proposed_at=_count_up_to(self.proposed_at, num_proposed),
            accepted_at=_count_up_to(self.accepted_at, num_accepted),
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures that commands and servers print; None where a figure is not defined."""
        names = (
            "prompt_tokens cached_tokens new_tokens rounds proposed accepted acceptance_rate block_efficiency "
            "prefill_s decode_s ms_per_token target_s draft_s overhead_s predicted_speedup costs_from"
        )
        return {name: getattr(self, name) for name in names.split()}


def _count_up_to(counters: tuple[int, ...], num: int) -> tuple[int, ...]:
    """Add 1 to the first `num` counters, of which new ones start at 0."""
    padded = counters + (0,) * (num - len(counters))
    return tuple(count + (index < num) for index, count in enumerate(padded))
