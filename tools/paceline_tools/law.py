"""Continuations of one prompt, drawn speculatively and plainly, and how they compare with the target's own law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import SamplingParams, SpeculativeDecoder
from paceline.decoder import DEFAULT_VERIFICATION
from paceline.sampling import FloatArray
from paceline.streams import Chance, Streams
from paceline.verify import Draft

from .replay import PlainLaw, Played, Rounds
from .significance import LEAST_EXPECTED, Finding, g_test, homogeneity, rates, uniformity

__all__ = ["Sample", "draw_sample", "findings"]

Pair = tuple[int, int | None]


@dataclass(slots=True)
class Sample:
    """Continuations of one prompt, and what the target's law expects of them.

    Attributes:
        name: the prompt's.
        samples: continuations drawn speculatively; as many were drawn plainly.
        verification: the rule, by name.
        first: how often each token came first.
        pairs: how often each pair of tokens came first; None follows a token that ends the text.
        plain_pairs: the same of plain decoding.
        expected_first: numbers that the target's law expects; rare tokens are left out.
        expected_pairs: the same for pairs.
        ranks: by the token's place in a round: where emitted tokens lie in the target's law, from 0 to 1.
        reached: by the token's place in a round: how many rounds emitted one.
        draft_ranks: where drafted tokens lie in the law that the drafter claims.
        accepted: by row: whether a drafted token stood; of those that the token rule reached, or of all.
        acceptance: by row: the probability that it stood.
        impossible: emitted tokens that the target never emits.
        passes: of the target and the draft model.
    """

    name: str
    samples: int
    verification: str
    first: Counter[int] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    plain_pairs: Counter[Pair] = field(default_factory=Counter)
    expected_first: dict[int, float] = field(default_factory=dict)
    expected_pairs: dict[Pair, float] = field(default_factory=dict)
    ranks: list[list[float]] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    draft_ranks: list[float] = field(default_factory=list)
    accepted: list[list[bool]] = field(default_factory=list)
    acceptance: list[list[float]] = field(default_factory=list)
    impossible: int = 0
    passes: tuple[int, int] = (0, 0)


def draw_sample(
    decoder: SpeculativeDecoder,
    name: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    num_draft_tokens: int,
    verification: str = DEFAULT_VERIFICATION,
    samples: int,
    seed: int,
    stream: int = 0,
    on_draw: Callable[[], None] = lambda: None,
) -> Sample:
    """Draw `samples` continuations of `prompt` by rounds that draft `num_draft_tokens`, and as many plainly.

    Args:
        decoder: with a draft model.
        name: of the prompt.
        prompt: token ids.
        sampling: with a temperature above 0; its seed is not used.
        num_draft_tokens: at least 1.
        verification: the rule, by name.
        samples: at least 1.
        seed: key of all random numbers.
        stream: tells prompts with the same seed apart.
        on_draw: called after each continuation, plain or speculative.
    """
    rounds = Rounds(decoder, prompt, sampling, num_draft_tokens, verification)
    law = PlainLaw(rounds)
    places = _Places(law, decoder.vocab_size)
    # Numbers that only place a token within its own probability, apart from those that drew it.
    noise = np.random.default_rng((seed, stream))
    sample = Sample(name, samples, verification)
    sample.ranks = [[] for _ in range(num_draft_tokens + 1)]
    sample.reached = [0] * (num_draft_tokens + 1)
    sample.accepted = [[] for _ in range(num_draft_tokens)]
    sample.acceptance = [[] for _ in range(num_draft_tokens)]

    for index in range(samples):
        chance = Streams(seed, 2 * (stream * samples + index))
        tokens = [*prompt]
        _note_round(sample, places, noise, tokens, rounds.play(tokens, num_draft_tokens, chance))
        pair = _pair(rounds, tokens, chance)
        sample.first[pair[0]] += 1
        sample.pairs[pair] += 1
        on_draw()

    for index in range(samples):
        chance = Streams(seed, 2 * (stream * samples + index) + 1)
        sample.plain_pairs[_pair(rounds, [*prompt], chance)] += 1
        on_draw()

    sample.expected_first = _common(samples * law(prompt))
    for token, expected in sample.expected_first.items():
        if token in rounds.end_token_ids:
            sample.expected_pairs[token, None] = expected
            continue
        seconds = _common(expected * law((*prompt, token)))
        sample.expected_pairs.update({(token, second): number for second, number in seconds.items()})
    sample.passes = rounds.num_passes
    return sample


def _pair(rounds: Rounds, tokens: list[int], chance: Chance) -> Pair:
    """Continue `tokens` plainly to the second token behind the prompt or the end of the text; return these tokens."""
    start = len(rounds.prompt)
    # With one token to go the decoder drafts nothing.
    while len(tokens) < start + 2 and rounds.end_token_ids.isdisjoint(tokens[start:]):
        rounds.play(tokens, 0, chance)
    return tokens[start], tokens[start + 1] if len(tokens) > start + 1 else None


class _Places:
    """Where tokens lie in a law, and how probable it is that a drafted one stands; looked up by text once.

    A token's place is the probability of what stands before it in an order of the vocabulary, and its own. A random
    point within the place is uniform if the token was drawn from the law, whatever the law (the probability integral
    transform): that makes tokens behind different texts comparable.
    """

    def __init__(self, law: PlainLaw, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._law = law
        self._found: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        self._acceptance: dict[tuple[int, ...], float] = {}
        self._ratio: dict[tuple[int, ...], float] = {}

    def emitted(self, text: tuple[int, ...], draft_probs: FloatArray | None) -> tuple[float, float]:
        """Place of the last token of `text` in the target's law, ordered by what the draft has too much of.

        A wrong rule shifts tokens along this order. Behind the draft, without `draft_probs`, rarer tokens come first.
        """
        key = ("bonus" if draft_probs is None else "row", text)
        if key not in self._found:
            probs = self._law(text[:-1])  # [vocab]
            order: NDArray[Any] = probs
            if draft_probs is not None:
                with np.errstate(divide="ignore", invalid="ignore"):
                    order = draft_probs / probs
                np.nan_to_num(order, copy=False, nan=0.0, posinf=np.inf)
            self._found[key] = _place(probs, order, text[-1])
        return self._found[key]

    def drafted(self, text: tuple[int, ...], draft_probs: FloatArray) -> tuple[float, float]:
        """Place of the last token of `text` in the law that the drafter claims."""
        key = ("draft", text)
        if key not in self._found:
            self._found[key] = _place(draft_probs, draft_probs, text[-1])
        return self._found[key]

    def acceptance(self, text: tuple[int, ...], draft_probs: FloatArray, stands: float = 1.0) -> float:
        """Probability that the token drafted behind `text` stands: 1 - TV(target_probs, draft_probs).

        With the block rule, where the draft before it stands with probability `stands`, it is the probability that
        the draft stands with this token.
        """
        if text not in self._acceptance:
            self._acceptance[text] = float(np.minimum(stands * self._law(text), draft_probs).sum())
        return self._acceptance[text]

    def ratio(self, text: tuple[int, ...], draft_probs: FloatArray) -> float:
        """Target's over draft's probability of the last token of `text`, which was drafted."""
        if text not in self._ratio:
            self._ratio[text] = float(self._law(text[:-1])[text[-1]]) / float(draft_probs[text[-1]])
        return self._ratio[text]


def _place(probs: NDArray[Any], order: NDArray[Any], token: int) -> tuple[float, float]:
    """Probabilities before a token in this order, and at its own place; those that stand equal share a place."""
    place = order[token]
    total = float(probs.sum(dtype=np.float64))
    before = float(probs[order < place].sum(dtype=np.float64))
    return before / total, float(probs[order == place].sum(dtype=np.float64)) / total


def _note_round(sample: Sample, places: _Places, noise: np.random.Generator, tokens: list[int], played: Played) -> None:
    """Place the emitted and the drafted tokens of the round that made `tokens`, and note which of these stood."""
    start, draft, num_accepted = played.start, played.draft, played.num_accepted
    num_emitted = len(tokens) - start
    drafted = (*tokens[:start], *draft.tokens)
    by_block = sample.verification == "block" and draft.probs is not None
    for row in range(num_emitted):
        before, own = places.emitted(tuple(tokens[: start + row + 1]), _draft_row(draft, row, places))
        sample.impossible += not own > 0
        sample.reached[row] += 1
        sample.ranks[row].append(min(before + noise.random() * own, 1.0))
    if by_block:
        # The rule looks ahead: how far a round gets depends on the tokens that it emits. What it leaves to later
        # rounds or to nobody, behind the end of the text, counts as if the target had drawn it, which makes the whole
        # exact if the round is.
        for ranks in sample.ranks[num_emitted:]:
            ranks.append(noise.random())

    stands = 1.0
    for row in range(len(draft.tokens) if by_block else min(num_accepted + 1, len(draft.tokens))):
        draft_probs = _draft_row(draft, row, places)
        assert draft_probs is not None
        sample.accepted[row].append(row < num_accepted)
        sample.acceptance[row].append(places.acceptance(drafted[: start + row], draft_probs, stands))
        if by_block:
            stands = min(1.0, stands * places.ratio(drafted[: start + row + 1], draft_probs))

    for row, probs in enumerate(draft.probs or ()):
        if probs is not None:
            before, own = places.drafted(drafted[: start + row + 1], probs)
            sample.draft_ranks.append(min(before + noise.random() * own, 1.0))


def _draft_row(draft: Draft, row: int, places: _Places) -> FloatArray | None:
    """What the token at `row` was drawn from, 1 at a deterministic proposal; None behind the draft."""
    if row == len(draft.tokens):
        return None
    if draft.probs is not None and (probs := draft.probs[row]) is not None:
        return probs
    one_hot = np.zeros(places.vocab_size)
    one_hot[draft.tokens[row]] = 1.0
    return one_hot


def _common(expected: NDArray[np.float64]) -> dict[int, float]:
    return {int(token): float(expected[token]) for token in np.flatnonzero(expected >= LEAST_EXPECTED)}


def findings(samples: Sequence[Sample]) -> list[Finding]:
    """Test the continuations of all prompts; the p values are not corrected for the number of tests yet."""
    found = []
    for one in samples:
        args = one.expected_pairs, one.samples
        found += [
            g_test(f"first token, {one.name}", one.first, one.expected_first, one.samples),
            g_test(f"token pairs, {one.name}", one.pairs, *args),
            homogeneity(f"token pairs against plain decoding, {one.name}", one.pairs, one.plain_pairs, *args),
        ]
    what = "acceptance in row {} against 1 - TV"
    if samples[0].verification == "block":
        what = "drafts that stand to row {}"
    for row in range(len(samples[0].accepted)):
        accepted = [value for one in samples for value in one.accepted[row]]
        acceptance = [value for one in samples for value in one.acceptance[row]]
        found.append(rates(what.format(row + 1), accepted, acceptance))
    for row in range(len(samples[0].ranks)):
        ranks = [value for one in samples for value in one.ranks[row]]
        found.append(uniformity(f"token {row + 1} of a round", ranks, sum(one.reached[row] for one in samples)))
    if draft_ranks := [value for one in samples for value in one.draft_ranks]:
        found.append(uniformity("drafted tokens against the draft's own law", draft_ranks, len(draft_ranks)))
    emitted = sum(sum(one.reached) for one in samples)
    impossible = sum(one.impossible for one in samples)
    never = Finding(
        "tokens that the target never emits", emitted, impossible / max(emitted, 1), 0.0, 0.0 if impossible else 1.0
    )
    return [*found, never]
