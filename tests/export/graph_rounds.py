"""Rounds through the sampler's graphs and through numpy, with the same numbers, and how the two compare.

A *tie* is a round where the two differ but numpy itself gives the graphs' answer when its uniforms are moved by up to
`TIE`, where numpy would cut like the graphs with `top_p`, `typical_p` or `min_p` moved by up to `SUM_TIE`, or where the
tokens that one of them cut are as good as one that was kept: in their probability to `EQUAL`, or for `typical_p` in
their distance from the entropy to `SUM_TIE`, the rounding of float32 sums over 10**5 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from paceline.ort_sampler import parameter_inputs
from paceline.ort_session import open_session
from paceline.row_sampler import RowSampler
from paceline.sampling import FloatArray, SamplingParams, sample
from paceline.streams import Purpose, Streams
from paceline.verify import Draft, Verdict, verify
from paceline_export.sampler.draft import greedy_sampler, sampler
from paceline_export.sampler.draw import padded
from paceline_export.sampler.verify import block_verifier, deterministic_verifier, greedy_verifier, token_verifier

TIE = 1e-6
EQUAL = 1e-6
SUM_TIE = 5e-6


@functools.cache
def graph(name: str, vocab_size: int, width: int, logit_ids: tuple[int, ...] | None = None) -> Any:
    """A session of the graph of this name."""
    models = {
        "sampler": lambda: sampler(vocab_size, width, logit_ids),
        "greedy_sampler": lambda: greedy_sampler(vocab_size, width, logit_ids),
        "greedy": lambda: greedy_verifier(vocab_size, width),
        "deterministic": lambda: deterministic_verifier(vocab_size, width),
        "token": lambda: token_verifier(vocab_size, width, debug=True),
        "block": lambda: block_verifier(vocab_size, width, debug=True),
    }
    model: onnx.ModelProto = models[name]()
    return open_session(model.SerializeToString())


def integer(uniform: float) -> int:
    """The integer that a uniform is made of."""
    return int(uniform * 2.0**53)


@dataclass
class Case:
    """One round's material: the text so far, logits of both models, and how they are sampled.

    `draft_logits` is `[k, draft_width]`, `target_logits` `[k + 1, width]`; `deterministic` marks drafted tokens that
    are given by `forced` instead of being drawn.
    """

    vocab_size: int
    prompt: list[int]
    new_tokens: list[int]
    draft_logits: FloatArray
    target_logits: FloatArray
    target_params: SamplingParams
    draft_params: SamplingParams
    seed: int = 0
    forced: dict[int, int] = field(default_factory=dict)
    logit_ids: tuple[int, ...] | None = None

    @property
    def tokens(self) -> list[int]:
        """The whole text so far."""
        return self.prompt + self.new_tokens

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens, k."""
        return len(self.draft_logits)

    def row_sampler(self, params: SamplingParams) -> RowSampler:
        """A numpy sampler at this point of the text."""
        return RowSampler(params, vocab_size=self.vocab_size, num_prompt_tokens=len(self.prompt))

    def spread(self, logits: FloatArray) -> FloatArray:
        """A row of the draft model's logits over the common vocabulary."""
        row = np.full(self.vocab_size, -np.inf, np.float32)
        ids = np.arange(len(logits)) if self.logit_ids is None else np.array(self.logit_ids)
        inside = ids < self.vocab_size
        row[ids[inside]] = logits[inside]
        return row

    def shared_inputs(self, params: SamplingParams) -> dict[str, NDArray[Any]]:
        """Parameters, counts and biases of the graphs."""
        width = padded(self.vocab_size)
        bias = np.zeros((1, width), np.float32)
        for token, value in dict(params.logit_bias).items():
            bias[0, token] = value
        bias[0, list(params.banned_token_ids)] = -np.inf
        return parameter_inputs(params, self.vocab_size) | {
            "prompt_counts": np.bincount(self.prompt, minlength=width).astype(np.float32),
            "new_counts": np.bincount(np.array(self.new_tokens, int), minlength=width).astype(np.float32),
            "bias": bias,
        }


@dataclass
class Played:
    """What a path through a round brought."""

    tokens: list[int]
    probs: list[FloatArray | None]  # `[vocab]` each
    verdict: Verdict | None = None
    bad_row: int = -1
    details: dict[str, NDArray[Any]] = field(default_factory=dict)


def draft_by_graph(case: Case) -> Played:
    """Draft with the graphs."""
    name = "greedy_sampler" if case.draft_params.greedy else "sampler"
    session = graph(name, case.vocab_size, case.draft_logits.shape[1], case.logit_ids)
    shared = case.shared_inputs(case.draft_params)
    played = Played([], [])
    drafted = np.full((1, case.num_drafted + 1), -1, np.int64)
    for step, logits in enumerate(case.draft_logits):
        if step in case.forced:
            token, probs = case.forced[step], None
        else:
            inputs = shared | {"logits": logits[None, None], "drafted": drafted}
            if not case.draft_params.greedy:
                inputs["uniform"] = np.array([integer(_draft_uniform(case, step))])
            outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
            assert outputs["healthy"].all()
            token = int(outputs["token"][0, 0])
            probs = outputs["probs"][0, : case.vocab_size] if "probs" in outputs else None
        drafted[0, step] = token
        played.tokens.append(token)
        played.probs.append(probs)
    return played


def verify_by_graph(case: Case, drafted: Played, rule: str) -> None:
    """Verify what was drafted with a graph; `rule` is its name."""
    rows = case.num_drafted + 1
    session = graph(rule, case.vocab_size, case.target_logits.shape[1])
    inputs = case.shared_inputs(case.target_params) | {
        "logits": case.target_logits[None],
        "drafted": np.array([[*drafted.tokens, -1]]),
        "end_token_ids": np.array([-1]),
    }
    streams, position = Streams(case.seed), len(case.tokens)
    if rule == "deterministic":
        uniforms = [streams.uniform(position + row, Purpose.TARGET) for row in range(rows)]
        inputs["draw_uniforms"] = np.array([integer(uniform) for uniform in uniforms])
    elif rule != "greedy":
        probs = np.full((rows, padded(case.vocab_size)), np.nan, np.float32)  # what is not read may hold anything
        for row, draft_row in enumerate(drafted.probs):
            if draft_row is not None:
                probs[row] = 0
                probs[row, : case.vocab_size] = draft_row
        judged_in = position if rule == "block" else 0
        accept = [streams.uniform(position + row, Purpose.ACCEPT, judged_in) for row in range(rows)]
        draws = [streams.uniform(position + row, Purpose.RECOVER) for row in range(rows - 1)]
        draws.append(streams.uniform(position + rows - 1, Purpose.TARGET))
        deterministic = [row is None for row in drafted.probs]
        inputs |= {
            "draft_probs": probs,
            "deterministic": np.array([*deterministic, False]),
            "accept_uniforms": np.array([integer(uniform) for uniform in accept]),
            "draw_uniforms": np.array([integer(uniform) for uniform in draws]),
        }
        if rule == "block":
            inputs["any_deterministic"] = np.array(any(deterministic))
    outputs = dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))
    num_accepted, next_token, bad_row = outputs.pop("verdict").tolist()
    drafted.verdict, drafted.bad_row, drafted.details = Verdict(num_accepted, next_token), bad_row, outputs


def numpy_draft_probs(case: Case, tokens: list[int], params: SamplingParams) -> list[FloatArray | None]:
    """The rows that numpy would draw these drafted tokens from."""
    if params.greedy:
        return [None] * case.num_drafted
    rows = case.row_sampler(params)
    return [
        None if step in case.forced else rows.distribution(case.spread(logits), case.tokens, tokens[:step])
        for step, logits in enumerate(case.draft_logits)
    ]


@dataclass(frozen=True)
class Moved:
    """Random streams whose uniforms are moved by a little."""

    streams: Streams
    accept: float
    draws: float

    def happens(self, probability: float, position: int, purpose: Purpose, round_start: int = 0) -> bool:
        """Decide an event."""
        return self.streams.uniform(position, purpose, round_start) + self.accept < probability

    def draw(self, weights: FloatArray, position: int, purpose: Purpose, round_start: int = 0) -> int:
        """Draw an id."""
        uniform = self.streams.uniform(position, purpose, round_start) + self.draws
        return sample(weights, min(max(uniform, 0.0), 1 - 2.0**-53))


def verify_by_numpy(case: Case, tokens: list[int], probs: list[FloatArray | None], rule: str, *moves: float) -> Verdict:
    """numpy's verdict, with its uniforms moved."""
    whole = rule in ("deterministic", "greedy")
    return verify(
        Draft(tuple(tokens), None if whole else probs),
        case.target_logits[:, : case.vocab_size],
        case.row_sampler(case.target_params),
        case.tokens,
        Moved(Streams(case.seed), *moves),
        "token" if whole else rule,
    )


def compare(case: Case, rule: str) -> str:
    """Play a round both ways: "equal", "cut tie", "draw tie", "accept tie", or what differs."""
    played = draft_by_graph(case)
    probs = numpy_draft_probs(case, played.tokens, case.draft_params)
    outcome = "equal"
    for step, (ours, theirs) in enumerate(zip(played.probs, probs, strict=True)):
        if ours is None or theirs is None:
            continue

        def draft_row(params: SamplingParams, step: int = step) -> FloatArray:
            row = numpy_draft_probs(case, played.tokens, params)[step]
            assert row is not None
            return row

        if (found := _compare_rows(ours, draft_row, case.draft_params)) != "equal":
            return found
        uniform = _draft_uniform(case, step)
        if sample(theirs, uniform) != played.tokens[step]:
            lowest, highest = (sample(theirs, min(max(uniform + move, 0), 1 - 2.0**-53)) for move in (-TIE, TIE))
            if not lowest <= played.tokens[step] <= highest:
                return "draft token differs"
            outcome = "draw tie"
    verify_by_graph(case, played, rule)
    assert played.verdict
    for row, ours in enumerate(played.details.get("target_probs", ())):

        def target_row(params: SamplingParams, row: int = row) -> FloatArray:
            logits = case.target_logits[row, : case.vocab_size]
            return case.row_sampler(params).distribution(logits, case.tokens, played.tokens[:row])

        if (found := _compare_rows(ours[: case.vocab_size], target_row, case.target_params)) != "equal":
            return found
    if verify_by_numpy(case, played.tokens, probs, rule, 0, 0) == played.verdict:
        return outcome
    for kind, accept in (("draw tie", 0.0), ("accept tie", TIE), ("accept tie", -TIE)):
        low, high = (verify_by_numpy(case, played.tokens, probs, rule, accept, move) for move in (-TIE, TIE))
        same_count = played.verdict.num_accepted == low.num_accepted == high.num_accepted
        if same_count and low.next_token <= played.verdict.next_token <= high.next_token:
            return kind
    return f"verdict differs: {played.verdict}"


def _draft_uniform(case: Case, step: int) -> float:
    position = len(case.tokens)
    return Streams(case.seed).uniform(position + step, Purpose.DRAFT, position)


def _compare_rows(ours: FloatArray, theirs_for: Callable[[SamplingParams], FloatArray], params: SamplingParams) -> str:
    theirs = theirs_for(params)
    kept, kept_by_numpy = ours > 1e-30, theirs > 1e-30
    if (kept == kept_by_numpy).all():
        return "equal" if np.allclose(ours, theirs, rtol=2e-5, atol=1e-9) else "probabilities differ"
    edge = kept != kept_by_numpy
    uncut = theirs_for(replace(params, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0))
    before_typical = theirs_for(replace(params, typical_p=1.0))
    with np.errstate(divide="ignore"):
        size, log_probs = np.log(uncut), np.log(before_typical)
    entropy = -np.sum(before_typical[before_typical > 0] * log_probs[before_typical > 0], dtype=np.float64)
    orders = ((size, EQUAL), (np.abs(-log_probs - entropy), SUM_TIE))
    if all(
        any(np.isclose(o[i], o[kept_by_numpy], rtol=0, atol=t).any() for o, t in orders) for i in np.flatnonzero(edge)
    ):
        return "cut tie"

    def moved(move: float) -> NDArray[np.bool_]:
        top_p, typical_p = (min(value + move, 1.0) for value in (params.top_p, params.typical_p))
        return theirs_for(replace(params, top_p=top_p, typical_p=typical_p, min_p=params.min_p * (1 - move))) > 1e-30

    fewest, most = moved(-SUM_TIE), moved(SUM_TIE)
    return "cut tie" if not (fewest & ~kept).any() and not (kept & ~most).any() else "cut differs"
