"""Test doubles and exact laws, for paceline's own tests and for those of its users.

`TableModel` is a toy language model whose probabilities are known exactly. `enumerate_law` computes the distribution
over the next tokens that drafting and verification really produce, by taking every way that chance could go.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Self, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .constraint import Constraint, ConstraintMasks
from .drafters import CheckedDrafter, Drafter, DraftModelDrafter
from .errors import InvalidInputError
from .kv_cache import KVCache, SavedKV
from .model import CausalLM
from .planner import Planner
from .rounds import play_round
from .row_sampler import RowSampler
from .sampling import FloatArray, SamplingParams
from .streams import Chance, Purpose
from .verify import Draft

__all__ = ["ScriptedDrafter", "TableCache", "TableModel", "enumerate_law", "every_way"]


class TableCache(KVCache):
    """A KV cache that remembers the tokens it stands for.

    Attributes:
        tokens: what was fed and not rolled back.
        num_forwards: how many times the model ran against it.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.tokens: list[int] = []
        self.num_forwards = 0
        self.logits: FloatArray | None = None

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions."""
        super().rollback(length)
        del self.tokens[length:]

    def save(self) -> SavedKV:
        """Give away the tokens."""
        return SavedKV(tuple(self.tokens), len(self.tokens))

    def restore(self, saved: SavedKV, length: int) -> None:
        """Begin with the first `length` tokens that another cache held."""
        self.tokens = list(saved.state[:length])
        self.advance(length)


class TableModel:
    """A causal language model that looks its logits up by the last token or the last two.

    It holds its callers to the contract of `CausalLM`: it predicts from what its cache really holds, and a forward
    overwrites the logits of the one before with NaN.

    Attributes:
        live_caches: the caches made by this model that are still referenced somewhere.
    """

    def __init__(self, logits: ArrayLike, *, max_length: int = 64, dtype: DTypeLike = np.float32) -> None:
        """Use the table `logits`, `[width, width]` or `[width, width, width]`: the last axis scores the next token.

        The first position of a text has token 0 before it. With float64 logits the probabilities that are computed
        from them are float64 too, so that laws can be compared far below float32's rounding.
        """
        table = np.asarray(logits, dtype=dtype)
        if table.ndim not in (2, 3) or len(set(table.shape)) != 1:
            raise InvalidInputError(f"A table needs the shape [width, width(, width)], got {list(table.shape)}.")
        self._table: FloatArray = table
        self._max_length = max_length
        self.live_caches: weakref.WeakSet[TableCache] = weakref.WeakSet()

    @classmethod
    def random(
        cls,
        vocab_size: int,
        *,
        seed: int,
        order: int = 2,
        scale: float = 1.5,
        max_length: int = 64,
        dtype: DTypeLike = np.float32,
    ) -> Self:
        """A table of normally distributed logits with standard deviation `scale`."""
        shape = (vocab_size,) * (order + 1)
        return cls(scale * np.random.default_rng(seed).standard_normal(shape), max_length=max_length, dtype=dtype)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._table.shape[-1])

    @property
    def logit_ids(self) -> NDArray[np.int64] | None:
        """None: the i-th logit stands for id i."""
        return None

    @property
    def max_length(self) -> int:
        """Largest number of positions of a cache."""
        return self._max_length

    @property
    def kv_bytes_per_position(self) -> int:
        """1: a token stands for its keys and values."""
        return 1

    def next_logits(self, text: Sequence[int]) -> FloatArray:
        """Logits `[width]` of the token behind `text`."""
        before = (0, *text)
        return cast(
            FloatArray, self._table[before[-2], before[-1]] if self._table.ndim == 3 else self._table[before[-1]]
        )

    def new_cache(self, max_length: int) -> TableCache:
        """Make an empty cache."""
        if max_length > self._max_length:
            raise InvalidInputError(f"A cache of {max_length} positions exceeds the model's {self._max_length}.")
        cache = TableCache(max_length)
        self.live_caches.add(cache)
        return cache

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        """Feed `tokens` and return the logits of the last `num_logits` of them."""
        started = time.perf_counter()
        if not isinstance(cache, TableCache) or cache not in self.live_caches:
            raise InvalidInputError("This cache was not made by this model.")
        if not 1 <= num_logits <= len(tokens):
            raise InvalidInputError(
                f"num_logits must be between 1 and {len(tokens)} (the tokens fed), got {num_logits}."
            )
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidInputError(f"Token id {token} is outside the vocabulary of {self.vocab_size}.")
        cache.advance(len(tokens))
        cache.tokens += tokens
        if cache.logits is not None:
            cache.logits.fill(np.nan)
        ends = range(len(cache.tokens) - num_logits + 1, len(cache.tokens) + 1)
        cache.logits = np.stack([self.next_logits(cache.tokens[:end]) for end in ends])
        cache.num_forwards += 1
        cache.seconds += time.perf_counter() - started
        return cast(NDArray[np.float32], cache.logits)


class ScriptedDrafter:
    """Proposes what a script says: always right when it is the text to come, always wrong when it never agrees."""

    def __init__(self, script: Sequence[int]) -> None:
        """`script` is the whole text, prompt included; token i of it is proposed for position i."""
        self._script = tuple(script)
        self.seconds = 0.0

    @classmethod
    def always_wrong(cls, text: Sequence[int], vocab_size: int) -> ScriptedDrafter:
        """Disagree with `text`, prompt included, at every position."""
        return cls([(token + 1) % vocab_size for token in text])

    def prefill(self, tokens: Sequence[int]) -> None:
        """Nothing to take in."""

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Propose the script's next tokens."""
        return Draft(self._script[len(tokens) : len(tokens) + num_draft_tokens], None)

    def rollback(self, length: int) -> None:
        """Nothing to forget."""


class _Branch:
    """A `Chance` that goes one of the ways there are, with its exact probability.

    Every random number is kept as the interval it must lie in, so that a number that is used twice stays one number.
    """

    def __init__(self, path: Sequence[int]) -> None:
        self._path = path
        self._taken: list[int] = []
        self._intervals: dict[tuple[int, Purpose, int], tuple[float, float]] = {}
        self.probability = 1.0
        self.untried: list[list[int]] = []

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        return self._choose((position, purpose, round_start), np.array([0.0, probability, 1.0])) == 0

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        edges = np.concatenate(([0.0], np.cumsum(weights, dtype=np.float64)))
        return self._choose((position, purpose, round_start), edges / edges[-1])

    def _choose(self, key: tuple[int, Purpose, int], edges: NDArray[np.float64]) -> int:
        """Take the way that the path names, or the first one with a positive probability, and note the others."""
        low, high = self._intervals.get(key, (0.0, 1.0))
        pieces = [(max(low, a), min(high, b)) for a, b in itertools.pairwise(edges.tolist())]
        open_ways = [way for way, (a, b) in enumerate(pieces) if b > a]
        step = len(self._taken)
        if step < len(self._path):
            way = self._path[step]
        else:
            way = open_ways[0]
            self.untried += [[*self._taken, other] for other in open_ways[1:]]
        self._taken.append(way)
        self._intervals[key] = pieces[way]
        self.probability *= (pieces[way][1] - pieces[way][0]) / (high - low)
        return way


def every_way(run: Callable[[Chance], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Run a function once for every way that its decisions can go; yield each result with its probability."""
    paths: list[list[int]] = [[]]
    while paths:
        branch = _Branch(paths.pop())
        result = run(branch)
        paths += branch.untried
        yield result, branch.probability


def enumerate_law(
    target: CausalLM,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: SamplingParams,
    *,
    num_draft_tokens: int = 0,
    draft: CausalLM | None = None,
    draft_sampling: SamplingParams | None = None,
    new_drafter: Callable[[], Drafter] | None = None,
    vocab_size: int | None = None,
    rule: str = "token",
    constraint: Constraint | None = None,
    end_token_ids: frozenset[int] = frozenset(),
    new_planner: Callable[[], Planner] | None = None,
) -> dict[tuple[int, ...], float]:
    """Exact distribution of the next `num_tokens` tokens that rounds of speculative sampling produce.

    Runs the decoder's own round for every draft and every decision, from fresh caches.

    Args:
        target: small; the work grows as `vocab_size ** num_tokens`, and more for each drafted token.
        prompt: token ids.
        num_tokens: at least 1.
        sampling: the target's.
        num_draft_tokens: 0 gives the law of plain decoding. A round drafts no more than `num_tokens` leaves room for.
        draft: the draft model.
        draft_sampling: the draft model's, `sampling` by default.
        new_drafter: makes a drafter to use instead of `draft`.
        vocab_size: the common vocabulary, the target's width by default.
        rule: a key of `VERIFICATION_RULES`.
        constraint: says what may follow a prefix, in the target's and the draft model's eyes.
        end_token_ids: end a text.
        new_planner: makes what the draft model asks before each step and each draw.

    Returns:
        Probability of each sequence of `num_tokens` ids, or fewer where it ends with one of `end_token_ids`;
        sequences of probability 0 are left out.
    """
    vocab = vocab_size or target.vocab_size

    masks = ConstraintMasks(constraint, vocab) if constraint else None

    def row_sampler(params: SamplingParams) -> RowSampler:
        return RowSampler(
            params, vocab_size=vocab, num_prompt_tokens=len(prompt), end_token_ids=end_token_ids, masks=masks
        )

    def make_drafter() -> Drafter | None:
        if new_drafter is not None:
            return CheckedDrafter(new_drafter(), vocab)
        if draft is None:
            return None
        cache = draft.new_cache(draft.max_length)
        planner = new_planner() if new_planner else None
        return DraftModelDrafter(draft, cache, row_sampler(draft_sampling or sampling), vocab, planner)

    def one_round(text: tuple[int, ...], num_left: int, chance: Chance) -> tuple[int, ...]:
        tokens = [*prompt, *text]
        play_round(
            tokens,
            num_left,
            num_draft_tokens,
            target=target,
            cache=target.new_cache(target.max_length),
            drafter=make_drafter(),
            sampler=row_sampler(sampling),
            vocab_size=vocab,
            chance=chance,
            rule=rule,
        )
        new_text = tokens[len(prompt) :]
        end = next((place for place, token in enumerate(new_text) if token in end_token_ids), len(new_text))
        return tuple(new_text[: end + 1])

    # What follows a text depends on the text alone, so texts that several rounds lead to are continued once.
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(num_tokens):
        for text in [text for text in law if len(text) == length and end_token_ids.isdisjoint(text)]:
            reached = law.pop(text)
            num_left = num_tokens - length

            def run(chance: Chance, text: tuple[int, ...] = text, num_left: int = num_left) -> tuple[int, ...]:
                return one_round(text, num_left, chance)

            for longer, probability in every_way(run):
                law[longer] = law.get(longer, 0.0) + reached * probability
    return law
