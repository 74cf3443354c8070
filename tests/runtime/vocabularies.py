"""Tiny tokenizers of every kind that drafts and targets come with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from paceline.bundle import TokenizerEntry
from paceline.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = "abcdehnost.,"


def of(backend: Any, end: str, bos: str | None = None) -> Tokenizer:
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    first = None if bos is None else backend.token_to_id(bos)
    return Tokenizer(backend, TokenizerEntry(size, first, (backend.token_to_id(end),), None))


def byte_level(
    merges: Sequence[str] = ("t h", "th e", "Ġ the", "Ġ a", "a n", "ð Ł", "ðŁ ĺ", "Ã ©"),
    *,
    alphabet: Sequence[str] = ALPHABET,
    special: Sequence[str] = ("<end>",),
    added: Sequence[str] = (),
    regex: bool = True,
) -> Tokenizer:
    """As GPT-2's: bytes and merges of them."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {piece: at for at, piece in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return of(backend, special[0])


def sentence_piece(
    pieces: Sequence[str] = ("▁the", "▁a", "th", "é", "▁▁", "an"),
    *,
    letters: str = LETTERS,
    fallback: Sequence[str] = BYTES,
) -> Tokenizer:
    """As Llama 2's: spaces are ▁, one is put in front of the text, and unknown characters fall back to bytes."""
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", "<s>", "</s>", *fallback, "▁", *letters])}
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        vocabulary.setdefault(piece, len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", vocabulary["<s>"])])
    return of(backend, "</s>", "<s>")


def word_piece(words: Sequence[str] = ("the", "a", "an", "hat", "##s", "##e", "cat", ".", ",", "é")) -> Tokenizer:
    """As BERT's: words, and pieces that go on with a word; what is no word is unknown."""
    letters = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys([*words, *letters])]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return of(backend, "[SEP]")


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentence_piece,
    "wordpiece": word_piece,
}
