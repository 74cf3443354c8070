from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.bundle import Bundle, DraftTokenizerEntry, FileEntry, TokenizerEntry
from paceline.errors import BundleError
from paceline.shared_ids import find_shared_ids, read_shared_ids
from paceline.tokenizer import Tokenizer

from .vocabularies import KINDS, byte_level, sentence_piece, word_piece


def shared(target: Tokenizer, draft: Tokenizer, **options: tuple[int | None, int | None]) -> dict[str, str]:
    """The pairs by their pieces: of the draft, of the target."""
    pairs = find_shared_ids(target, draft, **options).T.tolist()
    names = ({id: text for text, id in one._backend.get_vocab().items()} for one in (draft, target))
    drafts, targets = names
    return {drafts[own]: targets[other] for own, other in pairs}


def test_pieces_that_add_the_same_bytes_are_shared_however_they_are_written() -> None:
    pairs = shared(byte_level(), sentence_piece())
    assert pairs["▁the"] == "Ġthe"
    assert pairs["é"] == "Ã©"
    assert pairs["▁"] == "Ġ"
    assert pairs["<0xF0>"] == "ð"
    assert "<0x61>" not in pairs  # "a" has a piece of its own, which is taken instead
    assert "▁▁" not in pairs
    assert "<s>" not in pairs
    pairs = shared(byte_level(), word_piece())
    assert pairs["the"] == "Ġthe"
    assert pairs["##a"] == "a"
    assert pairs["."] == "."
    assert "[UNK]" not in pairs


def test_added_tokens_are_shared_by_name_and_ends_by_what_they_are() -> None:
    target = byte_level(special=("<end>", "<|user|>"), added=("  ", "<tool>"))
    draft = byte_level(merges=("Ġ Ġ",), special=("<eot>", "<|user|>"), added=("<tool>",))
    pairs = shared(target, draft)
    assert pairs["<|user|>"] == "<|user|>"
    assert pairs["<tool>"] == "<tool>"
    assert pairs["ĠĠ"] == "  "  # an added token that is text, too
    assert "<eot>" not in pairs
    ends = target.eos_token_ids[0], draft.eos_token_ids[0]
    assert shared(target, draft, ends=ends)["<eot>"] == "<end>"


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_no_id_is_in_two_pairs(target: str, draft: str) -> None:
    pairs = find_shared_ids(KINDS[target](), KINDS[draft]())
    assert pairs.dtype == np.int32
    assert pairs.shape[1] > 10
    assert (np.diff(pairs[0]) > 0).all()
    assert len(np.unique(pairs[1])) == pairs.shape[1]


class _Manifest:
    tokenizer = TokenizerEntry(10, None, (), None)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (np.zeros((2, 3), np.int64), r"int64 \[2, 3\]; expected int32 \[2, shared\]"),
        (np.zeros((3, 2), np.int32), r"int32 \[3, 2\]; expected"),
        (np.zeros((2, 0), np.int32), "pairs 0 ids"),
        (np.array([[1, 2], [3, 3]], np.int32), "each at most once"),
        (np.array([[1, 20], [3, 4]], np.int32), "below 20 of the draft with ids below 10 of the target"),
        (np.array([[1, 2], [3, 10]], np.int32), "ids below 10 of the target"),
        (np.array([[1, 2], [-1, 4]], np.int32), "ids below 10 of the target"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, pairs: np.ndarray, message: str) -> None:
    np.save(tmp_path / "shared.npy", pairs)
    manifest = _Manifest()
    manifest.files = {"shared.npy": FileEntry(1, "")}  # type: ignore[attr-defined]
    entry = DraftTokenizerEntry("draft/tokenizer.json", TokenizerEntry(20, None, (), None), "shared.npy", "text")
    with pytest.raises(BundleError, match=message):
        read_shared_ids(Bundle(tmp_path, manifest), entry)  # type: ignore[arg-type]
    (tmp_path / "shared.npy").write_bytes(b"\x93NUMPY no")
    with pytest.raises(BundleError, match="is no numpy array"):
        read_shared_ids(Bundle(tmp_path, manifest), entry)  # type: ignore[arg-type]
