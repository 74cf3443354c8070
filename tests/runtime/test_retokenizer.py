from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.retokenizer import RetokenizedText, Retokenizer, split_characters
from paceline.shared_ids import find_shared_ids
from paceline.tokenizer import Tokenizer

from .vocabularies import KINDS, byte_level, sentence_piece, word_piece

TEXT = "the hat, a cat. and then the other hats: é 😀 the end"


def between(target: Tokenizer, draft: Tokenizer) -> Retokenizer:
    return Retokenizer(target, draft, find_shared_ids(target, draft).astype(np.int64))


def whole(text: RetokenizedText) -> list[int]:
    text.forget(0)
    same, ids = text.take()
    assert same == 0
    return ids


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_the_drafts_ids_are_what_its_tokenizer_makes_of_the_text(target: str, draft: str) -> None:
    ours, theirs = KINDS[target](), KINDS[draft]()
    text = RetokenizedText(between(ours, theirs))
    ids = ours.encode(TEXT, add_special_tokens=False)
    text.extend(ids)
    if target != "wordpiece":  # which cannot give back the text as it was
        assert text.whole == TEXT
    assert whole(text) == theirs.opening_ids + theirs.encode(text.whole, add_special_tokens=False)
    assert text.num_tokens == len(ids)


def test_what_the_draft_puts_in_front_comes_once() -> None:
    ours = byte_level(special=("<end>", "<s>"))
    text = RetokenizedText(between(ours, sentence_piece()))
    assert sentence_piece().opening_ids == [1]
    assert word_piece().opening_ids == [2]
    text.extend(ours.encode("<s>the"))
    assert whole(text)[:2] == [1, sentence_piece().encode("the", add_special_tokens=False)[0]]
    # A first BOS that the draft does not have is left out, and so is the space that its decoder drops.
    theirs = sentence_piece()
    text = RetokenizedText(between(theirs, byte_level()))
    text.extend(theirs.encode("the hat"))
    assert text.whole == "the hat"
    assert whole(text) == byte_level().encode("the hat")


def test_a_special_token_is_written_by_the_drafts_name() -> None:
    ours, theirs = byte_level(special=("<end>", "<|user|>")), byte_level(special=("<eot>", "<|user|>"))
    ends = ours.eos_token_ids[0], theirs.eos_token_ids[0]
    pairs = find_shared_ids(ours, theirs, ends=ends).astype(np.int64)
    text = RetokenizedText(Retokenizer(ours, theirs, pairs))
    text.extend(ours.encode("<|user|>the<end>"))
    assert whole(text) == theirs.encode("<|user|>the<eot>")
    # Another one is spelled out.
    text = RetokenizedText(between(ours, byte_level(special=("<eot>",))))
    text.extend(ours.encode("<|user|>a"))
    assert text.whole == "<|user|>a"


def test_a_character_that_is_cut_is_never_decoded() -> None:
    ours, theirs = byte_level(("ð Ł",)), byte_level(("ð Ł", "ðŁ ĺ", "ðŁĺ Ģ"))
    text = RetokenizedText(between(ours, theirs))
    seen = []
    for token in ours.encode("a😀"):  # a, F0 9F, 98, 80
        text.extend([token])
        seen.append((text.whole, text.half, whole(text)))
    single = [theirs.byte_token(byte) for byte in "😀".encode()]
    a, smile = theirs.encode("a"), theirs.encode("😀")
    assert len(smile) == 1
    assert seen == [
        ("a", b"", a),
        ("a", b"\xf0\x9f", [*a, *single[:2]]),
        ("a", b"\xf0\x9f\x98", [*a, *single[:3]]),
        ("a😀", b"", [*a, *smile]),
    ]
    text.truncate(2)
    assert (text.whole, text.half) == ("a", b"\xf0\x9f")
    assert whole(text) == [*a, *single[:2]]
    # A vocabulary without bytes reads what is whole.
    text = RetokenizedText(between(ours, word_piece()))
    text.extend(ours.encode("a😀")[:2])
    assert whole(text) == [*word_piece().opening_ids, *word_piece().encode("a", add_special_tokens=False)]


def test_bytes_that_are_no_character_are_replaced() -> None:
    assert split_characters(b"a\xff\xf0\x9f") == ("a\ufffd", b"\xf0\x9f")
    assert split_characters("é".encode()) == ("é", b"")


WORDS = st.sampled_from(["the", " the", " a", "an", "  ", "\n", "é", "😀", "hat", ".", "x", "<end>", "你好"])
STEPS = st.lists(st.tuples(st.booleans(), st.lists(WORDS, min_size=1, max_size=12), st.integers(0, 30)), max_size=12)


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", ["byte-level", "sentencepiece"])
@given(steps=STEPS)
@settings(deadline=None, max_examples=40)
def test_a_text_that_grows_and_is_taken_back_is_split_as_a_new_one(
    target: str, draft: str, steps: list[tuple[bool, list[str], int]]
) -> None:
    ours = KINDS[target]()
    by = between(ours, KINDS[draft]())
    text, tokens, known = RetokenizedText(by), list[int](), list[int]()
    for back, words, count in steps:
        if back:
            tokens = tokens[: max(len(tokens) - count, 0)]
            text.truncate(len(tokens))
        new = ours.encode("".join(words), add_special_tokens=False)[: count + 1]  # also within a character
        tokens += new
        text.extend(new)
        if count % 3:
            same, ids = text.take()
            known = known[:same] + ids
            fresh = RetokenizedText(by)
            fresh.extend(tokens)
            assert known == whole(fresh)


def test_only_the_end_of_a_long_text_is_split_again() -> None:
    ours, theirs = byte_level(), sentence_piece()
    by = between(ours, theirs)
    text = RetokenizedText(by)
    text.extend(ours.encode(TEXT * 50))
    before = whole(text)
    asked: list[int] = []
    encode = theirs.encode_spans

    def noted(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        asked.append(len(text))
        return encode(text)

    theirs.encode_spans = noted  # type: ignore[method-assign]
    text.extend(ours.encode(" the"))
    same, ids = text.take()
    assert before[:same] + ids == theirs.encode(TEXT * 50 + " the")
    assert len(before) - same < 5
    assert asked
    assert max(asked) < 200


@pytest.mark.parametrize("target", KINDS)
def test_text_of_the_draft_becomes_the_targets_ids_behind_what_it_has(target: str) -> None:
    ours = KINDS[target]()
    by = between(ours, byte_level())
    assert by.target_ids("the cat", b"", b"") == []
    ids = by.target_ids("the cat", b"", b" and the hats.")
    assert ids is not None
    assert b"".join(by.bytes_of(token) for token in ids) == b" and the hats."
    if target != "wordpiece":
        assert ours.encode("the cat and the hats.", add_special_tokens=False)[-len(ids) :] == ids


def test_where_the_target_would_split_elsewhere_the_new_text_is_split_alone() -> None:
    ours = byte_level()
    by = between(ours, byte_level())
    # The target has written " " and "th" in two tokens; the canonical split of " the" is one.
    ids = by.target_ids("a th", b"", b"e")
    assert ids == ours.encode("e")
    theirs = sentence_piece()
    assert between(theirs, byte_level()).target_ids("a th", b"", b"e") == [theirs._backend.token_to_id("e")]


def test_the_rest_of_a_character_follows_the_bytes_that_the_target_has() -> None:
    ours = byte_level(("ð Ł",))
    by = between(ours, byte_level())
    smile = ours.encode("😀")  # F0 9F, 98, 80
    assert by.target_ids("a ", b"\xf0\x9f", b"\x98\x80 the") == [*smile[1:], *ours.encode(" the")]
    assert by.target_ids("a ", b"\xf0", b"\x9f\x98\x80") is None  # the target would not have begun so
    assert by.target_ids("a ", b"", "é😀".encode()[:4]) == ours.encode("é")  # the rest is no whole character
    assert by.target_ids("a ", b"\xf0\x9f", b"\x98") == []
