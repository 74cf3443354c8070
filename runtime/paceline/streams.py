"""Counter-based random numbers: every decision of a generation has its own, fixed by what the decision is.

A number depends on the seed, the request, the position in the text, and the purpose, and on nothing else: not on
what was drawn before, nor on what runs beside it. The same seed, settings and number of drafted tokens give the same
text; another number of drafted tokens gives another text of the same law.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from .errors import InvalidInputError, shown
from .sampling import FloatArray, sample

__all__ = ["Chance", "Purpose", "Streams"]


class Purpose(IntEnum):
    """What a random number decides. Purposes never share a stream.

    Noise that drew a draft token and is used again for the recovered token would bias the text.
    """

    TARGET = 0  # a token from the target's distribution: plain, bonus, or to compare with a deterministic proposal
    DRAFT = 1  # a drafted token
    ACCEPT = 2  # whether a drafted token stands
    RECOVER = 3  # the token that replaces a rejected one


class Chance(Protocol):
    """Where decisions are taken: from random streams, or, when a law is enumerated, every way in turn."""

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        """Decide an event of this probability; 1 always happens, 0 and NaN never."""

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        """Draw a token id with probability proportional to `weights` `[vocab]`."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Random streams of one generation.

    Attributes:
        seed: 0 to 2**64 - 1.
        request: 0 to 2**64 - 1; tells generations with the same seed apart.

    The generator is Philox 4x64 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Raises:
        InvalidInputError: seed or request out of range.
    """

    seed: int
    request: int = 0

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("request", self.request)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise InvalidInputError(f"{name} must be an integer from 0 to 2**64 - 1, got {shown(value)}.")

    @classmethod
    def from_seed(cls, seed: int | None, request: int = 0) -> Streams:
        """Streams for this seed and request; None takes a fresh seed from the operating system."""
        return cls(secrets.randbits(64) if seed is None else seed, request)

    def uniform(self, position: int, purpose: Purpose, round_start: int = 0) -> float:
        """Random number in [0, 1), a multiple of 2**-53.

        Args:
            position: index in the text (prompt included) of the token that is decided.
            purpose: what it decides.
            round_start: length of the text when the round began, for drafted tokens and for the block rule's accept
                tests: a position whose draft fell with an earlier rejection is drafted and judged again in a later
                round, with fresh numbers.
        """
        return self.integer(position, purpose, round_start) * 2.0**-53

    def integer(self, position: int, purpose: Purpose, round_start: int = 0) -> int:
        """The integer below 2**53 that `uniform` divides by 2**53."""
        # Word 0 of the counter is the generator's own step: left at 0, it keeps the streams disjoint.
        counter = np.array((0, position, purpose, round_start), dtype=np.uint64)
        key = np.array((self.seed, self.request), dtype=np.uint64)
        return int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        """Decide an event of this probability; 1 always happens, 0 and NaN never."""
        return self.uniform(position, purpose, round_start) < probability

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        """Draw a token id with probability proportional to `weights` `[vocab]`."""
        return sample(weights, self.uniform(position, purpose, round_start))
