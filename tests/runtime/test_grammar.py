"""Grammars as constraints: what comes out fits, its law is plain decoding's, and a mask depends on its text alone."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

import paceline
from paceline.bundle import TokenizerEntry
from paceline.decoder import SpeculativeDecoder
from paceline.errors import InstallationError, InvalidInputError, NoTokenLeftError
from paceline.grammar import GrammarConstraint
from paceline.sampling import SamplingParams
from paceline.testing import ScriptedDrafter, TableModel, enumerate_law
from paceline.tokenizer import Tokenizer

from .conftest import byte_level_tokenizer

MERGES = (("a", "b"), ("ab", "c"), ("0", "1"), ('"', ":"), ('"', "}"), ("n", "a"), ("m", "e"), ("na", "me"))
TOKENIZER = byte_level_tokenizer(MERGES)
VOCAB = TOKENIZER.vocab_size
(EOS,) = TOKENIZER.eos_token_ids
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["abc", "ab", "c"]},
        "n": {"type": "integer", "minimum": -5, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}
# A random model would write white space for ever.
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}


DRAFTS: dict[str, dict[str, Any]] = {
    "model": {},
    "greedy model": {"draft_sampling": SamplingParams()},
    # It leaves the grammar, and goes on behind an end.
    "script": {"new_drafter": lambda: ScriptedDrafter([*ids("pabx01"), EOS, EOS])},
    "wild script": {"new_drafter": lambda: ScriptedDrafter([*ids("p01"), EOS, *ids("zz")])},
}


def decoder(seed: int = 0) -> SpeculativeDecoder:
    target, draft = (TableModel.random(VOCAB, seed=seed + i, order=1, max_length=160) for i in (0, 100))
    return SpeculativeDecoder(target, draft, TOKENIZER, VOCAB, TOKENIZER.eos_token_ids)


def allowed(constraint: GrammarConstraint, text: Sequence[int]) -> list[int]:
    mask = constraint(text)
    assert mask is not None
    assert mask.shape == (-(-VOCAB // 32),)
    assert mask.dtype == np.uint32
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def check(value: Any) -> None:
    """What SCHEMA asks."""
    assert set(value) - {"ok"} == {"name", "n", "tags"}
    assert value["name"] in ("abc", "ab", "c")
    assert isinstance(value["n"], int)
    assert -5 <= value["n"] <= 120
    assert len(value["tags"]) <= 2
    assert all(isinstance(tag, str) and len(tag) <= 2 for tag in value["tags"])
    assert isinstance(value.get("ok", True), bool)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_every_sampled_text_fits_its_schema(num_draft_tokens: int, verification: str) -> None:
    constraint = GrammarConstraint.from_json_schema(TOKENIZER, COMPACT)
    texts = set()
    for seed in range(25):
        generation = decoder().generate(
            "x",
            SamplingParams(temperature=1.0, seed=seed),
            num_draft_tokens=num_draft_tokens,
            max_new_tokens=150,
            constraint=constraint,
            verification=verification,
        )
        list(generation)
        assert generation.finish_reason == "stop"
        check(json.loads(generation.text))
        texts.add(generation.text)
    assert len(texts) > 20


def test_regular_expressions_and_grammars_hold_too() -> None:
    pattern = r"(abc|x-){2,3}[0-9]{2}"
    lark = 'start: word ("," word)*\nword: "abc" | NUMBER\nNUMBER: /[0-9]{1,2}/'
    for seed in range(10):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        for constraint, expected in (
            (GrammarConstraint.from_regex(TOKENIZER, pattern), pattern),
            (GrammarConstraint(TOKENIZER, lark), r"(abc|[0-9]{1,2})(,(abc|[0-9]{1,2}))*"),
        ):
            generation = decoder(seed).generate("x", sampling, max_new_tokens=100, constraint=constraint)
            list(generation)
            if generation.finish_reason == "stop":
                assert re.fullmatch(expected, generation.text)


def test_any_json_object() -> None:
    constraint = GrammarConstraint.json_object(TOKENIZER)
    assert [TOKENIZER.decode([token]) for token in allowed(constraint, ())] == ["{"]
    assert allowed(constraint, ids('{"a": [1, {"b": null}]}')) == [EOS]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_the_law_is_that_of_plain_decoding(num_draft_tokens: int, rule: str, drafts: str) -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "(abc|ab)?x?01?(z|ab)?")
    target, draft = (TableModel.random(VOCAB, seed=seed, order=1, dtype=np.float64) for seed in (1, 2))
    prompt = ids("p")
    options = DRAFTS[drafts]
    common: dict[str, Any] = {"constraint": constraint, "end_token_ids": frozenset([EOS])}
    plain = enumerate_law(target, prompt, 4, SamplingParams(1.0), **common)
    law = enumerate_law(
        target,
        prompt,
        4,
        SamplingParams(1.0),
        num_draft_tokens=num_draft_tokens,
        draft=draft,
        rule=rule,
        **common,
        **options,
    )
    assert len(plain) > 20
    assert sum(plain.values()) == pytest.approx(1, abs=1e-12)
    assert sum(abs(plain.get(key, 0) - law.get(key, 0)) for key in plain.keys() | law.keys()) / 2 < 1e-9
    texts = {TOKENIZER.decode(key[:-1]) for key in plain if key[-1] == EOS}
    assert texts
    assert all(re.fullmatch("(abc|ab)?x?01?(z|ab)?", text) for text in texts)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_greedy_speculative_is_greedy_plain(num_draft_tokens: int) -> None:
    for seed in range(5):
        texts = []
        for k in (0, num_draft_tokens):
            constraint = GrammarConstraint.from_json_schema(TOKENIZER, COMPACT)
            generation = decoder(seed).generate("x", num_draft_tokens=k, max_new_tokens=150, constraint=constraint)
            list(generation)
            texts.append(generation.token_ids)
        assert texts[0] == texts[1]
        check(json.loads(TOKENIZER.decode(texts[0])))


def test_forced_tokens_need_no_draft_and_no_pass_of_their_own() -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "(abc){8}[xyz](abc){8}")
    generation = decoder().generate("p", SamplingParams(1.0, seed=1), num_draft_tokens=3, constraint=constraint)
    steps = list(generation)
    assert generation.token_ids[:8] == generation.token_ids[9:17] == tuple(ids("abc")) * 8
    assert generation.stats.new_tokens == 18  # with the end token
    assert len(steps) == 2
    assert [len(step.token_ids) for step in steps] == [9, 9]
    assert generation.stats.proposed <= 1  # the end token at most


def test_the_end_is_allowed_where_the_text_is_complete_and_nowhere_else() -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "[0-9]{2,3}")
    assert EOS not in allowed(constraint, ())
    assert EOS not in allowed(constraint, ids("1"))
    assert EOS in allowed(constraint, ids("12"))
    assert len(allowed(constraint, ids("12"))) == 11
    assert allowed(constraint, ids("123")) == [EOS]


def test_every_end_token_may_end_a_text() -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer(special=("<eos>", "<end>", "<other>")).to_json())
    two = Tokenizer(backend, TokenizerEntry(259, bos_token_id=None, eos_token_ids=(256, 257), pad_token_id=None))
    constraint = GrammarConstraint.from_regex(two, "a")
    mask = constraint(two.encode("a"))
    assert mask is not None
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [256, 257]


@pytest.mark.parametrize("compact", [True, False])
def test_prefixes_in_any_order_have_the_masks_that_fresh_matchers_give(compact: bool) -> None:
    def new() -> GrammarConstraint:
        return GrammarConstraint.from_json_schema(TOKENIZER, COMPACT if compact else SCHEMA)

    rng = random.Random(7)
    prefixes: set[tuple[int, ...]] = set()
    walker = new()
    for _ in range(25):
        text: tuple[int, ...] = ()
        for _ in range(40):
            prefixes.add(text)
            if (token := rng.choice(allowed(walker, text))) == EOS:
                break
            text = (*text, token)
    texts = sorted(prefixes)
    fresh = {text: allowed(new(), text) for text in texts}
    jumping = new()
    for _ in range(3000):
        text = rng.choice(texts)
        assert allowed(jumping, text) == fresh[text]
        jumping((*text, rng.randrange(VOCAB)))  # drafts go anywhere


def test_texts_that_left_the_grammar_or_ended_are_not_judged() -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "[0-9]+")
    for text in (ids("x"), ids("1x1"), [*ids("1"), EOS], [*ids("1"), EOS, EOS]):
        assert constraint(text) is None
    assert EOS in allowed(constraint, ids("1"))


def test_a_copy_allows_the_same_and_remembers_for_itself() -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "a[0-9]{3}")
    ids = TOKENIZER.encode("a12")
    constraint(ids)
    copy = constraint.copy()
    assert not copy._reached
    for end in (3, 0, 2):
        np.testing.assert_array_equal(copy(ids[:end]), constraint(ids[:end]))


def test_threads_may_share_a_constraint() -> None:
    constraint = GrammarConstraint.from_json_schema(TOKENIZER, COMPACT)

    def text(seed: int) -> tuple[int, ...]:
        generation = decoder().generate("x", SamplingParams(1.0, seed=seed), max_new_tokens=150, constraint=constraint)
        list(generation)
        return generation.token_ids

    alone = [text(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(8))) == alone


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"x-guidance": 5}, "x-guidance holds 5"),
        ({"x-guidance": None}, "x-guidance holds None"),
        ({"x-guidance": {"whitespace": True}}, "unknown field `whitespace`"),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "oneOf"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "https://example.org/schema"}, "fetch"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "strin"}, "strin"),
        (False, "object"),
        ("[1]", "object"),
        ("{", "no JSON"),
        ({"const": {1, 2}}, "no JSON"),
        ({"const": float("nan")}, "no JSON"),
    ],
)
def test_a_schema_that_cannot_be_honoured_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as caught:
        GrammarConstraint.from_json_schema(TOKENIZER, schema)
    assert "\n" not in str(caught.value)


def test_a_schema_may_be_text_or_true() -> None:
    for schema in (json.dumps(COMPACT), COMPACT):
        constraint = GrammarConstraint.from_json_schema(TOKENIZER, schema)
        assert allowed(constraint, ids('{"name":')) == ids('"')
    assert allowed(GrammarConstraint.from_json_schema(TOKENIZER, True), ids("null")) == [EOS]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        ("[a&&b]", "behind 0 new tokens"),
    ],
)
def test_a_pattern_that_cannot_be_honoured_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as caught:
        GrammarConstraint.from_regex(TOKENIZER, pattern)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: foo", "foo"),
        ("", "Empty"),
        ("start: <nope>", "nope"),
        ('start: a\na[temperature=0.7]: "a"', "temperature"),
        ('start: "\ud800"', "surrogate"),
        (3, "text"),
    ],
)
def test_a_grammar_that_cannot_be_honoured_is_refused(grammar: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        GrammarConstraint(TOKENIZER, grammar)


def test_a_grammar_that_leads_nowhere_says_where() -> None:
    constraint = GrammarConstraint(TOKENIZER, 'start: "a" ("b" /[a&&b]/ | "c")')
    with pytest.raises(InvalidInputError, match="behind 2 new tokens"):
        constraint([*ids("a"), *ids("b")])
    assert allowed(constraint, [*ids("a"), *ids("c")]) == [EOS]


def test_knobs_against_the_grammar_leave_no_token() -> None:
    constraint = GrammarConstraint.from_regex(TOKENIZER, "[01]")
    for sampling in (SamplingParams(min_new_tokens=5), SamplingParams(forced_token_ids=tuple(ids("x")))):
        with pytest.raises(NoTokenLeftError, match="position"):
            list(decoder().generate("p", sampling, constraint=constraint))


def test_a_tokenizer_without_an_end_is_refused() -> None:
    endless = Tokenizer(
        tokenizers.Tokenizer.from_str(TOKENIZER.to_json()),
        TokenizerEntry(VOCAB, bos_token_id=None, eos_token_ids=(), pad_token_id=None),
    )
    with pytest.raises(InvalidInputError, match="end token"):
        GrammarConstraint.from_regex(endless, "a")
    with pytest.raises(InvalidInputError, match="Tokenizer"):
        GrammarConstraint.from_regex(None, "a")  # type: ignore[arg-type]


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    tokenizer = Tokenizer(words, TokenizerEntry(2, bos_token_id=None, eos_token_ids=(1,), pad_token_id=None))
    with pytest.raises(InvalidInputError, match="cannot read this tokenizer"):
        GrammarConstraint.from_regex(tokenizer, "a")


def test_a_missing_llguidance_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (GrammarConstraint, GrammarConstraint.from_regex, GrammarConstraint.from_json_schema):
        with pytest.raises(InstallationError, match=re.escape("pip install 'paceline[grammar]'")):
            make(TOKENIZER, "{}")


def test_a_tokenizer_is_read_once_and_not_kept_alive() -> None:
    from paceline.grammar import _llguidance_tokenizer

    tokenizer = byte_level_tokenizer()
    assert _llguidance_tokenizer(tokenizer) is _llguidance_tokenizer(tokenizer)
    gone = weakref.ref(tokenizer)
    GrammarConstraint.from_regex(tokenizer, "a")
    del tokenizer
    gc.collect()
    assert gone() is None


def test_a_real_model_writes_what_the_schema_asks(smol_bundle: Path) -> None:
    smol = paceline.load(smol_bundle)
    assert smol.tokenizer is not None
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
            "country": {"enum": ["France", "Italy", "Spain"]},
        },
        "required": ["city", "inhabitants", "country"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    constraint = GrammarConstraint.from_json_schema(smol.tokenizer, schema)
    texts = []
    for k in (0, 3):
        generation = smol.generate("Rome as JSON:\n", num_draft_tokens=k, max_new_tokens=80, constraint=constraint)
        list(generation)
        assert generation.finish_reason == "stop"
        texts.append(generation.text)
    assert texts[0] == texts[1]
    value = json.loads(texts[0])
    assert list(value) == ["city", "inhabitants", "country"]
    assert value["country"] in ("France", "Italy", "Spain")
    assert generation.stats.rounds < generation.stats.new_tokens - 1
