from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from paceline.decoder import SpeculativeDecoder
from paceline.sampling import SamplingParams
from paceline.stopping import Cutter
from paceline.testing import TableModel
from paceline.tokenizer import Tokenizer

from .conftest import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer([("h", "a"), ("Ġ", "ha")])
EOS = TOKENIZER.eos_token_ids[0]


def splits(ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Every way to cut a sequence into blocks."""
    for cuts in itertools.product((False, True), repeat=len(ids) - 1):
        borders = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(ids)]
        yield [ids[a:b] for a, b in itertools.pairwise(borders)]


def run(
    blocks: Sequence[Sequence[int]], stop: Sequence[str] = (), limit: int = 100, stop_ids: frozenset[int] = frozenset()
) -> tuple[list[int], list[str], str | None]:
    cutter = Cutter(limit=limit, stop_token_ids=stop_ids, stop=tuple(stop), stream=TOKENIZER.stream())
    ids: list[int] = []
    texts: list[str] = []
    for block in blocks:
        cut = cutter.cut(block)
        ids += cut.token_ids
        texts.append(cut.text)
        if cut.finish_reason:
            return ids, texts, cut.finish_reason
    return ids, texts, None


@pytest.mark.parametrize(
    ("text", "stop", "kept_text", "num_ids"),
    [
        ("x ha ha ha y", [" ha ha ha"], "x", 4),  # case 11: " ha" is one token
        ("x ha ha ha y", ["zz", "a h"], "x h", 3),  # begins and ends inside tokens
        ("x ha ha y", [" ha ha ha"], "x ha ha y", 5),  # never completed
        ("x ha hab", ["ha ha ha", "hab"], "x ha ", 4),  # held as the beginning of one, stopped by another
        ("aab", ["aab"], "", 3),
        ("aaab", ["aab"], "a", 4),
        ("a😀b", ["😀"], "a", 5),
        ("abcd", ["bc", "abc"], "", 3),  # of two that complete together, the one that began first
        ("abcd", ["bcd", "b"], "a", 2),
    ],
)
def test_case_11_a_stop_string_cuts_ids_and_text_however_the_blocks_fall(
    text: str, stop: list[str], kept_text: str, num_ids: int
) -> None:
    ids = TOKENIZER.encode(text)
    for blocks in splits(ids):
        kept, texts, reason = run(blocks, stop, limit=len(ids))
        assert kept == ids[:num_ids]
        assert "".join(texts) == kept_text
        stopped = any(string in text for string in stop)
        assert reason == ("stop" if stopped else "length")
        # What was shown before the decision is part of what remains.
        assert all(kept_text.startswith("".join(texts[:shown])) for shown in range(len(texts) + 1))


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    ids = TOKENIZER.encode("abcxab")
    _, texts, _ = run([[token_id] for token_id in ids], ["abd"])
    assert texts == ["", "", "abc", "x", "", ""]


def test_held_text_is_released_by_a_stop_token_and_by_the_limit() -> None:
    ids = [*TOKENIZER.encode("xab"), EOS, *TOKENIZER.encode("c")]
    for blocks in splits(ids):
        kept, texts, reason = run(blocks, ["abc"], stop_ids=frozenset({EOS}))
        assert (kept, "".join(texts), reason) == (ids[:4], "xab", "stop")
        kept, texts, reason = run(blocks, ["abc"], limit=3)
        assert (kept, "".join(texts), reason) == (ids[:3], "xab", "length")


def test_a_stop_token_has_no_text_even_if_it_is_an_ordinary_one() -> None:
    ids = TOKENIZER.encode("abc")
    kept, texts, reason = run([ids], stop_ids=frozenset({ids[1]}))
    assert (kept, "".join(texts), reason) == (ids[:2], "a", "stop")


def test_case_10_a_stop_string_completed_by_the_last_allowed_token_is_a_stop() -> None:
    ids = TOKENIZER.encode("abc")
    for blocks in splits(ids):
        assert run(blocks, ["bc"], limit=3)[2] == "stop"
        assert run(blocks, ["bc"], limit=2)[1:] == (run(blocks, [], limit=2)[1], "length")


def test_half_a_character_at_the_limit_is_shown_as_a_replacement() -> None:
    ids = TOKENIZER.encode("a😀")
    kept, texts, reason = run([ids], limit=3)
    assert (len(kept), "".join(texts), reason) == (3, "a\ufffd", "length")


def scripted_model(ids: Sequence[int], tokenizer: Tokenizer) -> TableModel:
    """A model whose greedy text after token `ids[0]` is the rest; order 2, so that pairs must not repeat."""
    table = np.zeros((tokenizer.vocab_size,) * 3, dtype=np.float32)
    for before, last, following in zip([0, *ids], ids, ids[1:], strict=False):
        table[before, last, following] = 9
    return TableModel(table)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5])
def test_case_11_stop_strings_in_a_generation(num_draft_tokens: int) -> None:
    ids = TOKENIZER.encode("> ha! ha? 😀 end")
    target = scripted_model(ids, TOKENIZER)
    decoder = SpeculativeDecoder(target, target, TOKENIZER, TOKENIZER.vocab_size, (EOS,))
    with decoder.generate(
        ">", SamplingParams(), max_new_tokens=len(ids) - 1, num_draft_tokens=num_draft_tokens, stop=["😀 e"]
    ) as generation:
        steps = list(generation)
    assert generation.text == " ha! ha? "
    assert "".join(step.text for step in steps) == generation.text
    assert list(generation.token_ids) == TOKENIZER.encode("> ha! ha? 😀 e")[1:]
    assert generation.finish_reason == "stop"
    assert all("\ufffd" not in step.text for step in steps)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3, 5])
def test_an_end_token_in_a_generation_with_text(num_draft_tokens: int) -> None:
    ids = [*TOKENIZER.encode("> ha! 😀"), EOS, *TOKENIZER.encode("xyz")]
    target = scripted_model(ids, TOKENIZER)
    decoder = SpeculativeDecoder(target, target, TOKENIZER, TOKENIZER.vocab_size, (EOS,))
    generation = decoder.generate(">", num_draft_tokens=num_draft_tokens)
    list(generation)
    assert generation.text == " ha! 😀"
    assert list(generation.token_ids) == ids[1 : ids.index(EOS) + 1]
