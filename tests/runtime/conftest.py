"""What several runtime tests share: a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.bundle import TokenizerEntry
from paceline.tokenizer import Tokenizer


def byte_level_tokenizer(
    merges: Sequence[tuple[str, str]] = (), *, special: Sequence[str] = ("<eos>",), chat_template: str | None = None
) -> Tokenizer:
    """A byte-level BPE tokenizer: 256 bytes, then the merges, then the special tokens, the first of them EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    (eos, *_) = backend.encode(special[0]).ids
    entry = TokenizerEntry(backend.get_vocab_size(), bos_token_id=None, eos_token_ids=(eos,), pad_token_id=None)
    return Tokenizer(backend, entry, chat_template)
