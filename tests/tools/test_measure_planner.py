"""Recorded texts, which plans are compared on: they play as the models do that wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.costs import ASSUMED_COSTS, CostsByLength
from paceline.decoder import SpeculativeDecoder
from paceline.testing import TableModel

from .measure_planner import figures, read, tables
from .peers.prompts import Prompt
from .recorded import Recording, record, recorded_pair

PROMPT = (1, 2, 0, 3, 1, 2)
COSTS = CostsByLength((0,), (ASSUMED_COSTS,))
VOCAB = 24
GREEDY = SamplingParams()


def pair(seed: int, eos: tuple[int, ...] = ()) -> SpeculativeDecoder:
    """A target, and a draft model that mostly agrees with it."""
    table = 2 * np.random.default_rng(seed).standard_normal((VOCAB,) * 3)
    other = table + 0.8 * np.random.default_rng(seed + 1).standard_normal(table.shape)
    target, draft = (TableModel(logits, max_length=256) for logits in (table, other))
    return SpeculativeDecoder(target, draft, None, VOCAB, eos, costs=COSTS)


def recorded(decoder: SpeculativeDecoder, sampling: SamplingParams = GREEDY, name: str = "a") -> Recording:
    return record(decoder, Prompt(name, "qa", ""), PROMPT, sampling, 90, np.random.default_rng(0))


def rounds(decoder: SpeculativeDecoder, prompt: Any, **how: Any) -> list[tuple[int, int]]:
    steps = decoder.generate(prompt, max_new_tokens=90, **how)
    return [(step.num_proposed, step.num_accepted) for step in steps]


@pytest.mark.parametrize("eos", [(), (5,)])
@pytest.mark.parametrize("how", [{"num_draft_tokens": 3, "drafter": "draft-model"}, {"drafter": "draft-model"}, {}])
def test_a_recording_plays_round_by_round_as_the_pair_that_wrote_it(how: dict[str, Any], eos: tuple[int, ...]) -> None:
    proposed = new_tokens = 0
    for seed in range(3):
        decoder = pair(seed, eos)
        recording = recorded(decoder)
        replayed, prompt, _ = recorded_pair(recording, COSTS)
        expected = rounds(decoder, PROMPT, **how)
        assert rounds(replayed, prompt, **how) == expected
        proposed += sum(count for count, _ in expected)
        new_tokens += len(recording.token_ids)
    assert proposed > 0.1 * new_tokens
    assert (new_tokens < 3 * 90) == bool(eos)


def test_drawn_proposals_have_the_draft_models_law() -> None:
    """Over texts that are drawn, too: so a proposal stands as often as the token rule lets it."""
    decoder, sampling = pair(0), SamplingParams(0.9, top_p=0.95)
    first = [
        record(decoder, Prompt("a", "qa", ""), PROMPT, sampling, 1, np.random.default_rng(seed)) for seed in range(500)
    ]
    assert decoder.draft is not None
    logits = decoder.draft.forward(PROMPT, decoder.draft.new_cache(20), 1)[0].astype(float)
    weights = np.exp((logits - logits.max()) / 0.9)
    order = np.argsort(-weights)
    kept = order[: int(np.searchsorted(np.cumsum(weights[order]) / weights.sum(), 0.95)) + 1]
    expected = weights[kept] / weights[kept].sum()
    counts = np.array([sum(one.proposed[0] == token for one in first) for token in kept])
    assert counts.sum() == len(first)
    assert (abs(counts / len(first) - expected) < 4.5 * np.sqrt(expected / len(first))).all()


def test_a_file_of_recordings_becomes_tables(tmp_path: Path) -> None:
    path = tmp_path / "recordings.jsonl"
    written = [recorded(pair(seed), how, f"text {seed}") for seed in (0, 1) for how in (GREEDY, SamplingParams(0.5))]
    path.write_text("".join(json.dumps(one.as_dict()) + "\n" for one in written))
    found = {one: figures(one, COSTS, 0.0, told=True) for one in read(path)}
    for one, figure in found.items():
        assert figure.limit >= max(figure.auto, *figure.fixed, figure.limit_draft)
        assert figure.limit_draft > max(1.0, *figure.fixed), one
    assert tables(found, each=True).count("(90) ") == 4
