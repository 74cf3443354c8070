"""What several runtime tests share: a reference for the sampling law, and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from paceline.bundle import TokenizerEntry
from paceline.sampling import SamplingParams
from paceline.tokenizer import Tokenizer


def naive_distribution_of(logits: Sequence[float], params: SamplingParams) -> NDArray[np.float64]:
    """Temperature, top-k, top-p as they are defined, with a full stable sort and float64."""
    values = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.temperature == 0:
        one_hot = np.zeros(len(values))
        one_hot[order[0]] = 1
        return one_hot
    weights = np.exp((values - values.max()) / params.temperature)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    probs: NDArray[np.float64] = weights / weights.sum()
    kept, mass = 0, 0.0
    while kept < len(order) and mass < params.top_p:
        mass += probs[order[kept]]
        kept += 1
    probs[order[kept:]] = 0
    probs /= probs.sum()
    return probs


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
