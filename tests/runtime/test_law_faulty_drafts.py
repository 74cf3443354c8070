"""Drafts that were not drawn from the probabilities they came with: each must bend the enumerated law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.drafters import DraftModelDrafter
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams, distribution
from paceline.streams import Chance, Purpose
from paceline.testing import ScriptedDrafter, TableModel, _Branch
from paceline.verify import Draft, DraftProbs

from .law_cases import TableDrafter, law_of, table
from .reference import Setting, reference_law, total_variation

RULES = ["token", "block"]
PROMPT = (1, 2)
SETTING = Setting(SamplingParams(1.0))


def distance(target: TableModel, num_draft_tokens: int, rule: str, **drafts: Any) -> float:
    num_tokens = num_draft_tokens + 1
    law = law_of(target, num_tokens, SETTING, prompt=PROMPT, num_draft_tokens=num_draft_tokens, rule=rule, **drafts)
    return total_variation(law, reference_law(target, PROMPT, num_tokens, SETTING)[0])


class _FaultyDrafter(ScriptedDrafter):
    """Draws one token from `draw_probs` and submits `submit(token)`."""

    def __init__(self, draw_probs: FloatArray, submit: Callable[[int], Draft]) -> None:
        super().__init__([])
        self._draw_probs = draw_probs
        self._submit = submit

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        return self._submit(chance.draw(self._draw_probs, len(tokens), Purpose.DRAFT, len(tokens)))


DRAFT_PROBS = distribution(np.array([1.0, 0.8, -0.5]), SamplingParams(1.0))
FAULTS: dict[str, tuple[FloatArray, Callable[[int], Draft]]] = {
    "case 1: greedy draft, ratio with its softmax": (np.array([1.0, 0, 0]), lambda x: Draft((x,), [DRAFT_PROBS])),
    "case 3: drawn from rounded probabilities": (np.array([0.5, 0.5, 0.1]), lambda x: Draft((x,), [DRAFT_PROBS])),
    "case 5: a fixed proposal with made-up probabilities": (
        np.array([0, 0, 1.0]),
        lambda x: Draft((x,), [DRAFT_PROBS]),
    ),
    "a drawn token withheld after a look at it": (
        DRAFT_PROBS,
        lambda x: Draft((x,), [DRAFT_PROBS]) if DRAFT_PROBS[x] > 0.3 else Draft((), []),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_that_was_not_drawn_from_its_probabilities_bends_the_law(fault: str, rule: str) -> None:
    target = table(3, 0)
    right = _FaultyDrafter(DRAFT_PROBS, lambda x: Draft((x,), [DRAFT_PROBS]))
    assert distance(target, 1, rule, new_drafter=lambda: right) < 1e-9
    # A drawn token may be submitted as a deterministic proposal.
    for submit in (lambda x: Draft((x,), None), lambda x: Draft((x,), [None])):
        assert distance(target, 1, rule, new_drafter=partial(_FaultyDrafter, DRAFT_PROBS, submit)) < 1e-9
    assert distance(target, 1, rule, new_drafter=lambda: _FaultyDrafter(*FAULTS[fault])) > 1e-3


def bf16(values: FloatArray) -> FloatArray:
    """Rounded to the 8 leading bits of a float32, half to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(values.dtype)


def test_rounding_to_bf16_keeps_eight_bits() -> None:
    assert bf16(np.array([1.0, 1.003, 257.0, -3.14159265])).tolist() == [1.0, 1.0, 256.0, -3.140625]


@pytest.mark.parametrize("rule", RULES)
def test_case_3_a_draft_drawn_from_bf16_logits_and_scored_in_full_bends_the_law(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    # Logits of the size that real models have, where bf16 keeps steps of 1/8 and 1/4.
    offset = 30 + 1.5 * np.random.default_rng(5).standard_normal((3, 3, 3))
    target, draft = table(3, 0), TableModel(offset, dtype=np.float64)
    assert distance(target, 2, rule, draft=draft) < 1e-9

    right_row, right_draw = RowSampler.distribution, _Branch.draw
    rounded: list[FloatArray] = []

    def row(self: RowSampler, logits: FloatArray, tokens: Any, drafted: Any, model: str = "target") -> FloatArray:
        if model == "draft":
            rounded[:] = [right_row(self, bf16(logits), tokens, drafted, model)]
        return right_row(self, logits, tokens, drafted, model)

    def draw(self: _Branch, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        weights = rounded[0] if purpose is Purpose.DRAFT else weights
        return right_draw(self, weights, position, purpose, round_start)

    monkeypatch.setattr(RowSampler, "distribution", row)
    monkeypatch.setattr(_Branch, "draw", draw)
    assert distance(target, 2, rule, draft=draft) > 1e-3
    # The cure: what was rounded is what is scored.
    monkeypatch.setattr(
        RowSampler,
        "distribution",
        lambda self, logits, *given: row(self, bf16(logits) if "draft" in given else logits, *given),
    )
    assert distance(target, 2, rule, draft=draft) < 1e-9


class _MadeUpRows(TableDrafter):
    """Gives its deterministic proposals the probabilities that its table has for them."""

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        draft = super().propose(tokens, num_draft_tokens, chance)
        rows: list[DraftProbs] = []
        for place, row in enumerate(draft.probs or ()):
            text = [*tokens, *draft.tokens[:place]]
            rows.append(distribution(self._model.next_logits(text), self._params) if row is None else row)
        return Draft(draft.tokens, rows)


@pytest.mark.parametrize("rule", RULES)
def test_case_1_a_fixed_row_among_drawn_ones_carries_no_probabilities(rule: str) -> None:
    def drafter(kind: type[TableDrafter]) -> TableDrafter:
        return kind(table(3, 100), SamplingParams(1.0), fixed=lambda text: text[-1] != 0)

    assert distance(table(3, 0), 2, rule, new_drafter=lambda: drafter(TableDrafter)) < 1e-9
    assert distance(table(3, 0), 2, rule, new_drafter=lambda: drafter(_MadeUpRows)) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_case_1_a_greedy_draft_model_scored_with_its_softmax_bends_the_law(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    target, draft = table(3, 0), table(3, 100)
    greedy = {"draft": draft, "draft_sampling": SamplingParams()}
    assert distance(target, 2, rule, **greedy) < 1e-9
    right = DraftModelDrafter.propose

    def propose(self: DraftModelDrafter, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        ids = right(self, tokens, num_draft_tokens, chance).tokens
        return Draft(
            ids,
            [distribution(draft.next_logits([*tokens, *ids[:i]]), SamplingParams(1.0)) for i in range(len(ids))],
        )

    monkeypatch.setattr(DraftModelDrafter, "propose", propose)
    assert distance(target, 2, rule, **greedy) > 1e-3
