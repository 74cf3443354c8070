"""Settings and drafts under which the law of the text is enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.decoder import SpeculativeDecoder
from paceline.kv_cache import KVCache
from paceline.sampling import SamplingParams
from paceline.streams import Chance, Purpose
from paceline.testing import ScriptedDrafter, TableCache, TableModel, enumerate_law, every_way
from paceline.verify import Draft, DraftProbs

from .reference import Law, Setting, constraint_of, naive_distribution_of

# Ids of the prompt and of a round come again and again, so that penalties and n-grams change within a round.
PROMPT = (1, 2, 1)
RULES = ("token", "block")


def table(vocab: int, seed: int, **options: Any) -> TableModel:
    return TableModel.random(vocab, seed=seed, dtype=np.float64, **options)


def allowed(new: tuple[int, ...]) -> set[int] | None:
    """Runs of prefixes with one id left, free prefixes, and some in between."""
    if new[-1:] == (1,):
        return {2}
    if new[-1:] == (2,):
        return {0} if len(new) % 2 else {0, 3}
    return {0, 1, 3} if len(new) < 2 else None


PARAMS: dict[str, SamplingParams] = {
    "temperature": SamplingParams(0.7),
    "top-k": SamplingParams(1.3, top_k=2),
    "top-p": SamplingParams(1.0, top_p=0.7),
    "min-p": SamplingParams(1.2, min_p=0.3),
    "typical-p": SamplingParams(1.1, typical_p=0.6),
    "all cuts": SamplingParams(2.0, top_k=3, top_p=0.97, min_p=0.05, typical_p=0.9),
    "repetition": SamplingParams(1.0, repetition_penalty=1.8),
    "repetition wanted": SamplingParams(1.0, repetition_penalty=0.6),
    "presence": SamplingParams(1.0, presence_penalty=1.5),
    "frequency": SamplingParams(1.0, frequency_penalty=1.2),
    "frequency wanted": SamplingParams(1.0, frequency_penalty=-2.0),
    "no repeated pair": SamplingParams(1.0, no_repeat_ngram_size=2),
    "no repeated triple": SamplingParams(1.0, no_repeat_ngram_size=3),
    "bias": SamplingParams(1.0, logit_bias={0: 1.5, 2: -2.0}),
    "banned": SamplingParams(1.0, banned_token_ids=(0,)),
    "forced": SamplingParams(1.0, forced_token_ids=(3, 3)),
}
FOUR: dict[str, Setting] = {name: Setting(params) for name, params in PARAMS.items()}
FOUR |= {
    "ends": Setting(SamplingParams(1.0), frozenset({0, 2})),
    "min new tokens": Setting(SamplingParams(1.0, min_new_tokens=2), frozenset({0, 3})),
    "constraint": Setting(SamplingParams(1.0), allowed=allowed),
    "constraint, ends": Setting(SamplingParams(0.8, min_new_tokens=1), frozenset({3}), allowed),
    "penalties and cuts": Setting(
        SamplingParams(
            1.4,
            top_p=0.95,
            min_p=0.04,
            typical_p=0.9,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=-0.7,
            no_repeat_ngram_size=3,
            logit_bias={3: 0.5},
        )
    ),
    "constraint and penalties": Setting(
        SamplingParams(1.0, top_k=2, repetition_penalty=1.5, frequency_penalty=1.0, forced_token_ids=(0,)),
        allowed=allowed,
    ),
    "everything": Setting(
        SamplingParams(
            1.7,
            top_k=3,
            top_p=0.98,
            min_p=0.02,
            typical_p=0.98,
            repetition_penalty=0.8,
            presence_penalty=-0.5,
            frequency_penalty=0.9,
            no_repeat_ngram_size=4,
            logit_bias={0: -0.5, 1: 0.5},
            banned_token_ids=(2,),
            forced_token_ids=(3,),
            min_new_tokens=2,
        ),
        frozenset({0}),
        lambda new: {0, 1, 3} if len(new) == 1 else None,
    ),
    "greedy": Setting(SamplingParams()),
    "greedy, penalties": Setting(SamplingParams(repetition_penalty=1.5, frequency_penalty=1.5, no_repeat_ngram_size=3)),
    "greedy, constraint": Setting(SamplingParams(presence_penalty=2.0), frozenset({3}), allowed),
}


class TableDrafter(ScriptedDrafter):
    """Draws from a table by the naive distribution: a drafter that shares no code with the one under test.

    `fixed` says behind which texts the most probable token is proposed without a draw; `stops`, behind which texts
    nothing is proposed any more. Both know only what is known before the next token is drawn.
    """

    def __init__(
        self,
        model: TableModel,
        params: SamplingParams,
        *,
        fixed: Callable[[Sequence[int]], bool] = lambda text: False,
        stops: Callable[[Sequence[int]], bool] = lambda text: False,
    ) -> None:
        super().__init__([])
        self._model, self._params, self._fixed, self._stops = model, params, fixed, stops

    def propose(self, tokens: Sequence[int], num_draft_tokens: int, chance: Chance) -> Draft:
        text = list(tokens)
        rows: list[DraftProbs] = []
        while len(rows) < num_draft_tokens and not self._stops(text):
            probs = naive_distribution_of(self._model.next_logits(text).tolist(), self._params)
            rows.append(None if self._fixed(text) else probs)
            text.append(
                int(probs.argmax())
                if rows[-1] is None
                else chance.draw(probs, len(text), Purpose.DRAFT, round_start=len(tokens))
            )
        return Draft(tuple(text[len(tokens) :]), rows)


class ReducedTable(TableModel):
    """Takes every id in and has logits for some of them: the model of a reduced draft vocabulary."""

    def __init__(self, table: TableModel, logit_ids: Sequence[int]) -> None:
        super().__init__(np.zeros((len(logit_ids),) * 2))
        self._whole, self._logit_ids = table, np.array(logit_ids)

    @property
    def logit_ids(self) -> NDArray[np.int64]:
        return self._logit_ids

    def new_cache(self, max_length: int) -> TableCache:
        return self._whole.new_cache(max_length)

    def forward(self, tokens: Sequence[int], cache: KVCache, num_logits: int) -> NDArray[np.float32]:
        return self._whole.forward(tokens, cache, num_logits)[:, self._logit_ids]


def _reduced(vocab: int, seed: int) -> dict[str, Any]:
    logit_ids = [vocab - 1, 0, 2, 1, 3][: vocab - 1]
    return {"draft": ReducedTable(table(vocab, seed), logit_ids)}


def _even(text: Sequence[int]) -> bool:
    return sum(text) % 2 == 0


# What `enumerate_law` needs to draft in this way for a vocabulary and a seed.
DRAFTS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "same settings": lambda vocab, seed: {"draft": table(vocab, seed)},
    # Case 1: a greedy draft under a sampling target.
    "greedy": lambda vocab, seed: {"draft": table(vocab, seed), "draft_sampling": SamplingParams()},
    # Case 32: a draft at its own temperature and truncation.
    "own temperature": lambda vocab, seed: {
        "draft": table(vocab, seed),
        "draft_sampling": SamplingParams(2.0, top_k=3, top_p=0.9),
    },
    "own penalties": lambda vocab, seed: {
        "draft": table(vocab, seed),
        "draft_sampling": SamplingParams(1.5, repetition_penalty=0.7, frequency_penalty=-1.0, min_p=0.05),
    },
    "script": lambda vocab, seed: {"new_drafter": lambda: ScriptedDrafter([1, 2, 1, 0, 2, 1, 2, 1])},
    "partly fixed": lambda vocab, seed: {
        "new_drafter": lambda: TableDrafter(table(vocab, seed), SamplingParams(1.2), fixed=_even)
    },
    "stops early": lambda vocab, seed: {
        "new_drafter": lambda: TableDrafter(table(vocab, seed), SamplingParams(0.9), stops=_even)
    },
    # Case 17: a draft model that is narrower than the common vocabulary.
    "narrower": lambda vocab, seed: {"draft": table(vocab - 1, seed)},
    "reduced vocabulary": _reduced,
}


def law_of(
    target: TableModel, num_tokens: int, setting: Setting, *, prompt: Sequence[int] = PROMPT, **drafts: Any
) -> Law:
    """The law that paceline gives to the next tokens; without drafts, by plain decoding."""
    return enumerate_law(
        target,
        prompt,
        num_tokens,
        setting.params,
        constraint=constraint_of(setting, drafts.get("vocab_size") or target.vocab_size),
        end_token_ids=setting.ends,
        **drafts,
    )


def decoder_law(
    target: TableModel, draft: TableModel | None, setting: Setting, prompt: Sequence[int] = PROMPT, **arguments: Any
) -> Law:
    """By the decoder's own loop, with live caches over several rounds."""
    decoder = SpeculativeDecoder(target, draft, None, target.vocab_size, tuple(setting.ends))

    def run(chance: Chance) -> tuple[int, ...]:
        generation = decoder.generate(
            prompt, setting.params, constraint=constraint_of(setting, target.vocab_size), **arguments
        )
        generation._chance = chance
        return tuple(token for step in generation for token in step.token_ids)

    law: Law = {}
    for text, probability in every_way(run):
        law[text] = law.get(text, 0) + probability
    return law
