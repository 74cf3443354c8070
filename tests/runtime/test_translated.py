"""Drafts with a tokenizer of their own: the law of the text, its equality to plain decoding's, caches and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.drafters import TextDrafter
from paceline.errors import InvalidInputError
from paceline.prefix_cache import PrefixCache
from paceline.retokenizer import Retokenizer
from paceline.sampling import SamplingParams
from paceline.shared_ids import find_shared_ids
from paceline.testing import TableModel, enumerate_law
from paceline.tokenizer import Tokenizer
from paceline.translated import TranslatedModel

from .reference import total_variation
from .vocabularies import BYTES, KINDS, byte_level, sentence_piece, word_piece

# A handful of ids each, so that laws can be enumerated: é is cut into its two bytes by some of them.
E_ACUTE = [BYTES[byte] for byte in "é".encode()]
SMALL: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level(("Ġ a",), alphabet=("a", "Ġ", "Ã", "©")),
    "byte-level, added": lambda: byte_level((), alphabet=("a", "Ã", "©"), special=("<end>",), added=(" a",)),
    "byte-level, merged": lambda: byte_level(("Ã ©", "a Ã©"), alphabet=("a", "Ġ", "Ã", "©")),
    "sentencepiece": lambda: sentence_piece(("▁a",), letters="aé", fallback=E_ACUTE),
    "wordpiece": lambda: word_piece_of_letters(),
}


def word_piece_of_letters() -> Tokenizer:
    return word_piece(("a", "é", "##a"))


def pair(target: Tokenizer, draft: Tokenizer, *, seed: int, method: str = "intersection", **options: Any) -> Any:
    """A target's table and a draft's, which reads and drafts the target's ids."""
    pairs = find_shared_ids(target, draft, ends=(target.eos_token_ids[0], draft.eos_token_ids[0])).astype(np.int64)
    ours = TableModel.random(target.vocab_size, seed=seed, dtype=np.float64, **options)
    theirs = TableModel.random(draft.vocab_size, seed=seed + 50, dtype=np.float64, **options)
    return ours, TranslatedModel(theirs, Retokenizer(target, draft, pairs), method)  # type: ignore[arg-type]


def sampled(target: Tokenizer, **options: Any) -> SamplingParams:
    """Without the ids that no text needs: fewer ways to enumerate."""
    useless = [id for id in target.added_tokens.values() if id not in target.eos_token_ids and target.is_special(id)]
    return SamplingParams(**{"temperature": 0.9, "banned_token_ids": tuple(useless[:4]), **options})


LAWS = [
    ("byte-level", "byte-level, merged"),
    ("byte-level", "byte-level, added"),
    ("byte-level", "sentencepiece"),
    ("byte-level", "wordpiece"),
    ("byte-level, merged", "byte-level"),
    ("byte-level, added", "byte-level"),
    ("sentencepiece", "byte-level"),
    ("sentencepiece", "byte-level, merged"),
]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(("target", "draft"), LAWS)
def test_the_law_is_the_targets_by_intersection(target: str, draft: str, rule: str) -> None:
    ours = SMALL[target]()
    model, drafts = pair(ours, SMALL[draft](), seed=len(target) + len(draft))
    assert 2 <= drafts.vocab_size < max(model.vocab_size, drafts.inner.vocab_size)
    # Two drafted tokens in a round where it is quick enough.
    depth = 3 if rule == "block" and (target, draft) in LAWS[::3] else 2
    prompt = ours.encode("aé", add_special_tokens=False)
    for params in (sampled(ours), sampled(ours, top_k=3, repetition_penalty=1.3)):
        expected = enumerate_law(model, prompt, depth, params)
        law = enumerate_law(model, prompt, depth, params, draft=drafts, num_draft_tokens=2, rule=rule)
        assert sum(law.values()) == pytest.approx(1, abs=1e-12)
        assert total_variation(law, expected) < 1e-9


@pytest.mark.parametrize(("target", "draft"), LAWS)
def test_the_law_is_the_targets_by_text(target: str, draft: str) -> None:
    ours = SMALL[target]()
    model, drafts = pair(ours, SMALL[draft](), seed=7 + len(draft), method="text")
    prompt = ours.encode("aé", add_special_tokens=False)
    params = sampled(ours)
    proposed = []

    def new_drafter() -> TextDrafter:
        drafter = TextDrafter(drafts, drafts.new_cache(32))
        propose = drafter.propose

        def noted(*args: Any) -> Any:
            proposed.append(found := propose(*args))
            return found

        drafter.propose = noted  # type: ignore[assignment, method-assign, unused-ignore]
        return drafter

    expected = enumerate_law(model, prompt, 3, params)
    law = enumerate_law(model, prompt, 3, params, new_drafter=new_drafter, num_draft_tokens=2)
    assert total_variation(law, expected) < 1e-9
    # The small target cannot spell the words of the wordpiece vocabulary, so what it would say is no proposal.
    assert any(draft.tokens for draft in proposed) == (draft != "wordpiece")


def test_a_draft_that_claims_another_distribution_of_the_shared_ids_would_be_seen() -> None:
    ours = SMALL["byte-level"]()
    model, drafts = pair(ours, SMALL["sentencepiece"](), seed=3)

    class Colder:
        def __init__(self) -> None:
            self.seconds = 0.0
            self.cache = drafts.new_cache(32)

        def prefill(self, tokens: Any) -> None: ...

        def rollback(self, length: int) -> None:
            self.cache.rollback(min(length, self.cache.length))

        def propose(self, tokens: Any, num_draft_tokens: int, chance: Any) -> Any:
            from paceline.streams import Purpose
            from paceline.verify import Draft

            self.cache.extend(tokens[self.cache.length :])
            logits = self.cache.forward(self.cache.catch_up())
            shared = np.exp(logits - logits.max())[drafts._columns]
            row = np.zeros(model.vocab_size)
            row[drafts.logit_ids] = shared / shared.sum()
            token = chance.draw(row, len(tokens), Purpose.DRAFT, round_start=len(tokens))
            # What it claims is colder: as if the logits had been cut to the shared ids at another temperature.
            claimed = row**1.5
            return Draft((token,), [claimed / claimed.sum()])

    params, prompt = sampled(ours), ours.encode("aé")
    expected = enumerate_law(model, prompt, 2, params)
    law = enumerate_law(model, prompt, 2, params, new_drafter=Colder, num_draft_tokens=1)
    assert total_variation(law, expected) > 1e-3


def decoder_of(target: Tokenizer, draft: Tokenizer, method: str, **options: Any) -> SpeculativeDecoder:
    model, drafts = pair(target, draft, seed=11, method=method, order=1, max_length=400)
    return SpeculativeDecoder(model, drafts, target, target.vocab_size, **options)


@pytest.mark.parametrize("method", ["intersection", "text"])
@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_greedy_text_is_plain_decodings(target: str, draft: str, method: str) -> None:
    ours = KINDS[target]()
    decoder = decoder_of(ours, KINDS[draft](), method)
    prompt = ours.encode("the hat, é 😀 a cat")
    plain = decoder.generate(prompt, max_new_tokens=30, num_draft_tokens=0)
    list(plain)
    for k in range(1, 9):
        generation = decoder.generate(prompt, max_new_tokens=30, num_draft_tokens=k)
        list(generation)
        assert generation.token_ids == plain.token_ids
    planned = decoder.generate(prompt, max_new_tokens=30)
    list(planned)
    assert planned.token_ids == plain.token_ids


@pytest.mark.parametrize("method", ["intersection", "text"])
def test_a_draft_that_knows_the_text_is_accepted(method: str) -> None:
    """Target and draft spell one text, each in pieces of its own: a cycle of words, with characters cut in two."""
    text = "the hat, é😀 a cat. " * 6
    ours, theirs = byte_level(), sentence_piece()
    _, drafts = pair(ours, theirs, seed=0, method=method, order=1, max_length=400)

    def cycle(tokenizer: Tokenizer) -> TableModel:
        return _Spelling(tokenizer.encode(text, add_special_tokens=False), tokenizer)  # type: ignore[return-value]

    target = cycle(ours)
    drafts = TranslatedModel(cycle(theirs), drafts.retokenizer, method)  # type: ignore[arg-type]
    decoder = SpeculativeDecoder(target, drafts, ours, ours.vocab_size)
    ids = ours.encode(text)
    generation = decoder.generate(ids[:9], max_new_tokens=len(ids) - 9, num_draft_tokens=4)
    list(generation)
    assert generation.text == ours.decode(ids[9:])
    assert (generation.stats.acceptance_rate or 0) > 0.6
    assert generation.stats.accepted > 20


class _Spelling:
    """Writes one text, whatever it was fed: the token that stands next in it."""

    def __init__(self, ids: list[int], tokenizer: Tokenizer) -> None:
        self._ids = [*tokenizer.opening_ids, *ids] if tokenizer.opening_ids else ids
        self.vocab_size = tokenizer.vocab_size
        self.logit_ids = None
        self.max_length = 400

    def new_cache(self, max_length: int) -> Any:
        from paceline.kv_cache import KVCache

        return KVCache(max_length)

    def forward(self, tokens: Any, cache: Any, num_logits: int) -> np.ndarray:
        cache.advance(len(tokens))
        rows = np.zeros((num_logits, self.vocab_size), np.float32)
        for row, place in enumerate(range(cache.length - num_logits + 1, cache.length + 1)):
            rows[row, self._ids[place] if place < len(self._ids) else 0] = 20
        return rows


@pytest.mark.parametrize("draft", KINDS)
def test_a_live_cache_predicts_as_a_fresh_one(draft: str) -> None:
    ours = byte_level()
    _, drafts = pair(ours, KINDS[draft](), seed=5, order=2 if draft == "wordpiece" else 1, max_length=400)
    rng = np.random.default_rng(1)
    cache, tokens = drafts.new_cache(200), ours.encode("the hat, é 😀 a cat. " * 3)
    drafts.forward(tokens, cache, 1)
    for _ in range(60):
        length = int(rng.integers(max(len(tokens) - 6, 1), len(tokens) + 1))
        cache.rollback(length)
        tokens = [*tokens[:length], *rng.integers(0, 256, rng.integers(1, 5)).tolist()][:150]
        if cache.length == len(tokens):
            cache.rollback(len(tokens) - 1)
        count = len(tokens) - cache.length
        rows = drafts.forward(tokens[cache.length :], cache, count).copy()
        fresh = [
            drafts.forward(tokens[:end], drafts.new_cache(200), 1)[0]
            for end in range(len(tokens) - count + 1, len(tokens) + 1)
        ]
        assert np.array_equal(rows, np.stack(fresh))
        assert cache.length == len(tokens)


def test_the_drafts_own_cache_is_kept_where_the_text_is() -> None:
    ours = byte_level()
    _, drafts = pair(ours, sentence_piece(), seed=5, order=1, max_length=400)
    cache = drafts.new_cache(150)
    ids = ours.encode("the hat, a cat. " * 8)
    drafts.forward(ids, cache, 1)
    fed: list[int] = []
    inner = drafts.inner.forward

    def forward(tokens: list[int], *rest: Any) -> Any:
        fed.append(len(tokens))
        return inner(tokens, *rest)

    drafts.inner.forward = forward
    for token in ours.encode("the cat the"):
        drafts.forward([token], cache, 1)
    assert sum(fed) < 20
    cache.rollback(len(ids))
    drafts.forward(ours.encode(" a"), cache, 1)
    assert fed[-1] <= 3


@pytest.mark.parametrize("method", ["intersection", "text"])
def test_a_text_that_outgrows_the_drafts_cache_goes_on_plainly(method: str) -> None:
    ours = byte_level()
    model, drafts = pair(ours, word_piece(), seed=2, method=method, order=1, max_length=400)
    drafts.inner._max_length = 40  # its pieces are letters, mostly
    decoder = SpeculativeDecoder(model, drafts, ours, ours.vocab_size)
    for prompt in ("the hat", "the other hat and a cat. " * 4):
        ids = ours.encode(prompt)
        plain = decoder.generate(ids, max_new_tokens=60, num_draft_tokens=0)
        list(plain)
        generation = decoder.generate(ids, max_new_tokens=60, num_draft_tokens=3)
        list(generation)
        assert generation.token_ids == plain.token_ids
    assert generation.stats.proposed == 0


def test_a_prefix_cache_serves_the_draft_in_its_own_ids() -> None:
    ours = byte_level()
    decoder = decoder_of(ours, sentence_piece(), "intersection", prefixes=PrefixCache(10_000))
    plain = decoder_of(ours, sentence_piece(), "intersection")
    prompt = ours.encode("the hat, a cat. and then the other hats")
    params = SamplingParams(temperature=1.0, seed=4)
    texts = []
    for one in (decoder, decoder, plain):
        generation = one.generate(prompt, params, max_new_tokens=12, num_draft_tokens=3)
        list(generation)
        texts.append(generation.token_ids)
        cached = generation.stats.cached_tokens
        assert cached == (len(prompt) - 1 if len(texts) == 2 else 0)
    assert texts[0] == texts[1] == texts[2]


def test_a_seed_gives_the_same_text_again_by_both_methods() -> None:
    ours = byte_level()
    for method in ("intersection", "text"):
        decoder = decoder_of(ours, sentence_piece(), method)
        texts = set()
        for _ in range(2):
            generation = decoder.generate("the hat", SamplingParams(temperature=1.0, seed=3), max_new_tokens=20)
            list(generation)
            texts.add(generation.token_ids)
        assert len(texts) == 1


def test_text_leaves_penalties_masks_and_draws_to_the_intersection() -> None:
    ours = byte_level()
    decoder = decoder_of(ours, sentence_piece(), "text")
    hot = SamplingParams(temperature=1.0, seed=3)
    for sampling, drawn in (
        (SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2), None),
        (hot, SamplingParams(temperature=0.7)),
    ):
        generation = decoder.generate("the hat", sampling, max_new_tokens=20, num_draft_tokens=2, draft_sampling=drawn)
        list(generation)
        assert generation.stats.proposed > 0


def test_tokenizers_that_share_no_logit_are_refused() -> None:
    ours = byte_level()
    _, drafts = pair(ours, sentence_piece(), seed=1, order=1)
    drafts.inner.__class__ = type("Cut", (TableModel,), {"logit_ids": np.array([0]), "vocab_size": 1})
    with pytest.raises(InvalidInputError, match="shares no id"):
        TranslatedModel(drafts.inner, drafts.retokenizer)


def test_a_cache_of_another_model_is_refused() -> None:
    _, drafts = pair(byte_level(), sentence_piece(), seed=1, order=1)
    _, others = pair(byte_level(), sentence_piece(), seed=1, order=1)
    with pytest.raises(InvalidInputError, match="made by another model"):
        drafts.forward([1], others.new_cache(8), 1)
    with pytest.raises(InvalidInputError, match="exceeds"):
        drafts.new_cache(65)
