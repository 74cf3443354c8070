"""Which characters of a text its draft had proposed."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline import SamplingParams, SpeculativeDecoder
from paceline.grammar import GrammarConstraint
from paceline.pieces import TextPieces


@pytest.fixture(scope="module")
def decoder(tiny_bundle: Path) -> SpeculativeDecoder:
    return paceline.load(tiny_bundle)


def letters(decoder: SpeculativeDecoder) -> dict[int, float]:
    """Biases that leave single letters alone, so that each token is one character."""
    assert decoder.tokenizer is not None
    return {decoder.tokenizer.encode(letter)[0]: 40.0 for letter in "abcdef"}


@pytest.mark.parametrize("stop", [(), ("ab", "cdc")])
def test_each_character_is_its_tokens(decoder: SpeculativeDecoder, stop: tuple[str, ...]) -> None:
    assert decoder.tokenizer is not None
    accepted = 0
    for seed in range(6):
        sampling = SamplingParams(temperature=1.0, seed=seed, logit_bias=letters(decoder))
        pieces = TextPieces(decoder.tokenizer)
        wanted, found = "", ""
        for step in decoder.generate("x", sampling, max_new_tokens=40, num_draft_tokens=4, stop=stop):
            marks = [place < step.num_accepted for place in range(len(step.token_ids))]
            for token_id, mark in zip(step.token_ids, marks, strict=True):
                letter = decoder.tokenizer.decode([token_id])
                wanted += letter.upper() if mark else letter
            split = pieces.split(step)
            assert "".join(piece.text for piece in split) == step.text
            found += "".join(piece.text.upper() if piece.accepted else piece.text for piece in split)
            accepted += step.num_accepted
        assert found == wanted[: len(found)]
        if not stop:
            assert found == wanted
    assert accepted > 0


def test_pieces_are_the_text_where_characters_are_of_several_tokens(decoder: SpeculativeDecoder) -> None:
    assert decoder.tokenizer is not None
    for seed in range(6):
        pieces = TextPieces(decoder.tokenizer)
        sampling = SamplingParams(temperature=1.5, seed=seed)
        for step in decoder.generate("é", sampling, max_new_tokens=60, num_draft_tokens=3):
            assert "".join(piece.text for piece in pieces.split(step)) == step.text


def test_what_is_forced_was_not_drafted(decoder: SpeculativeDecoder) -> None:
    assert decoder.tokenizer is not None
    constraint = GrammarConstraint.from_regex(decoder.tokenizer, "hello [ab]{30} world")
    pieces = TextPieces(decoder.tokenizer)
    split = [
        piece
        for step in decoder.generate(
            "x", SamplingParams(), max_new_tokens=60, num_draft_tokens=3, constraint=constraint
        )
        for piece in pieces.split(step)
    ]
    text = "".join(piece.text for piece in split)
    assert text.startswith("hello ")
    assert text.endswith(" world")
    marks = "".join(("1" if piece.accepted else "0") * len(piece.text) for piece in split)
    assert marks[:6] == "000000"
    assert "1" in marks
