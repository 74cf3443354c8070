from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import tiny_tokenizer

from paceline.errors import CheckpointError
from paceline_export.checkpoint import Checkpoint
from paceline_export.pair import check_widths, token_texts, tokenizer_difference
from paceline_export.source import Source


def checkpoint(name: str, tokenizer: Any, vocab_size: int) -> Checkpoint:
    source = Source(name, "folder", Path(name), None, (Path(name) / "model.safetensors",))
    return Checkpoint(source, cast(Any, SimpleNamespace(vocab_size=vocab_size)), tokenizer, {}, None)


def test_one_tokenizer_with_padded_widths_is_one() -> None:  # case 17
    difference = tokenizer_difference(
        checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(), 264)
    )
    assert difference is None


def test_another_vocabulary_is_told_by_the_first_id_that_differs() -> None:  # case 35
    ids = len(token_texts(tiny_tokenizer()))
    target = checkpoint("big", tiny_tokenizer(("<tool>", "<fim>")), 272)
    draft = checkpoint("small", tiny_tokenizer(("<tool>", "<FIM>")), 280)
    difference = str(tokenizer_difference(target, draft))
    assert f"target big ({ids + 2} ids, 272 logits) and draft small ({ids + 2} ids, 280 logits)" in difference
    assert f"first at id {ids + 1}: '<fim>' against '<FIM>'" in difference


def test_a_longer_vocabulary_is_told_by_its_first_further_id() -> None:
    ids = len(token_texts(tiny_tokenizer()))
    target, draft = checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(("<tool>",)), 272)
    assert f"first at id {ids}: None against '<tool>'" in str(tokenizer_difference(target, draft))


def test_another_start_token_is_another_tokenizer() -> None:
    target, draft = checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(bos="<pad>"), 272)
    assert "differ in bos_token_id" in str(tokenizer_difference(target, draft))


def test_a_draft_narrower_than_its_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="small: its tokenizer has 262 ids, but the model knows only 100"):
        tokenizer_difference(checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(), 100))


def test_a_model_narrower_than_its_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="knows only 100"):
        check_widths(checkpoint("big", tiny_tokenizer(), 100))
