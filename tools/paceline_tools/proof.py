"""All that `paceline verify` looks at, and the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paceline import SamplingParams, SpeculativeDecoder
from paceline.decoder import DEFAULT_VERIFICATION
from paceline.errors import InvalidInputError

from .invariants import Difference, GreedyText, Tolerance, cache_rounds, greedy_texts, row_rounding
from .law import Sample, draw_sample, findings
from .replay import check_room
from .significance import Finding, holm

__all__ = ["Proof", "prove"]

# New tokens of each greedy text.
_GREEDY_TOKENS = 40
# Greedy texts are compared for every number of drafted tokens up to this one, or the one asked for.
_GREEDY_DRAFT_TOKENS = 4
# Each of a round's rows is rejected so many times when live caches are compared with fresh ones.
_CACHE_TURNS = 2


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    Attributes:
        alpha: the chance of a false alarm among all tests of the law.
        tolerance: of greedy texts and caches.
        findings: tests of the law; none when decoding is greedy.
        corrected: their p values, corrected for their number.
        greedy: speculative greedy texts against plain ones.
        caches: live caches against fresh ones, after each of some rounds.
        rounding: the target's rows, scored together and alone. It is no part of the verdict.
        passes: of the target and the draft model, for the law.
    """

    alpha: float
    tolerance: Tolerance
    findings: tuple[Finding, ...]
    corrected: tuple[float, ...]
    greedy: tuple[GreedyText, ...]
    caches: tuple[Difference, ...]
    rounding: tuple[Difference, ...]
    passes: tuple[int, int]

    @property
    def reasons(self) -> list[str]:
        """What is wrong; empty if nothing is."""
        reasons = [
            f"{finding.name}: {finding.effect:.3g} from the law, where chance alone makes {finding.noise:.2g} "
            f"(corrected p {p_value:.2g})"
            for finding, p_value in zip(self.findings, self.corrected, strict=True)
            if p_value < self.alpha
        ]
        reasons += [
            f"the greedy text of {text.prompt} with K = {text.num_draft_tokens} parts from plain decoding's at token "
            f"{text.parts_at}, {text.gap:.2g} below the best logit (tolerance {self.tolerance.gap:g})"
            for text in self.greedy
            if text.gap > self.tolerance.gap
        ]
        largest = Difference.largest(self.caches)
        if not largest.tv <= self.tolerance.cache:
            reasons.append(
                f"a live KV cache gives another law than a fresh one: TV {largest.tv:.2g} (tolerance "
                f"{self.tolerance.cache:g})"
            )
        return reasons

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "passed": self.passed,
            "reasons": self.reasons,
            "alpha": self.alpha,
            "tolerance": asdict(self.tolerance),
            "law": [
                {**asdict(finding), "corrected_p_value": p_value, "passed": p_value >= self.alpha}
                for finding, p_value in zip(self.findings, self.corrected, strict=True)
            ],
            "greedy": [
                {**asdict(text), "gap": text.gap if np.isfinite(text.gap) else None}  # JSON has no infinity
                for text in self.greedy
            ],
            "caches": [asdict(one) for one in self.caches],
            "rounding": [asdict(one) for one in self.rounding],
            "passes": {"target": self.passes[0], "draft": self.passes[1]},
        }


def prove(
    decoder: SpeculativeDecoder,
    prompts: Mapping[str, Sequence[int]],
    sampling: SamplingParams,
    *,
    num_draft_tokens: int,
    verification: str = DEFAULT_VERIFICATION,
    samples: int,
    alpha: float,
    tolerance: Tolerance,
    on_progress: Callable[[str, float], None] = lambda stage, fraction: None,
) -> Proof:
    """Compare speculative sampling of `decoder` with its target's own law.

    Args:
        decoder: with a draft model.
        prompts: token ids by name.
        sampling: temperature 0 leaves the tests of the law out, since nothing is drawn. No seed counts as 0.
        num_draft_tokens: drafted in each round, at least 1.
        verification: the rule, by name.
        samples: continuations of each prompt, plain and speculative each.
        alpha: the chance of a false alarm among all tests of the law.
        tolerance: of greedy texts and caches.
        on_progress: takes the name of the stage and the fraction of the whole that is done.

    Raises:
        InvalidInputError: nothing drafts, more new tokens are asked for than the greedy texts have, or `generate`
            refuses an argument.
        ContextLengthError: a prompt and a round need more positions than a model's context has.
    """
    for asks, count in (
        ("min_new_tokens", sampling.min_new_tokens),
        ("forced_token_ids", len(sampling.forced_token_ids)),
    ):
        if count > _GREEDY_TOKENS:
            raise InvalidInputError(
                f"{asks} asks for {count} new tokens, but the texts that are compared have {_GREEDY_TOKENS}; ask for "
                "no more than that."
            )
    for prompt in prompts.values():
        check_room(decoder, prompt, sampling, num_draft_tokens)
        # Checks the arguments that the greedy texts will have, and runs nothing.
        decoder.generate(
            prompt,
            replace(sampling, temperature=0.0),
            max_new_tokens=_GREEDY_TOKENS,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
        )

    greedy: list[GreedyText] = []
    caches: list[Difference] = []
    rounding: list[Difference] = []
    share = 1.0 if sampling.greedy else 0.15
    # A text drafts no further than to its last token but one, and a context has to hold a round.
    most = min(max(_GREEDY_DRAFT_TOKENS, num_draft_tokens), _GREEDY_TOKENS - 1, decoder.target.max_length - 1)
    draft_tokens = range(1, most + 1)
    for index, (name, prompt) in enumerate(prompts.items()):
        on_progress(f"greedy texts and KV caches, {name}", share * index / len(prompts))
        plain, texts = greedy_texts(
            decoder, name, prompt, sampling, num_draft_tokens=draft_tokens, max_new_tokens=_GREEDY_TOKENS
        )
        greedy += texts
        caches += cache_rounds(
            decoder,
            prompt,
            num_draft_tokens=num_draft_tokens,
            num_rounds=_CACHE_TURNS * (num_draft_tokens + 1),
        )
        rounding += row_rounding(decoder, prompt, plain, num_draft_tokens=num_draft_tokens)

    drawn: list[Sample] = []
    for index, (name, prompt) in enumerate(prompts.items() if not sampling.greedy else ()):
        done = itertools.count(1)

        def on_draw(name: str = name, index: int = index, done: Iterator[int] = done) -> None:
            fraction = (index + next(done) / (2 * samples)) / len(prompts)
            on_progress(f"continuations, {name}", share + (1 - share) * fraction)

        drawn.append(
            draw_sample(
                decoder,
                name,
                prompt,
                sampling,
                num_draft_tokens=num_draft_tokens,
                verification=verification,
                samples=samples,
                seed=sampling.seed or 0,
                stream=index,
                on_draw=on_draw,
            )
        )
    found = findings(drawn) if drawn else []
    return Proof(
        alpha,
        tolerance,
        tuple(found),
        tuple(holm([finding.p_value for finding in found])),
        tuple(greedy),
        tuple(caches),
        tuple(rounding),
        (sum(one.passes[0] for one in drawn), sum(one.passes[1] for one in drawn)),
    )
