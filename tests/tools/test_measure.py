"""The comparison of plain and speculative decoding."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.stats import Stats
from paceline.testing import TableModel
from paceline_tools import measure
from paceline_tools.measure import Comparison, Run, compare, find_divergence, machine

VOCAB = 6
PROMPT = [1, 2]


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(TableModel.random(VOCAB, seed=1), TableModel.random(VOCAB, seed=2), None, VOCAB)


def run_of(tokens_per_second: float, overhead: float = 0.0) -> Run:
    """A run of 101 tokens, the first of which is the prompt's."""
    seconds = 100 / tokens_per_second
    stats = Stats(7, 101, 1, 50, (50, 50), (40, 10), decode_s=seconds, target_s=seconds * (1 - overhead))
    return Run(tuple(range(101)), stats)


def test_runs_alternate_after_a_warm_up(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []
    run = measure._run

    def noted(decoder: SpeculativeDecoder, prompt: list[int], num_draft_tokens: int, max_new_tokens: int) -> Run:
        order.append((num_draft_tokens, max_new_tokens))
        return run(decoder, prompt, num_draft_tokens, max_new_tokens)

    monkeypatch.setattr(measure, "_run", noted)
    told: list[None] = []
    found = compare(decoder, PROMPT, num_draft_tokens=3, max_new_tokens=20, repeats=3, on_run=lambda: told.append(None))
    assert order == [(0, 8), (3, 8), *((k, 20) for k in (0, 3, 3, 0, 0, 3))]
    assert len(told) == 6
    assert len(found.plain) == len(found.speculative) == 3
    assert {run.stats.proposed for run in found.plain} == {0}
    assert all(run.stats.proposed > 0 for run in found.speculative)


def test_exact_models_write_the_same_text(decoder: SpeculativeDecoder) -> None:
    found = compare(decoder, PROMPT, num_draft_tokens=4, max_new_tokens=30, repeats=1)
    assert found.divergence is None
    assert found.as_dict()["identical"] is True
    json.dumps(found.as_dict())


def test_figures_are_medians() -> None:
    plain = tuple(map(run_of, (10.0, 12.0, 30.0)))
    speculative = tuple(run_of(rate, share) for rate, share in ((18.0, 0.02), (5.0, 0.5), (21.0, 0.01)))
    found = Comparison(2, plain, speculative, None)
    assert found.plain_tokens_per_second == pytest.approx(12)
    assert found.speculative_tokens_per_second == pytest.approx(18)
    assert found.speedup == pytest.approx(1.5)
    assert found.acceptance_rate == 0.5
    assert found.block_efficiency == 2
    assert found.overhead_share == pytest.approx(0.02)


def test_a_near_tie_is_found_with_its_gap() -> None:
    logits = np.zeros((VOCAB, VOCAB))
    logits[2, 4], logits[2, 5] = 3.0, 2.75  # behind token 2 the two best are 4 and 5
    decoder = SpeculativeDecoder(TableModel(logits), None, None, VOCAB)
    assert find_divergence(decoder, PROMPT, [0, 2, 4, 1], [0, 2, 4, 1]) is None
    found = find_divergence(decoder, PROMPT, [0, 2, 4, 1], [0, 2, 5, 1])
    assert found is not None
    assert dataclasses.astuple(found) == (2, 4, 5, 0.25, (4, 5))
    assert found.between_the_best
    other = find_divergence(decoder, PROMPT, [0, 2, 3], [0, 2, 5])
    assert other is not None
    assert not other.between_the_best  # no near-tie explains this one


@pytest.mark.parametrize(("plain", "speculative", "tokens"), [([0, 2], [0], (2, None)), ([0], [0, 2], (None, 2))])
def test_a_text_that_only_ends_earlier(
    decoder: SpeculativeDecoder, plain: list[int], speculative: list[int], tokens: tuple[int | None, int | None]
) -> None:
    found = find_divergence(decoder, PROMPT, plain, speculative)
    assert found is not None
    assert found.index == 1
    assert (found.plain_token, found.speculative_token) == tokens
    assert not found.between_the_best


def test_the_machine_is_described() -> None:
    found = machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert set(found["packages"]) == {"numpy", "onnxruntime", "tokenizers"}
