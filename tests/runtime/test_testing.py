"""The test doubles must themselves catch what they are there to catch."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import InvalidInputError
from paceline.sampling import SamplingParams
from paceline.streams import Chance, Purpose
from paceline.testing import ScriptedDrafter, TableModel, enumerate_law, every_way


def test_a_table_model_predicts_from_what_its_cache_holds() -> None:
    model = TableModel.random(5, seed=0)
    cache = model.new_cache(10)
    whole = model.forward([1, 2, 3, 4], model.new_cache(10), 4).copy()
    assert whole[1].tolist() == model.next_logits([1, 2]).tolist()
    assert model.forward([1, 2, 0, 0], cache, 1).shape == (1, 5)
    cache.rollback(2)
    assert model.forward([3, 4], cache, 2).tolist() == whole[2:].tolist()
    assert (cache.tokens, cache.num_forwards) == ([1, 2, 3, 4], 2)
    cache.rollback(1)  # a stale token is really forgotten
    assert model.forward([3], cache, 1).tolist() != whole[2:3].tolist()


def test_a_forward_invalidates_the_logits_of_the_one_before() -> None:
    model = TableModel.random(5, seed=0)
    cache = model.new_cache(10)
    first = model.forward([1], cache, 1)
    model.forward([2], cache, 1)
    assert np.isnan(first).all()


@pytest.mark.parametrize(
    ("tokens", "num_logits", "message"),
    [
        ([], 1, "num_logits"),
        ([1, 2], 3, "num_logits"),
        ([1, 2], 0, "num_logits"),
        ([5], 1, "outside the vocabulary"),
        ([1] * 5, 1, "holds 0 of 4"),
    ],
)
def test_a_table_model_refuses_what_a_real_model_refuses(tokens: list[int], num_logits: int, message: str) -> None:
    model = TableModel.random(5, seed=0)
    with pytest.raises(InvalidInputError, match=message):
        model.forward(tokens, model.new_cache(4), num_logits)


def test_a_cache_belongs_to_its_model() -> None:
    one, other = TableModel.random(5, seed=0), TableModel.random(5, seed=0)
    with pytest.raises(InvalidInputError, match="not made by this model"):
        one.forward([1], other.new_cache(4), 1)
    with pytest.raises(InvalidInputError, match="exceeds the model's 64"):
        one.new_cache(65)
    cache = one.new_cache(4)
    with pytest.raises(InvalidInputError, match="Cannot roll back to length 1"):
        cache.rollback(1)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 3, 4), (2, 2, 2, 2)])
def test_tables_are_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="A table needs the shape"):
        TableModel(np.zeros(shape))


def test_scripts_are_read_by_position() -> None:
    text = [4, 3, 2, 1, 0]
    chance = None
    assert ScriptedDrafter(text).propose([9, 9], 2, chance).tokens == (2, 1)  # type: ignore[arg-type]
    assert ScriptedDrafter(text).propose([9] * 4, 3, chance).tokens == (0,)  # type: ignore[arg-type]
    assert ScriptedDrafter.always_wrong(text, 5).propose([9], 9, chance).tokens == (4, 3, 2, 1)  # type: ignore[arg-type]


def test_every_way_is_taken_once_and_the_probabilities_sum_to_one() -> None:
    def run(chance: Chance) -> tuple[int, ...]:
        first = chance.draw(np.array([0.5, 0.0, 1.5]), 0, Purpose.TARGET)
        return (first, int(chance.happens(0.25, 1, Purpose.ACCEPT)), int(chance.happens(1.0, 2, Purpose.ACCEPT)))

    ways = dict(every_way(run))
    assert ways == pytest.approx({(0, 1, 1): 0.0625, (0, 0, 1): 0.1875, (2, 1, 1): 0.1875, (2, 0, 1): 0.5625})


def test_a_random_number_that_is_used_twice_stays_one_number() -> None:
    def run(chance: Chance) -> tuple[int, ...]:
        return tuple(int(chance.happens(p, 0, Purpose.ACCEPT)) for p in (0.5, 0.2, 0.9))

    assert dict(every_way(run)) == pytest.approx({(1, 1, 1): 0.2, (1, 0, 1): 0.3, (0, 0, 1): 0.4, (0, 0, 0): 0.1})


def test_the_plain_law_is_the_chain_rule() -> None:
    model = TableModel(np.log([[0.5, 0.5], [0.1, 0.9]]), dtype=np.float64)
    law = enumerate_law(model, [0], 2, SamplingParams(1.0))
    assert law == pytest.approx({(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.05, (1, 1): 0.45})
    assert enumerate_law(model, [1], 2, SamplingParams()) == {(1, 1): 1.0}
