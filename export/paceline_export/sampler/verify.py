"""The verifiers: how many drafted tokens stand, and which token follows them; the rules of `paceline.verify`.

Sources: Chen et al. 2023 (arXiv 2302.01318), Sun et al. 2024 (arXiv 2403.10444, algorithm 2).

A draft of k tokens has k + 1 rows everywhere: row i of the target scores the i-th drafted token, the last row the
token behind all of them. What belongs to drafted tokens has an unused last row as well; so one number of rows is all
that TensorRT has to know, and with one row a verifier is a step of plain decoding.

Inputs of every verifier, beside those of `Adjustments` (and of `Cuts` where it is not greedy):
    logits: float32 `[1, rows, logits_width]`, the target's.
    drafted: int64 `[1, rows]`, the drafted tokens; the last entry is -1.
    end_token_ids: int64 `[num_ends]`, at least one; -1 is none. What stands behind a drafted end token counts as not
        drafted.
    inverse_temperature: float32, 1 / temperature and at most 1e38; not of the greedy verifier.

Output:
    verdict: int64 `[3]`: the number of accepted tokens, the token that follows them, and the first row that was
        reached and is no distribution (NaN, plus infinity, or no finite logit), -1 where all are. With such a row the
        other two say nothing.
"""

from __future__ import annotations

import numpy as np
import onnx

from .cuts import Cuts
from .draw import UNIFORM_BITS, draw, first_largest, padded, row_sums
from .ops import Ops
from .rows import Adjustments, Distribution, distribution, logit_rows

__all__ = ["block_verifier", "deterministic_verifier", "greedy_verifier", "token_verifier"]


def greedy_verifier(vocab_size: int, logits_width: int) -> onnx.ModelProto:
    """Accept while the drafted token is the target's most probable one; the first that differs is replaced by it."""
    op = Ops()
    target = _Rows(op, vocab_size, logits_width)
    best, healthy = first_largest(op, target.logits)
    _matching_verdict(op, target, best, healthy)
    return op.model("greedy_verifier")


def deterministic_verifier(vocab_size: int, logits_width: int) -> onnx.ModelProto:
    """Draw from the target and accept while the draw equals the proposal; the first that differs is the next token.

    One more input, draw_uniforms: int64 `[rows]` below 2**53.
    """
    op = Ops()
    target = _Rows(op, vocab_size, logits_width)
    probs = _distribution(op, target)
    drawn = draw(op, probs.probs, op.input("draw_uniforms", np.int64, ["rows"]))
    _matching_verdict(op, target, drawn, probs.healthy)
    return op.model("deterministic_verifier")


def token_verifier(vocab_size: int, logits_width: int, *, debug: bool = False) -> onnx.ModelProto:
    """Modified rejection sampling, token by token. See `_Draft` for the further inputs.

    With `debug`, what the verdict follows from: `target_probs` `[rows, width]`, `acceptance` `[rows]`, that is
    min(1, target / draft) without a meaning in the last row, and the `weights` `[1, width]` of the next token.
    """
    op = Ops()
    rows = _Rows(op, vocab_size, logits_width)
    target = _distribution(op, rows)
    draft = _Draft(op, rows)
    at_token = op("GatherND", target.probs, rows.column, batch_dims=1)  # [rows]
    stands = op("Less", op("Mul", draft.accept, draft.at_token), at_token)
    # Where the target has at least as much, the rounded uniform must not decide.
    stands = op("Or", stands, op("GreaterOrEqual", at_token, draft.at_token))
    stands = op("And", op("And", stands, op("Greater", at_token, op.constant(0))), rows.is_drafted)
    count = _leading(op, stands)
    verdict = _Drawn(op, rows, draft, target, count, op.constant([1]), _bad_row(op, target.healthy, count))
    if debug:
        ratio = op("Div", at_token, draft.at_token)
        verdict.debug(op, op("Min", ratio, op.constant(1)))
    return op.model("token_verifier")


def block_verifier(vocab_size: int, logits_width: int, *, debug: bool = False) -> onnx.ModelProto:
    """Block verification: the longest prefix that stands wins. See `_Draft` for the further inputs.

    With `debug`, what the verdict follows from, as of `token_verifier`; `acceptance` is h_0 … h_k of the paper.
    """
    op = Ops()
    rows = _Rows(op, vocab_size, logits_width)
    target = _distribution(op, rows)
    draft = _Draft(op, rows)
    none, one = op.constant(0), op.constant(1)
    ratios = op("Div", op("GatherND", target.probs, rows.column, batch_dims=1), draft.at_token)
    reached = _reached(op, op("Where", rows.is_drafted, ratios, one), rows.numbers)  # [rows], p_0 … p_k

    scaled = op("Mul", target.probs, op("Unsqueeze", reached, op.ints(1)))
    over = op("Squeeze", row_sums(op, op("Relu", op("Sub", scaled, draft.probs(op)))), op.ints(1))  # [rows]
    rest = op("Add", over, op("Sub", one, reached))
    some = op("Greater", rest, none)
    acceptance = op("Where", some, op("Div", over, op("Where", some, rest, one)), one)
    acceptance = op("Where", op("Greater", reached, none), acceptance, none)
    acceptance = op("Where", rows.is_drafted, acceptance, reached)  # [rows], h_0 … h_k

    # h_i is about the first i tokens, its uniform is that of the last of them.
    first = op.constant(0, np.int64)
    last_of_prefix = op("Max", op("Sub", rows.numbers, op.constant(1, np.int64)), first)
    stands = op("Less", op("Gather", draft.accept, last_of_prefix), acceptance)
    stands = op("Or", stands, op("GreaterOrEqual", acceptance, one))
    stands = op("And", stands, op("LessOrEqual", rows.numbers, rows.last))
    count = op("ReduceMax", op("Mul", op.cast(stands, np.int64), rows.numbers), op.ints(0), keepdims=1)  # [1]
    # Every drafted token's row decides; the one behind them only draws the token behind the whole draft.
    needed = op("Max", count, op("Sub", rows.last, op.constant(1, np.int64)))
    bad_row = _bad_row(op, target.healthy, needed)
    verdict = _Drawn(op, rows, draft, target, count, op("Gather", reached, count), bad_row)
    if debug:
        verdict.debug(op, acceptance)
    return op.model("block_verifier")


class _Rows:
    """The target's rows and the drafted tokens, all with the same number of rows.

    Attributes:
        logits: float32 `[rows, width]`, adjusted.
        tokens: int64 `[rows]`, drafted tokens, then -1.
        column: int64 `[rows, 1]`, the same with 0 instead of -1, to index with.
        ids: int64 `[width]`, 0, 1, …
        numbers: int64 `[rows]`, 0, 1, …
        last: int64 `[1]`, the number of drafted tokens.
        is_drafted: bool `[rows]`, false in the rows behind the draft: the last one, and those behind an end token.
    """

    def __init__(self, op: Ops, vocab_size: int, logits_width: int) -> None:
        self.width = padded(vocab_size)
        logits = op.input("logits", np.float32, [1, "rows", logits_width])
        drafted = op.input("drafted", np.int64, [1, "rows"])
        ends = op.input("end_token_ids", np.int64, ["num_ends"])
        adjustments = Adjustments.declare(op, vocab_size)
        self.ids = op.numbers(op.ints(self.width))
        self.tokens = op("Squeeze", drafted, op.ints(0))
        self.column = op("Max", op("Unsqueeze", self.tokens, op.ints(1)), op.constant(0, np.int64))
        self.numbers = op.numbers(op("Shape", self.tokens))
        is_end = op("Equal", op("Unsqueeze", self.tokens, op.ints(1)), ends)  # [rows, num_ends]
        ended = op("ReduceSum", op.cast(is_end, np.int64), op.ints(1), keepdims=0)
        ended = op("CumSum", ended, op.constant(0, np.int64), exclusive=1)  # [rows], how many end tokens stand before
        none = op.constant(0, np.int64)
        self.is_drafted = op("And", op("GreaterOrEqual", self.tokens, none), op("Equal", ended, none))
        self.last = op("ReduceSum", op.cast(self.is_drafted, np.int64), op.ints(0), keepdims=1)
        before = op.cast(op("Greater", op("Unsqueeze", self.numbers, op.ints(1)), self.numbers), np.float32)
        self.logits = logit_rows(op, logits, logits_width, vocab_size, adjustments, drafted, before)


class _Draft:
    """What the token and the block verifier know of the draft beside its tokens. The last row is unused. Inputs:

    draft_probs: float32 `[rows, width]`, the rows that the tokens were drawn from; a deterministic row is not read.
    any_deterministic: bool scalar that stays on the host, whether a row is deterministic; of the block verifier only.
    deterministic: bool `[rows]`, rows whose distribution is 1 at the drafted token, which was not drawn.
    accept_uniforms: int64 `[rows]` below 2**53.
    draw_uniforms: int64 `[rows]` below 2**53, for the token that replaces a drafted one, the last one for the token
        behind the whole draft.

    Attributes:
        accept: float32 `[rows]`, the accept uniforms from 0 to 1.
        at_token: float32 `[rows]`, probability of the drafted token.
    """

    def __init__(self, op: Ops, rows: _Rows) -> None:
        self._rows = rows
        self._probs = op.input("draft_probs", np.float32, ["rows", rows.width])
        self._deterministic = op.input("deterministic", np.bool_, ["rows"])
        accept = op.input("accept_uniforms", np.int64, ["rows"])
        self.draws = op.input("draw_uniforms", np.int64, ["rows"])
        self.accept = op("Mul", op.cast(accept, np.float32), op.constant(2.0**-UNIFORM_BITS))
        at_token = op("GatherND", self._probs, rows.column, batch_dims=1)
        self.at_token = op("Where", self._deterministic, op.constant(1), at_token)

    def probs(self, op: Ops) -> str:
        """The draft's rows `[rows, width]`; declares `any_deterministic`."""
        any_deterministic = op.input("any_deterministic", np.bool_, [])

        def with_ones(op: Ops) -> str:
            return _one_hot_where(op, self._deterministic, self._rows.column, self._probs, self._rows.ids)

        return op.either(any_deterministic, with_ones, lambda op: op("Identity", self._probs))

    def row(self, op: Ops, index: str) -> str:
        """The draft's row `[1, width]` at an index int64 `[1]`; 0 everywhere in the last one."""
        flag = op("Gather", self._deterministic, index)
        token = op("Gather", self._rows.column, index, axis=0)
        row = _one_hot_where(op, flag, token, op("Gather", self._probs, index, axis=0), self._rows.ids)
        is_drafted = op("Gather", self._rows.is_drafted, index)
        return op("Where", op("Unsqueeze", is_drafted, op.ints(1)), row, op.constant(0))


class _Drawn:
    """The verdict where the next token is drawn from max(scale · target - draft, 0), or behind all from the target."""

    def __init__(
        self, op: Ops, rows: _Rows, draft: _Draft, target: Distribution, count: str, scale: str, bad_row: str
    ) -> None:
        self._rows, self._target = rows, target
        row = op("Gather", target.probs, count, axis=0)  # [1, width]
        excess = op("Relu", op("Sub", op("Mul", row, scale), draft.row(op, count)))
        # Rows that are equal up to rounding leave nothing: then the target's row.
        self._weights = op("Where", op("Greater", row_sums(op, excess), op.constant(0)), excess, row)
        next_token = draw(op, self._weights, op("Gather", draft.draws, count))
        op.output("verdict", op("Concat", count, next_token, bad_row, axis=0), np.int64, [3])

    def debug(self, op: Ops, acceptance: str) -> None:
        """Declare what the verdict follows from as outputs."""
        op.output("acceptance", acceptance, np.float32, ["rows"])
        op.output("target_probs", self._target.probs, np.float32, ["rows", self._rows.width])
        op.output("weights", self._weights, np.float32, [1, self._rows.width])


def _distribution(op: Ops, rows: _Rows) -> Distribution:
    return distribution(op, rows.logits, rows.width, op.input("inverse_temperature", np.float32, []), Cuts.declare(op))


def _matching_verdict(op: Ops, rows: _Rows, wanted: str, healthy: str) -> None:
    """The verdict where drafted tokens stand while they are the `wanted` ones, int64 `[rows]`."""
    stands = op("And", op("Equal", wanted, rows.tokens), op("And", healthy, rows.is_drafted))
    count = _leading(op, stands)
    verdict = op("Concat", count, op("Gather", wanted, count), _bad_row(op, healthy, count), axis=0)
    op.output("verdict", verdict, np.int64, [3])


def _one_hot_where(op: Ops, flags: str, tokens: str, rows: str, ids: str) -> str:
    """`rows` `[n, width]`, but 1 at the token alone where a flag `[n]` is set; tokens are `[n, 1]`."""
    ones = op.cast(op("Equal", tokens, ids), np.float32)
    return op("Where", op("Unsqueeze", flags, op.ints(1)), ones, rows)


def _leading(op: Ops, flags: str) -> str:
    """How many of the flags `[n]` are set before the first that is not, int64 `[1]`."""
    fallen = op("CumSum", op.cast(op("Not", flags), np.int64), op.constant(0, np.int64))
    zero = op.constant(0, np.int64)
    return op("ReduceSum", op.cast(op("Equal", fallen, zero), np.int64), op.ints(0), keepdims=1)


def _bad_row(op: Ops, healthy: str, last: str) -> str:
    """The first row that is no distribution and not behind row `last` `[1]`; -1 where there is none. int64 `[1]`."""
    first = _leading(op, healthy)
    return op("Where", op("LessOrEqual", first, last), first, op.ints(-1))


def _reached(op: Ops, ratios: str, numbers: str) -> str:
    """p_0 = 1 and p_i = min(1, p_(i-1) · ratio_(i-1)), `[rows]`, without a loop.

    p_i is the smallest product of the last ratios before i, of none (1) to all of them. Whatever overflows on the way
    belongs to a product that a shorter one undercuts.
    """
    end = op("Unsqueeze", numbers, op.ints(1, 2))  # i, [rows, 1, 1]
    start = op("Unsqueeze", numbers, op.ints(1))  # [rows, 1]
    inside = op("And", op("Less", numbers, end), op("GreaterOrEqual", numbers, start))  # [rows, rows, rows]
    factors = op("Where", inside, ratios, op.constant(1))
    # 0 times an overflow is NaN and stands for 0.
    vanishes = op("LessOrEqual", op("ReduceMin", factors, op.ints(2), keepdims=0), op.constant(0))
    products = op("Where", vanishes, op.constant(0), op("ReduceProd", factors, op.ints(2), keepdims=0))
    return op("Min", op("ReduceMin", products, op.ints(1), keepdims=0), op.constant(1))
