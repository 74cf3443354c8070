"""The decoder's own round, played from any text against models that remember their rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline import SamplingParams, SpeculativeDecoder
from paceline.decoder import DEFAULT_VERIFICATION, goes_on_with_text
from paceline.drafters import Drafter, DraftModelDrafter, TextDrafter
from paceline.errors import ContextLengthError, InvalidInputError
from paceline.rounds import play_round
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray
from paceline.streams import Chance, Purpose
from paceline.translated import TranslatedModel
from paceline.verify import Draft

from .memo import MemoModel

__all__ = ["NotingDrafter", "PlainLaw", "Played", "Rounds", "check_room"]

# Distributions that are kept: of the prompt and its most frequent continuations.
_MAX_LAWS = 128


@dataclass(frozen=True, slots=True)
class Played:
    """What a round did, up to its first end token: generation discards what lies behind.

    Attributes:
        start: length of the text that was drafted behind.
        draft: what was drafted.
        num_accepted: how many of its tokens stood.
    """

    start: int
    draft: Draft
    num_accepted: int


class NotingDrafter:
    """Drafts as another drafter does, and notes the draft."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.draft = Draft((), None)

    @property
    def seconds(self) -> float:
        """Wall time of the drafter's runs."""
        return self._drafter.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        """Take in the prompt."""
        self._drafter.prefill(tokens)

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Propose what the drafter proposes."""
        self.draft = self._drafter.propose(tokens, num_draft_tokens, chance)
        return self.draft

    def rollback(self, length: int) -> None:
        """Forget what the drafter shall forget."""
        self._drafter.rollback(length)


class KnownDrafts:
    """Drafts as a `TextDrafter` does: what it proposes follows from the text, so each text asks for it once."""

    def __init__(self, model: TranslatedModel, max_length: int) -> None:
        """Draft with `model` behind texts of up to `max_length` tokens."""
        self._cache = model.new_cache(max_length)
        self._drafter = TextDrafter(model, self._cache)
        self._drafts: dict[tuple[tuple[int, ...], int], Draft] = {}
        self._text: tuple[int, ...] = ()
        self.num_passes = 0

    @property
    def seconds(self) -> float:
        """Wall time of the drafter's runs."""
        return self._drafter.seconds

    def prefill(self, tokens: Sequence[int]) -> None:
        """Nothing to take in: the text comes with each proposal."""

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        """Propose what the drafter proposes behind this text, from memory where it has been asked before."""
        text = tuple(tokens)
        if (text, num_draft_tokens) not in self._drafts:
            pairs = zip(self._text[: self._cache.length], text, strict=False)
            self._drafter.rollback(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self._drafts[text, num_draft_tokens] = self._drafter.propose(text, num_draft_tokens, chance)
            self._text = text
            self.num_passes += len(self._drafts[text, num_draft_tokens].tokens)
        return self._drafts[text, num_draft_tokens]

    def rollback(self, length: int) -> None:
        """Nothing to forget: the next proposal says what it is behind."""


def check_room(
    decoder: SpeculativeDecoder, prompt: Sequence[int], sampling: SamplingParams, num_draft_tokens: int
) -> int:
    """Positions that `prompt` and a round take in each model's context.

    Raises:
        InvalidInputError: nothing drafts.
        ContextLengthError: a model's context has fewer.
    """
    if decoder.draft is None:
        raise InvalidInputError("The bundle has no draft model, so there is nothing to verify.")
    # Of one round: what is forced, what is drafted, and one more.
    length = len(prompt) + len(sampling.forced_token_ids) + num_draft_tokens + 2
    for name, model in (("target", decoder.target), ("draft", decoder.draft)):
        if length > model.max_length:
            forced = f", {len(sampling.forced_token_ids)} forced ones" if sampling.forced_token_ids else ""
            raise ContextLengthError(
                f"A prompt of {len(prompt)} tokens{forced} and a round with num_draft_tokens={num_draft_tokens} need "
                f"{length} positions, but the {name} model's context has {model.max_length}; draft fewer tokens or "
                "shorten the prompt."
            )
    return length


class Rounds:
    """Plays rounds of one prompt's continuations; every text runs through the models once."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt: Sequence[int],
        sampling: SamplingParams,
        num_draft_tokens: int,
        verification: str = DEFAULT_VERIFICATION,
    ) -> None:
        """Continue `prompt` by a round of at most `num_draft_tokens` drafted tokens and one more token.

        Raises:
            InvalidInputError: nothing drafts.
            ContextLengthError: the prompt leaves too little room in a model's context.
        """
        length = check_room(decoder, prompt, sampling, num_draft_tokens)
        assert decoder.draft is not None
        self.prompt = tuple(prompt)
        self._sampling = sampling
        self._vocab_size = decoder.vocab_size
        self.end_token_ids = frozenset(decoder.eos_token_ids)
        self._verification = verification
        self._limit = length - 1 - len(prompt)
        self._target = MemoModel(decoder.target, length)
        self._draft = MemoModel(decoder.draft, length)
        # As in a generation, where penalties and masks leave the logits alone.
        self._text: KnownDrafts | None = None
        if goes_on_with_text(decoder.draft) and self._sampler().leaves_logits_alone:
            self._text = KnownDrafts(cast(TranslatedModel, decoder.draft), length)

    @property
    def num_passes(self) -> tuple[int, int]:
        """Passes of target and draft model so far; of one that goes on with the text, the tokens that it proposed."""
        return self._target.num_passes, self._draft.num_passes + (self._text.num_passes if self._text else 0)

    def play(self, tokens: list[int], num_draft_tokens: int, chance: Chance) -> Played:
        """Extend `tokens`, the prompt and more, by one round, but by nothing behind an end token.

        With nothing to draft it is a step of plain decoding: one token.
        """
        num_before = len(tokens)
        drafter = NotingDrafter(
            self._text
            or DraftModelDrafter(
                self._draft, self._draft.new_cache(self._draft.max_length), self._sampler(), self._vocab_size
            )
        )
        played = play_round(
            tokens,
            self._limit if num_draft_tokens else 1,
            num_draft_tokens,
            target=self._target,
            cache=self._target.cache_of(tokens[:-1]),
            drafter=drafter if num_draft_tokens else None,
            sampler=self._sampler(),
            vocab_size=self._vocab_size,
            chance=chance,
            rule=self._verification,
        )
        start = num_before + played.num_forced
        del tokens[num_before + self._num_kept(tokens[num_before:]) :]
        draft = drafter.draft
        kept = self._num_kept(draft.tokens)
        draft = Draft(draft.tokens[:kept], draft.probs and draft.probs[:kept])
        return Played(start, draft, min(played.num_accepted, kept))

    def _num_kept(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` generation keeps: up to the first end token."""
        return next((index for index, token in enumerate(tokens, 1) if token in self.end_token_ids), len(tokens))

    def _sampler(self) -> RowSampler:
        return RowSampler(
            self._sampling,
            vocab_size=self._vocab_size,
            num_prompt_tokens=len(self.prompt),
            end_token_ids=self.end_token_ids,
        )


class PlainLaw:
    """What plain decoding draws the token behind a text from, asked of a round without a draft."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._laws: OrderedDict[tuple[int, ...], NDArray[np.float64]] = OrderedDict()

    def __call__(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Probabilities `[vocab]` of the token behind `text`, which begins with the prompt."""
        key = tuple(text)
        if key not in self._laws:
            self._laws[key] = self._ask(list(text))
            if len(self._laws) > _MAX_LAWS:
                self._laws.popitem(last=False)
        self._laws.move_to_end(key)
        return self._laws[key]

    def _ask(self, tokens: list[int]) -> NDArray[np.float64]:
        chance = _Recorder()
        self._rounds.play(tokens, 0, chance)
        if chance.weights is None:
            raise InvalidInputError("Greedy decoding draws nothing; a law needs a temperature above 0.")
        probs: NDArray[np.float64] = chance.weights.astype(np.float64)
        probs /= probs.sum()
        return probs


class _Recorder:
    """A `Chance` that notes what a token would be drawn from."""

    def __init__(self) -> None:
        self.weights: FloatArray | None = None

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        return False

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        self.weights = weights
        return int(weights.argmax())
