"""The real pair, Qwen2.5-Coder 1.5B with its 0.5B as the draft, in int4: what the README promises of it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

import paceline
from paceline import SamplingParams, SpeculativeDecoder
from paceline.sampling import FloatArray, distribution
from paceline.streams import Chance, Purpose
from paceline.testing import every_way
from paceline.verify import VERIFICATION_RULES, DraftProbs, TargetProbs, Verdict
from paceline_export.parity import check_bundle
from paceline_tools.demo import PROMPTS

pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

# Between one row and several, int4 products with activations rounded to 8 bits move a logit by up to this much.
NEAR_TIE = 0.5


@pytest.fixture(scope="module")
def decoder(qwen_bundle: Path) -> SpeculativeDecoder:
    return paceline.load(qwen_bundle)


def chat(decoder: SpeculativeDecoder, text: str) -> list[int]:
    assert decoder.tokenizer is not None
    return decoder.tokenizer.encode_chat([{"role": "user", "content": text}])


def best_two_gap(decoder: SpeculativeDecoder, text: list[int]) -> float:
    """Gap between the target's two best logits behind `text`."""
    cache = decoder.target.new_cache(len(text))
    logits = decoder.target.forward(text, cache, 1)[0, : decoder.vocab_size]
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def test_both_graphs_are_torch(qwen_bundle: Path) -> None:
    report = check_bundle(paceline.Bundle.open(qwen_bundle, verify_hashes=True))
    assert report.passed, [model.reason for model in report.models]
    exact = [model for model in report.models if model.arithmetic == "fp32"]
    assert len(exact) == 2
    assert all(phase.max_logit_diff < 2e-3 for model in exact for phase in model.phases)


def test_greedy_texts_part_only_at_near_ties(decoder: SpeculativeDecoder) -> None:  # case 23
    parted = []
    for demo, k in itertools.product(PROMPTS, range(1, 7)):
        prompt = chat(decoder, demo.text)
        plain = decoder.generate(prompt, max_new_tokens=96, num_draft_tokens=0)
        speculative = decoder.generate(prompt, max_new_tokens=96, num_draft_tokens=k)
        list(plain), list(speculative)
        pairs = itertools.zip_longest(plain.token_ids, speculative.token_ids)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if at is not None:
            gap = best_two_gap(decoder, [*prompt, *plain.token_ids[:at]])
            parted.append(f"{demo.name}, K={k}: token {at}, gap {gap:.3f}")
            assert gap < NEAR_TIE, parted[-1]
    print(f"\n{len(parted)} of {3 * 6} greedy texts part from plain decoding, each at a near-tie:", *parted, sep="\n  ")


def test_the_live_cache_is_a_fresh_prefill(decoder: SpeculativeDecoder) -> None:
    prompt = chat(decoder, "Explain binary search.")
    generation = decoder.generate(prompt, max_new_tokens=24, num_draft_tokens=3)
    list(generation)
    text = [*prompt, *generation.token_ids]
    cache = decoder.target.new_cache(256)
    decoder.target.forward(text[:-8], cache, 1)
    decoder.target.forward(prompt[:5], cache, 5)  # a block that is rejected
    cache.rollback(len(text) - 8)
    live = decoder.target.forward(text[-8:], cache, 8).astype(np.float64)
    fresh = decoder.target.forward(text, decoder.target.new_cache(256), 8).astype(np.float64)
    assert np.abs(live - fresh).max() < 4.0
    log_live, log_fresh = (x - scipy.special.logsumexp(x, axis=1, keepdims=True) for x in (live, fresh))
    assert (np.exp(log_fresh) * (log_fresh - log_live)).sum(1).mean() < 0.02


def test_the_law_of_the_first_two_tokens(decoder: SpeculativeDecoder) -> None:
    """Chi-squared of the first two tokens against the target's own probabilities, at a short prompt.

    The first token comes from the prefill, the second from a speculative round, so the pair shows the round's law.
    """
    sampling = SamplingParams(temperature=1.0, top_k=8)
    assert decoder.tokenizer is not None
    prompt = decoder.tokenizer.encode("My favourite")  # a flat law: some 64 pairs, many of them common
    draws = 1200
    target = decoder.target
    cache = target.new_cache(len(prompt) + 4)
    first = distribution(target.forward(prompt, cache, 1)[0, : decoder.vocab_size], sampling)
    law: dict[tuple[int, int], float] = {}
    for token in np.flatnonzero(first):
        cache.rollback(len(prompt))
        second = distribution(target.forward([int(token)], cache, 1)[0, : decoder.vocab_size], sampling)
        law.update({(int(token), int(other)): float(first[token] * second[other]) for other in np.flatnonzero(second)})

    counts = dict.fromkeys(law, 0)
    proposed = 0
    for seed in range(draws):
        generation = decoder.generate(
            prompt,
            SamplingParams(temperature=1.0, top_k=8, seed=seed),
            max_new_tokens=3,
            num_draft_tokens=1,
        )
        steps = list(itertools.islice(generation, 2))
        generation.close()
        pair = tuple(token for step in steps for token in step.token_ids)[:2]
        proposed += generation.stats.proposed
        if len(pair) == 2:  # an end token as the first has no second
            counts[pair[0], pair[1]] += 1
    assert proposed > draws / 2
    common = [pair for pair, prob in law.items() if prob * draws >= 5]
    observed = [counts[pair] for pair in common]
    expected = [law[pair] * draws for pair in common]
    rest = draws - sum(expected)
    if rest >= 5:
        observed.append(sum(counts.values()) - sum(observed))
        expected.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    p_value = float(scipy.stats.chi2.sf(statistic, len(observed) - 1))
    print(f"\nchi-squared {statistic:.1f} over {len(observed)} cells, {draws} draws, p = {p_value:.3f}")
    assert len(observed) >= 10
    assert p_value > 1e-3


class _WithoutDraws:
    """Decides events and draws nothing: how many tokens stand does not depend on what follows them."""

    def __init__(self, chance: Chance) -> None:
        self.happens = chance.happens

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        return 0


def test_block_verification_accepts_at_least_as_many_tokens(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rules judge the same drafts, and their expectation over all decisions is exact: no noise of acceptance."""
    expected: dict[str, list[float]] = {name: [] for name in VERIFICATION_RULES}
    rules = dict(VERIFICATION_RULES)

    def judge(
        tokens: Sequence[int], probs: Sequence[DraftProbs], target_probs: TargetProbs, chance: Chance, position: int
    ) -> Verdict:
        rows = functools.cache(target_probs)
        for name, rule in rules.items():
            ways = every_way(
                lambda chance, rule=rule: (  # type: ignore[misc]
                    rule(tokens, probs, rows, _WithoutDraws(chance), position).num_accepted,
                )
            )
            expected[name].append(sum(num * probability for (num,), probability in ways))
        return rules["token"](tokens, probs, rows, chance, position)

    monkeypatch.setattr("paceline.verify.VERIFICATION_RULES", {"token": judge})
    for seed, demo in enumerate(PROMPTS):
        list(
            decoder.generate(
                chat(decoder, demo.text),
                SamplingParams(1.0, seed=seed),
                max_new_tokens=160,
                num_draft_tokens=4,
                verification="token",
            )
        )
    token, block = np.array(expected["token"]), np.array(expected["block"])
    difference = block - token
    error = float(difference.std() / np.sqrt(len(difference)))
    print(
        f"\naccepted of 4 at temperature 1, {len(token)} rounds: token {token.mean():.3f}, block {block.mean():.3f}; "
        f"difference {difference.mean():.3f} with a standard error of {error:.3f}"
    )
    assert difference.mean() > -4 * error
