"""From rows of logits to rows of weights and probabilities, with the history that each row has.

The order is that of `paceline.row_sampler` and `paceline.sampling.distribution`: penalties, biases and masks,
temperature, top-k, top-p, min-p, typical-p. All sampling parameters are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cuts import Cuts, cut
from .draw import padded, row_sums
from .ops import Ops

__all__ = ["Adjustments", "Distribution", "distribution", "logit_rows"]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Names of the inputs that change logits before the temperature. `width` is the vocabulary in whole blocks.

    The flag is a bool scalar and stays on the host, so that a device need not be waited for.
    """

    penalise: str  # whether penalties apply
    repetition_penalty: str  # float32 scalars
    presence_penalty: str
    frequency_penalty: str
    prompt_counts: str  # float32 [width], how often each id occurs in the prompt
    new_counts: str  # float32 [width], the same for the new text without the drafted tokens
    bias: str  # float32 [1 or rows, width], added last; minus infinity forbids an id

    @classmethod
    def declare(cls, op: Ops, vocab_size: int) -> Adjustments:
        """Declare the inputs."""
        width = padded(vocab_size)
        return cls(
            penalise=op.input("penalise", np.bool_, []),
            repetition_penalty=op.input("repetition_penalty", np.float32, []),
            presence_penalty=op.input("presence_penalty", np.float32, []),
            frequency_penalty=op.input("frequency_penalty", np.float32, []),
            prompt_counts=op.input("prompt_counts", np.float32, [width]),
            new_counts=op.input("new_counts", np.float32, [width]),
            bias=op.input("bias", np.float32, ["bias_rows", width]),
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Names of rows of probabilities, and of what says which of them are any."""

    probs: str  # float32 [rows, width]
    healthy: str  # bool [rows]; false for logits with NaN, plus infinity, or nothing but minus infinity


def logit_rows(
    op: Ops,
    logits: str,
    logits_width: int,
    vocab_size: int,
    adjustments: Adjustments,
    drafted: str,
    before: str,
    logit_ids: Sequence[int] | None = None,
) -> str:
    """Logits after penalties, biases and masks, cut to the vocabulary and padded to whole blocks by minus infinity.

    Args:
        op: the graph.
        logits: float32 `[1, rows, logits_width]`.
        logits_width: width of the model's logits; padding behind the vocabulary is cut.
        vocab_size: of the common vocabulary.
        adjustments: how to change the logits.
        drafted: int64 `[1, k]`, ids drafted behind the text; -1 where none was drafted yet.
        before: float32 `[rows, k]`, 1 where a drafted token stands before the row, 0 elsewhere.
        logit_ids: the id that each logit stands for, rising; None where the i-th logit stands for id i.

    Returns:
        float32 `[rows, width]`; with `logit_ids` the width is that of the logits in whole blocks.
    """
    size = min(logits_width, vocab_size) if logit_ids is None else len(logit_ids)
    width = padded(vocab_size if logit_ids is None else size)
    rows = op("Squeeze", logits, op.ints(0))
    if size < logits_width:
        rows = op("Slice", rows, op.ints(0), op.ints(size), op.ints(1))
    if size < width:
        rows = op("Pad", rows, op.ints(0, 0, 0, width - size), op.constant(-np.inf))

    # Outside of the branches: TensorRT wants every size to be known there.
    if logit_ids is None:
        ids = op.numbers(op.ints(width))
    else:
        ids = op.constant(np.pad(logit_ids, (0, width - size)), np.int64)

    def of_logits(op: Ops, value: str) -> str:
        """What belongs to the ids of the logits, of `[..., vocabulary]`."""
        return value if logit_ids is None else op("Gather", value, ids, axis=-1)

    def penalised(op: Ops) -> str:
        occurs = op("Equal", op("Transpose", drafted, perm=[1, 0]), ids)  # [k, width]
        drafted_counts = op("MatMul", before, op.cast(occurs, np.float32))  # [rows, width]
        new = op("Add", drafted_counts, of_logits(op, adjustments.new_counts))
        return _penalised(op, rows, new, of_logits(op, adjustments.prompt_counts), adjustments)

    changed = op.either(adjustments.penalise, penalised, lambda op: op("Identity", rows))
    return op("Add", changed, of_logits(op, adjustments.bias))


def distribution(op: Ops, rows: str, width: int, inverse_temperature: str, cuts: Cuts) -> Distribution:
    """Probabilities of rows of logits.

    Args:
        op: the graph.
        rows: float32 `[rows, width]`.
        width: of the rows.
        inverse_temperature: float32 scalar, positive and at most 1e38, so that 0 times it stays 0.
        cuts: which truncations apply.
    """
    largest = op("ReduceMax", rows, op.ints(1), keepdims=1)  # [rows, 1]
    keys = op("Mul", op("Sub", rows, largest), inverse_temperature)
    weights = op("Exp", keys)
    total = row_sums(op, weights)  # NaN where there is a NaN, an infinity, or nothing finite
    healthy = op("And", op("Greater", total, op.constant(0)), op("Less", total, op.constant(np.inf)))
    left = cut(op, keys, weights, cuts, width)
    return Distribution(
        probs=op("Div", left, row_sums(op, left)),
        healthy=op("Squeeze", healthy, op.ints(1)),
    )


def _penalised(op: Ops, rows: str, new: str, prompt: str, adjustments: Adjustments) -> str:
    """Rows `[rows, width]` after penalties, from counts of the new text `[rows, width]` and of the prompt `[width]`.

    Repetition as in Keskar et al. 2019 (arXiv 1909.05858): positive logits are divided, negative ones multiplied.
    """
    none = op.constant(0)
    stronger = op("Div", op("Relu", rows), adjustments.repetition_penalty)
    weaker = op("Mul", op("Min", rows, none), adjustments.repetition_penalty)
    seen = op("Greater", op("Add", new, prompt), none)
    repeated = op("Where", seen, op("Add", stronger, weaker), rows)
    occurs = op("Mul", op.cast(op("Greater", new, none), np.float32), adjustments.presence_penalty)
    return op("Sub", repeated, op("Add", occurs, op("Mul", new, adjustments.frequency_penalty)))
