"""The model that runs each text once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.errors import InvalidInputError
from paceline.kv_cache import KVCache
from paceline.testing import TableModel
from paceline_tools.memo import MemoModel


class NotingModel(TableModel):
    """Notes what is fed, and behind which position."""

    fed: list[tuple[int, list[int], int]]

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        self.fed.append((cache.length, list(tokens), num_logits))
        return super().forward(tokens, cache, num_logits)


@pytest.fixture
def model() -> NotingModel:
    found = NotingModel.random(6, seed=1)
    found.fed = []
    return found


def rows(memo: MemoModel, before: Sequence[int], tokens: Sequence[int], num_logits: int) -> None:
    """Ask for rows and compare them with the model's own."""
    cache = memo.cache_of(before)
    found = memo.forward(tokens, cache, num_logits)
    text = [*before, *tokens]
    ends = range(len(text) - num_logits + 1, len(text) + 1)
    model: TableModel = memo._model  # type: ignore[assignment]
    assert np.array_equal(found, np.stack([model.next_logits(text[:end]) for end in ends]))
    assert cache.length == len(text)
    assert cache.tokens == text


def test_a_text_runs_once(model: NotingModel) -> None:
    memo = MemoModel(model, 20)
    for _ in range(3):
        rows(memo, [1, 2], [3, 4, 5], 3)
    assert model.fed == [(0, [1, 2, 3, 4, 5], 3)]
    rows(memo, [1, 2, 3], [4], 1)  # a row of the pass above
    rows(memo, [], [1, 2, 3], 1)
    assert memo.num_passes == 1


def test_what_a_pass_shares_with_the_last_one_is_not_fed_again(model: NotingModel) -> None:
    memo = MemoModel(model, 20)
    rows(memo, [1, 2], [3, 4, 5], 3)
    rows(memo, [1, 2], [3, 0, 5], 3)
    rows(memo, [1, 2], [3, 0, 4], 3)  # one row is new, but a round's pass has several rows
    rows(memo, [1, 2, 3, 0], [1], 1)
    rows(memo, [5], [5], 1)
    assert [(length, fed) for length, fed, _ in model.fed[1:]] == [
        (3, [0, 5]),
        (3, [0, 4]),
        (4, [1]),
        (0, [5, 5]),
    ]


def test_many_random_texts(model: NotingModel) -> None:
    memo = MemoModel(model, 20, memory=1)  # 16 rows
    random = np.random.default_rng(0)
    for _ in range(500):
        before, tokens = random.integers(0, 3, random.integers(0, 4)), random.integers(0, 3, random.integers(1, 6))
        rows(memo, before.tolist(), tokens.tolist(), int(random.integers(1, len(tokens) + 1)))
    assert len(memo._rows) == 16
    assert 100 < memo.num_passes < 500


def test_a_cache_rolls_back(model: NotingModel) -> None:
    memo = MemoModel(model, 20)
    cache = memo.new_cache(8)
    memo.forward([1, 2, 3, 4], cache, 1)
    cache.rollback(2)
    found = memo.forward([5], cache, 1)
    assert np.array_equal(found[0], model.next_logits([1, 2, 5]))
    with pytest.raises(InvalidInputError, match="holds 3 of 8"):
        memo.forward([1] * 6, cache, 1)
