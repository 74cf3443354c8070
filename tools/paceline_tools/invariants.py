"""What must hold of every run, whatever chance does: greedy texts agree, and a live KV cache equals a fresh one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline import SamplingParams, SpeculativeDecoder
from paceline.bundle import ModelEntry
from paceline.drafters import DraftModelDrafter
from paceline.kv_cache import KVCache
from paceline.model import CausalLM
from paceline.rounds import play_round
from paceline.row_sampler import RowSampler
from paceline.sampling import distribution
from paceline.streams import Chance, Streams
from paceline.verify import Draft

__all__ = [
    "TOLERANCES",
    "Difference",
    "GreedyText",
    "Tolerance",
    "cache_rounds",
    "greedy_texts",
    "row_rounding",
    "tolerance_of",
]

_RAW = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far arithmetic of one precision may lead apart what is equal in exact arithmetic.

    Attributes:
        gap: of two logits where greedy texts part.
        cache: total variation of the next token's distribution, live cache against fresh prefill.
    """

    gap: float
    cache: float


# By precision of the target's weights. Quantised weights are multiplied with activations rounded to 8 bits.
TOLERANCES = {
    "fp32": Tolerance(1e-3, 1e-3),
    "fp16": Tolerance(0.1, 0.02),
    "bf16": Tolerance(0.8, 0.16),  # 3 bits fewer than float16, so 8 times as coarse; derived, not yet measured
    "fp8": Tolerance(0.5, 0.2),
    "int8": Tolerance(0.5, 0.2),
    "int4": Tolerance(0.5, 0.2),
}


def tolerance_of(target: ModelEntry) -> Tolerance:
    """What holds for a model. Outside the flavour `ort` few bits are those of weights alone; products are float16's."""
    few_bits = target.precision in ("int8", "int4")
    return TOLERANCES["fp16" if few_bits and target.flavor != "ort" else target.precision]


@dataclass(frozen=True, slots=True)
class GreedyText:
    """A greedy speculative text against plain decoding's.

    Attributes:
        prompt: its name.
        num_draft_tokens: drafted per round.
        length: of plain decoding's text, in tokens.
        parts_at: the first new token that differs, from 0; None if none does.
        gap: how far below the best logit there the lower of the two tokens lies; 0 if none differs.
    """

    prompt: str
    num_draft_tokens: int
    length: int
    parts_at: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Two computations of the next token's logits: the largest difference of a logit, and the total variation."""

    logit: float
    tv: float

    @classmethod
    def between(cls, one: NDArray[np.float32], other: NDArray[np.float32]) -> Difference:
        """Compare two rows of logits `[vocab]`."""
        finite = np.isfinite(one) & np.isfinite(other)
        logit = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
        probs = (distribution(row, _RAW).astype(np.float64) for row in (one, other))
        return cls(logit, 0.5 * float(np.abs(np.subtract(*probs)).sum()))

    @classmethod
    def largest(cls, differences: Iterable[Difference]) -> Difference:
        """The largest of each figure."""
        found = list(differences)
        return cls(max((one.logit for one in found), default=0.0), max((one.tv for one in found), default=0.0))


def greedy_texts(
    decoder: SpeculativeDecoder,
    name: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    num_draft_tokens: Iterable[int],
    max_new_tokens: int,
    on_text: Callable[[], None] = lambda: None,
) -> tuple[tuple[int, ...], list[GreedyText]]:
    """Plain decoding's greedy text behind `prompt`, and how speculative ones compare with it for each number drafted.

    `sampling` with temperature 0 decodes; its penalties and biases, where it has any, stay.
    """
    greedy = replace(sampling, temperature=0.0)

    def text(k: int) -> tuple[int, ...]:
        generation = decoder.generate(prompt, greedy, max_new_tokens=max_new_tokens, num_draft_tokens=k)
        for _ in generation:
            pass
        on_text()
        return generation.token_ids

    plain = text(0)
    found = []
    for k in num_draft_tokens:
        speculative = text(k)
        pairs = list(itertools.zip_longest(plain, speculative))
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        gap = 0.0 if at is None else _gap(decoder, greedy, prompt, plain[:at], pairs[at])
        found.append(GreedyText(name, k, len(plain), at, gap))
    return plain, found


def _gap(
    decoder: SpeculativeDecoder,
    greedy: SamplingParams,
    prompt: Sequence[int],
    text: Sequence[int],
    tokens: tuple[int | None, int | None],
) -> float:
    """How far below the best logit behind `prompt` and `text` the lower of two tokens lies; infinite for no token."""
    before = [*prompt, *text]
    logits = decoder.target.forward(before, decoder.target.new_cache(len(before)), 1)[0, : decoder.vocab_size]
    sampler = RowSampler(
        greedy,
        vocab_size=decoder.vocab_size,
        num_prompt_tokens=len(prompt),
        end_token_ids=frozenset(decoder.eos_token_ids),
    )
    logits = sampler.adjusted(logits, before, ())
    return max(np.inf if token is None else float(logits.max() - logits[token]) for token in tokens)


class _SpoiledDrafter:
    """Drafts with a model, but makes one drafted token wrong, so that a rejection is forced behind any row.

    Attributes:
        row: of the wrong token; None leaves the draft alone.
    """

    def __init__(self, drafter: DraftModelDrafter, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.row: int | None = None

    @property
    def seconds(self) -> float:
        return self._drafter.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        self._drafter.prefill(tokens)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        drafted = list(self._drafter.propose(tokens, num_draft_tokens, chance).tokens)
        if self.row is not None and self.row < len(drafted):
            drafted[self.row] = (drafted[self.row] + 1) % self._vocab_size
        return Draft(tuple(drafted), None)

    def rollback(self, length: int) -> None:
        self._drafter.rollback(length)


def cache_rounds(
    decoder: SpeculativeDecoder, prompt: Sequence[int], *, num_draft_tokens: int, num_rounds: int
) -> list[Difference]:
    """Play greedy rounds with rejections forced in every row; after each compare both live caches with fresh ones."""
    assert decoder.draft is not None
    length = len(prompt) + num_rounds * (num_draft_tokens + 1) + 1
    length = min(length, decoder.target.max_length, decoder.draft.max_length)
    caches = decoder.target.new_cache(length), decoder.draft.new_cache(length)
    samplers = [
        RowSampler(SamplingParams(), vocab_size=decoder.vocab_size, num_prompt_tokens=len(prompt)) for _ in range(2)
    ]
    drafter = _SpoiledDrafter(
        DraftModelDrafter(decoder.draft, caches[1], samplers[1], decoder.vocab_size), decoder.vocab_size
    )
    tokens = list(prompt)
    found = []
    for index in range(num_rounds):
        if length - len(tokens) < num_draft_tokens + 2:
            break
        row = index % (num_draft_tokens + 1)
        drafter.row = row if row < num_draft_tokens else None
        played = play_round(
            tokens,
            num_draft_tokens + 1,
            num_draft_tokens,
            target=decoder.target,
            cache=caches[0],
            drafter=drafter,
            sampler=samplers[0],
            vocab_size=decoder.vocab_size,
            chance=Streams(0),
        )
        found.append(_against_fresh(decoder.target, caches[0], tokens, decoder.vocab_size))
        if drafter.row is not None and played.num_accepted > drafter.row:
            break  # the wrong token was right, and the draft model has not seen it
        if decoder.draft.logit_ids is None and any(token >= decoder.draft.vocab_size for token in tokens):
            break  # the draft model cannot read the text, and drafts no more
        found.append(_against_fresh(decoder.draft, caches[1], tokens, decoder.vocab_size))
    return found


def _against_fresh(model: CausalLM, live: KVCache, tokens: Sequence[int], vocab_size: int) -> Difference:
    """Compare the logits behind `tokens` from a live cache, which stays as it is, with those from a new one.

    One more token is fed to both, so that both score the row in a pass of several rows, as a round does.
    """
    length = live.length
    ours = model.forward([*tokens[length:], tokens[-1]], live, 2)[0, :vocab_size].copy()
    live.rollback(length)
    fresh = model.forward([*tokens, tokens[-1]], model.new_cache(len(tokens) + 1), 2)[0, :vocab_size]
    return Difference.between(ours, fresh)


def row_rounding(
    decoder: SpeculativeDecoder, prompt: Sequence[int], text: Sequence[int], *, num_draft_tokens: int
) -> list[Difference]:
    """Compare the target's rows over `text`: each in a pass of its own, as in plain decoding, and in passes of a round.

    Both are the target's; what lies between them is the rounding of the kernels.
    """
    rows = num_draft_tokens + 1
    count = len(text) // rows * rows
    plain, round_ = (decoder.target.new_cache(len(prompt) + len(text)) for _ in range(2))
    for cache in (plain, round_):
        decoder.target.forward(prompt, cache, 1)
    found = []
    for start in range(0, count, rows):
        block = text[start : start + rows]
        together = decoder.target.forward(block, round_, rows)[:, : decoder.vocab_size].copy()  # [rows, vocab]
        for row, token in enumerate(block):
            alone = decoder.target.forward([token], plain, 1)[0, : decoder.vocab_size]
            found.append(Difference.between(together[row], alone))
    return found
