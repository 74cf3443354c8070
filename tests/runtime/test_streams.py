from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from paceline.errors import InvalidInputError
from paceline.streams import Purpose, Streams


def test_a_number_depends_on_what_it_decides_and_on_nothing_drawn_before() -> None:
    streams = Streams(7)
    first = streams.uniform(3, Purpose.ACCEPT)
    for position in range(20):
        streams.uniform(position, Purpose.DRAFT, 5)
    assert streams.uniform(3, Purpose.ACCEPT) == first == Streams(7).uniform(3, Purpose.ACCEPT)


def test_every_key_has_its_own_number() -> None:
    keys = list(itertools.product((0, 1, 2**64 - 1), (0, 9), range(12), Purpose, (0, 4, 5)))
    numbers = {Streams(seed, request).uniform(pos, why, start) for seed, request, pos, why, start in keys}
    assert len(numbers) == len(keys)


def test_a_position_that_is_drafted_again_in_a_later_round_gets_a_fresh_number() -> None:
    streams = Streams(1)
    assert streams.uniform(10, Purpose.DRAFT, round_start=8) != streams.uniform(10, Purpose.DRAFT, round_start=9)


def test_the_numbers_are_pinned() -> None:
    # A change here changes every seeded text that users have recorded.
    assert [Streams(42).uniform(p, Purpose.TARGET) for p in range(2)] == [
        0.8201981478608876,
        0.20650309990981752,
    ]


def test_numbers_are_uniform_in_zero_to_one() -> None:
    streams = Streams(3)
    numbers = np.array([streams.uniform(position, Purpose.TARGET) for position in range(5000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.combinations(Purpose, 2)], ids=lambda purpose: purpose.name.lower()
)
def test_purposes_are_independent(one: Purpose, other: Purpose) -> None:
    streams = Streams(5)
    x = [streams.uniform(position, one) for position in range(3000)]
    y = [streams.uniform(position, other) for position in range(3000)]
    assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(3000)


def test_no_seed_takes_a_fresh_one() -> None:
    assert Streams.from_seed(None).seed != Streams.from_seed(None).seed
    assert Streams.from_seed(0).seed == 0


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_bad_seeds_are_refused(seed: int) -> None:
    with pytest.raises(InvalidInputError, match=r"2\*\*64"):
        Streams(seed)
