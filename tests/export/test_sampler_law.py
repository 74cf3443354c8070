"""The exact law of the sampler's graphs: every way that chance can go on small models whose law is known."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from graph_rounds import Case, Played, draft_by_graph, graph, integer, verify_by_graph
from numpy.typing import NDArray

from paceline.sampling import FloatArray, SamplingParams
from paceline.streams import Purpose
from paceline_export.sampler.draw import padded

KNOBS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "typical-p": {"typical_p": 0.7},
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {0: 1.5, 1: -0.5}},
    "banned": {"banned_token_ids": (1,)},
    "all": {
        "temperature": 1.4,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": -0.3,
        "logit_bias": {2: 0.7},
    },
}
PROMPT = [1, 0]


@dataclass(frozen=True)
class Pair:
    """Two random models that look their logits up by the last token."""

    target: FloatArray  # [vocab, vocab]
    draft: FloatArray  # [vocab, draft width]
    target_params: SamplingParams
    draft_params: SamplingParams
    deterministic: int | None = None  # the drafted token that is given
    logit_ids: tuple[int, ...] | None = None

    def case(self, tokens: tuple[int, ...]) -> Case:
        """The round that drafts these tokens."""
        before = [PROMPT[-1], *tokens]
        forced = {step: token for step, token in enumerate(tokens) if step == self.deterministic}
        return Case(
            len(self.target), PROMPT, [], self.draft[before[:-1]], self.target[before], self.target_params,
            self.draft_params, forced=forced, logit_ids=self.logit_ids,
        )  # fmt: skip

    def plain(self, new_tokens: tuple[int, ...]) -> FloatArray:
        """The target's distribution behind these tokens, in float64."""
        rows = self.case(()).row_sampler(self.target_params)
        logits = self.target[[*PROMPT, *new_tokens][-1]].astype(np.float64)
        return rows.distribution(logits, [*PROMPT, *new_tokens], [])


def make_pair(vocab_size: int, seed: int, **params: Any) -> Pair:
    rng = np.random.default_rng(seed)
    target, draft = (1.5 * rng.standard_normal((2, vocab_size, vocab_size))).astype(np.float32)
    sampling = SamplingParams(**({"temperature": 1.0} | params))
    return Pair(target, draft, sampling, sampling)


def law(pair: Pair, rule: str, num_drafted: int, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], float]:
    """Probabilities of the next `num_drafted + 1` tokens of rounds over the graphs."""
    vocab_size = len(pair.target)
    chances: dict[tuple[int, ...], float] = defaultdict(float)
    uniforms: dict[tuple[int, Purpose], float] = {}
    monkeypatch.setattr(
        "paceline.streams.Streams.uniform",
        lambda _, position, purpose, round_start=0: uniforms.get((position - len(PROMPT), purpose), 0.0),
    )
    fixed = {} if pair.deterministic is None else {pair.deterministic: 0}  # what the given token is
    for tokens in itertools.product(range(vocab_size), repeat=num_drafted):
        if any(tokens[step] != token for step, token in fixed.items()):
            continue
        case = pair.case(tokens)
        drafted = drafted_rows(case, tokens)
        chance = float(np.prod([1.0 if row is None else row[t] for t, row in zip(tokens, drafted.probs, strict=True)]))
        if chance == 0:
            continue
        verify_by_graph(case, drafted, rule)
        for num_accepted, share in shares(drafted.details["acceptance"], rule, num_drafted):
            if share == 0:
                continue
            for step in range(num_drafted):
                accepts = step < num_accepted if rule == "token" else step == num_accepted - 1
                uniforms[step, Purpose.ACCEPT] = 0.0 if accepts else 1 - 2.0**-53
            verify_by_graph(case, drafted, rule)
            assert drafted.verdict
            assert drafted.verdict.num_accepted == num_accepted
            weights = drafted.details["weights"][0, :vocab_size].astype(np.float64)
            for token in np.flatnonzero(weights):
                emitted = (*tokens[:num_accepted], int(token))
                extend(pair, chances, emitted, chance * share * weights[token] / weights.sum(), num_drafted + 1)
    return chances


def drafted_rows(case: Case, tokens: tuple[int, ...]) -> Played:
    """What the draft's graph gives to these tokens, had it drawn them."""
    drafted = Played(list(tokens), [])
    for step in range(len(tokens)):
        prefix = replace(case, draft_logits=case.draft_logits[: step + 1], forced={i: tokens[i] for i in range(step)})
        drafted.probs.append(None if step in case.forced else draft_by_graph(prefix).probs[-1])
    return drafted


def shares(acceptance: NDArray[np.float32], rule: str, num_drafted: int) -> list[tuple[int, float]]:
    """With what probability how many tokens stand."""
    chances = acceptance.astype(np.float64)
    if rule == "token":
        reached = np.concatenate(([1.0], np.cumprod(chances[:num_drafted])))
        rejected = np.append(1 - chances[:num_drafted], 1.0)
        return list(enumerate((reached * rejected).tolist()))
    # The longest prefix that stands wins; chances[i] is about the first i tokens, the empty one always stands.
    stands = np.concatenate(([1.0], chances[1:]))
    longer_fall = np.append(np.cumprod((1 - stands)[::-1])[::-1][1:], 1.0)
    return list(enumerate((stands * longer_fall).tolist()))


def extend(pair: Pair, chances: dict[tuple[int, ...], float], emitted: tuple[int, ...], chance: float, to: int) -> None:
    """Add up what plain decoding makes of a text."""
    if len(emitted) == to:
        chances[emitted] += chance
        return
    for token, share in enumerate(pair.plain(emitted)):
        if share > 0:
            extend(pair, chances, (*emitted, token), chance * float(share), to)


def distance_from_plain(pair: Pair, rule: str, num_drafted: int, monkeypatch: pytest.MonkeyPatch) -> float:
    plain: dict[tuple[int, ...], float] = defaultdict(float)
    extend(pair, plain, (), 1.0, num_drafted + 1)
    found = law(pair, rule, num_drafted, monkeypatch)
    return 0.5 * sum(abs(plain[text] - found[text]) for text in {*plain, *found})


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(3, 3), (5, 2)])
def test_the_law_is_that_of_plain_decoding_under_every_knob(
    rule: str, knob: str, vocab_size: int, num_drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(vocab_size, 1, **KNOBS[knob])
    assert distance_from_plain(pair, rule, num_drafted, monkeypatch) < 1e-5


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(6, 1), (4, 3), (3, 4)])
def test_the_law_is_that_of_plain_decoding_for_other_sizes(
    rule: str, vocab_size: int, num_drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distance_from_plain(make_pair(vocab_size, 2), rule, num_drafted, monkeypatch) < 1e-5


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("knob", ["temperature", "repetition", "all"])
def test_the_law_is_that_of_plain_decoding_with_drafts_of_other_kinds(
    rule: str, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(4, 3, **KNOBS[knob])
    other = replace(pair, draft_params=SamplingParams(2.0, top_k=3))
    reduced = replace(pair, draft=pair.draft[:, :2], logit_ids=(0, 3), draft_params=SamplingParams(1.3))
    for changed in (other, reduced, replace(other, deterministic=0), replace(other, deterministic=1)):
        assert distance_from_plain(changed, rule, 2, monkeypatch) < 1e-5


def test_the_deterministic_rule_draws_like_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size, num_drafted = 3, 2
    pair = make_pair(vocab_size, 4, temperature=0.8)
    for tokens in itertools.product(range(vocab_size), repeat=num_drafted):
        rows = [pair.plain(tokens[:step]) for step in range(num_drafted + 1)]
        edges = [np.concatenate(([0.0], np.cumsum(row))) for row in rows]
        for drawn in itertools.product(range(vocab_size), repeat=num_drafted + 1):
            middles = [(edge[token] + edge[token + 1]) / 2 for edge, token in zip(edges, drawn, strict=True)]
            monkeypatch.setattr(
                "paceline.streams.Streams.uniform",
                lambda _, position, purpose, round_start=0, middles=middles: middles[position - len(PROMPT)],
            )
            played = Played(list(tokens), [None] * num_drafted)
            verify_by_graph(pair.case(tokens), played, "deterministic")
            count = next((i for i, token in enumerate(tokens) if drawn[i] != token), num_drafted)
            assert played.verdict
            assert (played.verdict.num_accepted, played.verdict.next_token) == (count, drawn[count])


@pytest.mark.parametrize("vocab_size", [6, 1500])
def test_a_draw_changes_its_token_just_where_the_cumulated_probabilities_do(vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((1, vocab_size)).astype(np.float32)
    logits[0, ::3] = -np.inf
    sampling = SamplingParams(1.0)
    case = Case(vocab_size, [0], [], logits, np.zeros((2, vocab_size), np.float32), sampling, sampling)
    session = graph("sampler", vocab_size, vocab_size)
    inputs = case.shared_inputs(sampling) | {"logits": logits[None], "drafted": np.array([[-1]])}
    exact = np.exp(logits[0].astype(np.float64))
    edges = np.concatenate(([0.0], np.cumsum(exact) / exact.sum()))
    for token in np.flatnonzero(exact):
        for uniform in (edges[token] + 3e-7, edges[token + 1] - 3e-7):
            token_found, probs, _ = session.run(
                ["token", "probs", "healthy"], inputs | {"uniform": np.array([integer(uniform)])}
            )
            assert token_found[0, 0] == token
    assert probs.shape == (1, padded(vocab_size))
    assert np.allclose(probs[0, :vocab_size], exact / exact.sum(), rtol=1e-6)
