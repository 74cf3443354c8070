"""The sampler: one token from one row of logits, and the distribution that it was drawn from.

Over the draft model's logits it drafts; over the target's it is a step of plain decoding. The drafted token stays on
the device: it is the next step's `input_ids`, and nothing is looked at in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from .cuts import Cuts
from .draw import draw, first_largest, padded
from .ops import Ops
from .rows import Adjustments, distribution, logit_rows

__all__ = ["greedy_sampler", "sampler"]


def sampler(vocab_size: int, logits_width: int, logit_ids: Sequence[int] | None = None) -> onnx.ModelProto:
    """Draw a token.

    Inputs, beside those of `Adjustments` and `Cuts`:
        logits: float32 `[1, 1, logits_width]`.
        drafted: int64 `[1, num_drafted]`, the tokens that were drafted before, -1 where none was.
        inverse_temperature: float32, 1 / temperature and at most 1e38.
        uniform: int64 `[1]` below 2**53.

    Outputs:
        token: int64 `[1, 1]`, an id of the common vocabulary.
        probs: float32 `[1, width]`, the vocabulary in whole blocks, 0 where the model has no logit.
        healthy: bool `[1]`, false for NaN, plus infinity, or no finite logit; the others say nothing then.
    """
    op = Ops()
    rows = _rows(op, vocab_size, logits_width, logit_ids)
    inverse_temperature = op.input("inverse_temperature", np.float32, [])
    width = padded(vocab_size if logit_ids is None else len(logit_ids))
    row = distribution(op, rows, width, inverse_temperature, Cuts.declare(op))
    index = draw(op, row.probs, op.input("uniform", np.int64, [1]))
    probs = row.probs
    if logit_ids is not None:
        # The padding's probability 0 must land on no id of its own: it is cut.
        known = op("Slice", probs, op.ints(0), op.ints(len(logit_ids)), op.ints(1))
        zeros = op("Expand", op.constant(0), op.ints(1, padded(vocab_size)))
        probs = op("ScatterElements", zeros, op.constant([logit_ids], np.int64), known, axis=1)
    op.output("token", _token(op, index, logit_ids), np.int64, [1, 1])
    op.output("probs", probs, np.float32, [1, padded(vocab_size)])
    op.output("healthy", row.healthy, np.bool_, [1])
    return op.model("sampler")


def greedy_sampler(vocab_size: int, logits_width: int, logit_ids: Sequence[int] | None = None) -> onnx.ModelProto:
    """Take the most probable token, the lowest id among equals; inputs and outputs as `sampler`'s, without chance."""
    op = Ops()
    rows = _rows(op, vocab_size, logits_width, logit_ids)
    index, healthy = first_largest(op, rows)
    op.output("token", _token(op, index, logit_ids), np.int64, [1, 1])
    op.output("healthy", healthy, np.bool_, [1])
    return op.model("greedy_sampler")


def _rows(op: Ops, vocab_size: int, logits_width: int, logit_ids: Sequence[int] | None) -> str:
    logits = op.input("logits", np.float32, [1, 1, logits_width])
    drafted = op.input("drafted", np.int64, [1, "num_drafted"])
    adjustments = Adjustments.declare(op, vocab_size)
    # Whatever was drafted stands before the row.
    before = op.cast(op("GreaterOrEqual", drafted, op.constant(0, np.int64)), np.float32)
    return logit_rows(op, logits, logits_width, vocab_size, adjustments, drafted, before, logit_ids)


def _token(op: Ops, index: str, logit_ids: Sequence[int] | None) -> str:
    token = index if logit_ids is None else op("Gather", op.constant(logit_ids, np.int64), index)
    return op("Unsqueeze", token, op.ints(0))
