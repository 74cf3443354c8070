"""Where a constraint knows no way on: an error if the text gets there, and none if only a draft does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.decoder import SpeculativeDecoder
from paceline.errors import InvalidInputError, ModelOutputError
from paceline.sampling import SamplingParams
from paceline.streams import Chance
from paceline.testing import ScriptedDrafter, TableModel, every_way

from .conftest import byte_level_tokenizer

VOCAB = 4
PROMPT = [1, 2]
ALL = np.array([2**VOCAB - 1], np.uint32)


def dead_behind_3(new_tokens: Sequence[int]) -> NDArray[np.uint32]:
    return ALL * (3 not in new_tokens)


def fails_behind_3(new_tokens: Sequence[int]) -> NDArray[np.uint32]:
    if 3 in new_tokens:
        raise KeyError("no state for 3")
    return ALL


def law(num_draft_tokens: int, constraint: Any, **options: Any) -> dict[tuple[int, ...] | str, float]:
    """Probabilities of all texts of four tokens, and of the error."""
    target = TableModel.random(VOCAB, seed=41, dtype=np.float64)
    draft = TableModel.random(VOCAB, seed=42, dtype=np.float64)
    decoder = SpeculativeDecoder(target, draft, None, VOCAB)

    def run(chance: Chance) -> Any:
        generation = decoder.generate(
            PROMPT,
            SamplingParams(1.0),
            max_new_tokens=4,
            num_draft_tokens=num_draft_tokens,
            constraint=constraint,
            **options,
        )
        generation._chance = chance
        try:
            return tuple(token for step in generation for token in step.token_ids)
        except (InvalidInputError, KeyError):
            return "refused"

    found: dict[tuple[int, ...] | str, float] = {}
    for outcome, probability in every_way(run):
        found[outcome] = found.get(outcome, 0) + probability
    return found


@pytest.mark.parametrize("constraint", [dead_behind_3, fails_behind_3])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafts", ["model", "unaware model", "script"])
def test_speculation_refuses_as_often_as_plain_decoding(
    constraint: Any, rule: str, num_draft_tokens: int, drafts: str
) -> None:
    options: dict[str, Any] = {"verification": rule}
    if drafts == "unaware model":  # it may draft what the target never takes
        options["draft_sampling"] = SamplingParams(2.0)
    if drafts == "script":
        options["drafter"] = ScriptedDrafter([*PROMPT, 0, 3, 1, 2])
    plain, speculative = law(0, constraint), law(num_draft_tokens, constraint, **options)
    assert 0.3 < plain["refused"] < 0.9
    assert sum(abs(plain.get(o, 0) - speculative.get(o, 0)) for o in plain.keys() | speculative.keys()) < 1e-9


def test_a_greedy_text_that_never_gets_there_is_not_refused() -> None:
    target, draft = (TableModel.random(8, seed=seed, max_length=512) for seed in (1, 2))
    decoder = SpeculativeDecoder(target, draft, None, 8)

    def text(k: int) -> list[int]:
        generation = decoder.generate(
            [1],
            max_new_tokens=40,
            num_draft_tokens=k,
            constraint=lambda new: np.array([0 if 6 in new else 255], np.uint32),
        )
        return [token for step in generation for token in step.token_ids]

    plain = text(0)
    assert 6 not in plain
    for k in range(1, 6):
        assert text(k) == plain


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4])
def test_a_text_that_stops_before_its_dead_end_is_not_refused(num_draft_tokens: int) -> None:
    tokenizer = byte_level_tokenizer()
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    table = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    table[a, b] = table[b, c] = table[c, a] = 9
    decoder = SpeculativeDecoder(TableModel(table), TableModel(table), tokenizer, tokenizer.vocab_size)
    full = np.full(-(-tokenizer.vocab_size // 32), 2**32 - 1, np.uint32)
    generation = decoder.generate(
        "a",
        max_new_tokens=9,
        num_draft_tokens=num_draft_tokens,
        stop=["bc"],
        constraint=lambda new: full * (c not in new),
    )
    assert [token for step in generation for token in step.token_ids] == [b, c]
    assert generation.finish_reason == "stop"


def test_emitted_tokens_come_before_the_error() -> None:
    class BrokenBehind(TableModel):
        def next_logits(self, text: Sequence[int]) -> Any:
            return np.full(VOCAB, np.nan) if len(text) == 6 else super().next_logits(text)

    table = np.eye(VOCAB) * 9
    decoder = SpeculativeDecoder(BrokenBehind(table), TableModel(table), None, VOCAB)
    generation = decoder.generate([1, 1], max_new_tokens=9, num_draft_tokens=5)
    with pytest.raises(ModelOutputError, match="position 6 "):
        list(generation)
    assert generation.token_ids == (1, 1, 1, 1)
