"""Log-probabilities of emitted tokens, as the target model gives them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cuts import top_k_indices
from .sampling import FloatArray

__all__ = ["TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the target model's own probabilities at one position.

    They are the softmax of the model's logits over the common vocabulary, before any sampling parameter, so they do
    not depend on drafts or rules. Plain decoding gives the same up to the model's rounding.

    Attributes:
        token_id: the emitted token.
        logprob: of the emitted token.
        top: ids and logprobs of the most probable tokens, the most probable first, as many as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: FloatArray, token_id: int, num_top: int) -> TokenLogprobs:
    """Logprobs of one emitted token from its row of logits `[vocab]`; equal ones are listed by their ids."""
    largest = float(logits.max())
    normaliser = largest + float(np.log(np.exp(logits - largest).sum(dtype=np.float64)))
    top: list[int] = []
    if num_top:
        ids = top_k_indices(logits, min(num_top, len(logits)))
        top = ids[np.lexsort((ids, -logits[ids]))].tolist()
    return TokenLogprobs(
        token_id, float(logits[token_id]) - normaliser, tuple((i, float(logits[i]) - normaliser) for i in top)
    )
