from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny import tiny_tokenizer

from paceline.errors import CheckpointError, IncompatiblePairError
from paceline_export.checkpoint import Checkpoint
from paceline_export.pair import check_pair, check_widths, token_texts
from paceline_export.source import Source


def checkpoint(name: str, tokenizer: Any, vocab_size: int) -> Checkpoint:
    source = Source(name, "folder", Path(name), None, (Path(name) / "model.safetensors",))
    return Checkpoint(source, cast(Any, SimpleNamespace(vocab_size=vocab_size)), tokenizer, {}, None)


def test_one_tokenizer_with_padded_widths_is_legal() -> None:  # case 17
    check_pair(checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(), 264))


def test_another_vocabulary_is_refused_with_the_first_id_that_differs() -> None:  # case 35
    ids = len(token_texts(tiny_tokenizer()))
    target = checkpoint("big", tiny_tokenizer(("<tool>", "<fim>")), 272)
    draft = checkpoint("small", tiny_tokenizer(("<tool>", "<FIM>")), 280)
    with pytest.raises(IncompatiblePairError) as error:
        check_pair(target, draft)
    message = str(error.value)
    assert f"target big ({ids + 2} ids, 272 logits) and draft small ({ids + 2} ids, 280 logits)" in message
    assert f"first at id {ids + 1}: '<fim>' against '<FIM>'" in message


def test_a_longer_vocabulary_is_refused_at_its_first_further_id() -> None:
    ids = len(token_texts(tiny_tokenizer()))
    with pytest.raises(IncompatiblePairError, match=f"first at id {ids}: None against '<tool>'"):
        check_pair(checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(("<tool>",)), 272))


def test_another_start_token_is_refused() -> None:
    with pytest.raises(IncompatiblePairError, match="differ in bos_token_id"):
        check_pair(checkpoint("big", tiny_tokenizer(), 272), checkpoint("small", tiny_tokenizer(bos="<pad>"), 272))


def test_a_model_narrower_than_its_tokenizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="knows only 100"):
        check_widths(checkpoint("big", tiny_tokenizer(), 100))
