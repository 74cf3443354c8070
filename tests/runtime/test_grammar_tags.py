"""Grammars speak of texts as they are decoded: tags that are tokens of their own are text, special tokens are not."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers

from paceline.bundle import TokenizerEntry
from paceline.errors import InvalidInputError
from paceline.grammar import GrammarConstraint
from paceline.tokenizer import Tokenizer

from .conftest import byte_level_tokenizer

SPECIAL = ("<eos>", "<|mark|>")


def with_tags(*tags: str, eos: str = "<eos>") -> Tokenizer:
    """A tokenizer of bytes, two special tokens, and these tags as tokens that texts show, as Qwen's have them."""
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer(special=SPECIAL).to_json())
    backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in tags])
    size, ends = backend.get_vocab_size(), tuple(backend.encode(eos).ids)
    return Tokenizer(backend, TokenizerEntry(size, bos_token_id=None, eos_token_ids=ends, pad_token_id=None))


TAGGED, BARE = with_tags("<call>", "</call>"), with_tags()


def allowed(constraint: GrammarConstraint, text: Sequence[int]) -> list[int]:
    mask = constraint(text)
    assert mask is not None, "the text has left the grammar"
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def takes(constraint: GrammarConstraint, ids: Sequence[int], end: int) -> bool:
    """Whether a constraint allows these ids one by one, and the end behind them."""
    return all(token in allowed(constraint, ids[:at]) for at, token in enumerate([*ids, end]))


@pytest.mark.parametrize("tokenizer", [TAGGED, BARE], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize(
    "grammar",
    [
        'start: "<call>" "x" "</call>"',
        'start: "<call>x</call>"',
        "start: /<call>[a-z]<.call>/",
        'start: /[^>]*/ ">x</" "call>"',
        'start: call+\nhead[lazy]: /(?s:.*)/ "<call>"\ncall: head "x</call>"',
        'start: OPEN /[a-z]/ CLOSE  // <call>\nOPEN: "<call>"\nCLOSE: "</call>"  # it\'s <call>',
    ],
)
def test_tags_are_text_in_grammars_whether_they_are_tokens_or_not(tokenizer: Tokenizer, grammar: str) -> None:
    constraint = GrammarConstraint(tokenizer, grammar)
    ids = tokenizer.encode("<call>x</call>")
    assert len(ids) == (3 if tokenizer is TAGGED else 14)
    assert takes(constraint, ids, tokenizer.eos_token_ids[0])
    assert constraint(BARE.encode("<call>x</call>")) is not None  # in other tokens, too, where the model chose them


@pytest.mark.parametrize("tokenizer", [TAGGED, BARE], ids=["tags are tokens", "tags are text"])
def test_tags_are_text_in_schemas_and_expressions(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_token_ids
    for schema in ({"const": "a<call>b"}, {"type": "string"}, {"type": "string", "pattern": "^a<call>b$"}):
        assert takes(GrammarConstraint.from_json_schema(tokenizer, schema), tokenizer.encode('"a<call>b"'), end)
    assert takes(GrammarConstraint.from_regex(tokenizer, "(<call>)+"), tokenizer.encode("<call><call>"), end)


def test_where_one_text_is_left_it_comes_in_the_tokenizers_own_tokens() -> None:
    constraint = GrammarConstraint(TAGGED, 'start: "a<call>" "b</call>"')
    ids = TAGGED.encode("a<call>b</call>")
    assert len(ids) == 4
    assert [allowed(constraint, ids[:at]) for at in range(5)] == [[one] for one in (*ids, *TAGGED.eos_token_ids)]


def test_a_name_without_quotes_is_one_token_of_either_kind() -> None:
    call, mark = TAGGED.encode("<call>"), TAGGED.encode("<|mark|>")
    constraint = GrammarConstraint(TAGGED, "start: <|mark|> <call> /x/")
    assert [allowed(constraint, mark[:at]) for at in range(2)] == [mark, call]
    assert constraint(BARE.encode("<")) is None
    with pytest.raises(InvalidInputError, match="unknown special token"):
        GrammarConstraint(BARE, "start: <call>")


@pytest.mark.parametrize("name", SPECIAL)
def test_the_name_of_a_special_token_is_text_that_it_does_not_stand_for(name: str) -> None:
    """The tokenizer would make the token of it, whose text is nothing, or which ends the answer."""
    constraint = GrammarConstraint.from_json_schema(TAGGED, {"const": f"a{name}b"})
    ids: list[int] = []
    while (following := allowed(constraint, ids)) != list(TAGGED.eos_token_ids):
        assert len(following) == 1
        ids += following
    assert json.loads(TAGGED.decode(ids)) == f"a{name}b"
    # Where the model chooses, too.
    constraint = GrammarConstraint.from_json_schema(TAGGED, {"type": "string"})
    assert set(TAGGED.encode("".join(SPECIAL))).isdisjoint(allowed(constraint, TAGGED.encode('"a')))


def test_an_end_token_that_is_no_special_one_is_never_text() -> None:
    """A text ends at it, complete or not."""
    tokenizer = with_tags("stop", eos="stop")
    constraint = GrammarConstraint.from_regex(tokenizer, "[a-z]{5}")
    (end,) = tokenizer.eos_token_ids
    assert end not in allowed(constraint, ())
    assert takes(constraint, BARE.encode("stops"), end)


@pytest.mark.parametrize("grammar", ['start: <eos> "x"', 'start: "x" <eos>', 'start: "x" (<eos> | "y")'])
def test_a_grammar_that_names_an_end_token_is_refused(grammar: str) -> None:
    with pytest.raises(InvalidInputError, match="asks for the end token <eos>; leave it out"):
        GrammarConstraint(BARE, grammar)


def test_an_end_token_that_a_grammar_gives_by_its_id_ends_no_text_that_is_incomplete() -> None:
    end = BARE.eos_token_ids[0]
    with pytest.raises(InvalidInputError, match="asks for an end token behind 0 new tokens"):
        GrammarConstraint(BARE, f'start: <[{end}]> "x"')
    either = GrammarConstraint(BARE, f'start: <[{end}]> "x" | "y"')
    assert [BARE.decode([token]) for token in allowed(either, ())] == ["y"]
