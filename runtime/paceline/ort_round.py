"""A round whose arithmetic runs in graphs beside the models: no logits come to the host.

The models' logits lie where the sampler's graphs read them, a drafted token where the draft model's next run and the
target's run read it. The drafting steps run without a look at their results; once a round the host reads the drafted
tokens, how many stand, and the token that follows.

The text is that of `play_round` with the same seed, but at ties: probabilities are float32 with roundings of their own,
so a random number at the very edge between two outcomes may fall to the other side. Drafting goes on behind an end
token, which is not seen; the verifier takes what was drafted there as not drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .constraint import Constraint
from .device_array import AnyArray, DeviceArray, on_host, placed
from .drafters import Drafter, DraftModelDrafter
from .errors import InvalidInputError, ModelOutputError
from .kv_cache import KVCache
from .model import CausalLM, ResidentLM
from .ort_sampler import BoundGraph, GraphInputs, SamplerGraphs
from .prefix_cache import GenerationCaches
from .rounds import Round, take_forced
from .row_sampler import RowSampler
from .sampling import SamplingParams
from .streams import Chance, Purpose, Streams

__all__ = ["GraphDrafter", "GraphRound", "check_graph_arguments", "graph_rounds"]


def check_graph_arguments(
    sampling: SamplingParams,
    draft_sampling: SamplingParams,
    *,
    drafter: Drafter | str | None,
    constraint: Constraint | None,
    logprobs: int | None,
) -> None:
    """Refuse what needs logits or drafted tokens on the host.

    Raises:
        InvalidInputError: naming the argument.
    """
    given = {
        "no_repeat_ngram_size": bool(sampling.no_repeat_ngram_size or draft_sampling.no_repeat_ngram_size),
        "constraint": constraint is not None,
        "logprobs": logprobs is not None,
        "drafter": drafter not in (None, "draft-model"),
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidInputError(
                f"{name} needs logits or drafted tokens on the host, where sampler='graph' does not bring them; load "
                "the bundle with sampler='numpy', or leave it out.",
                name,
            )


def graph_rounds(
    graphs: SamplerGraphs,
    draft: CausalLM | None,
    sampling: SamplingParams,
    draft_sampler: RowSampler,
    prompt: Sequence[int],
    caches: GenerationCaches,
) -> tuple[GraphRound, Callable[[], GraphDrafter] | None]:
    """What plays the rounds of a generation, and what makes its drafter, once; None without a draft model.

    Raises:
        InvalidInputError: a sampling parameter that float32 cannot hold.
    """

    def inputs(params: SamplingParams) -> GraphInputs:
        return GraphInputs(
            params,
            prompt=prompt,
            vocab_size=graphs.vocab_size,
            width=graphs.width,
            end_token_ids=draft_sampler.end_token_ids,
        )

    play = GraphRound(graphs, inputs(sampling))
    if draft is None:
        return play, None
    model, draft_inputs = cast(ResidentLM, draft), inputs(draft_sampler.params)

    def new_drafter() -> GraphDrafter:
        return GraphDrafter(model, caches.new(model), draft_sampler, graphs, draft_inputs)

    return play, new_drafter


class GraphDrafter(DraftModelDrafter):
    """Drafts with a model and a sampler's graph; it is driven by `GraphRound`."""

    def __init__(
        self, model: ResidentLM, cache: KVCache, sampler: RowSampler, graphs: SamplerGraphs, inputs: GraphInputs
    ) -> None:
        """Draft with `model`, whose `cache` is empty; `sampler` says what it would say on the host."""
        super().__init__(model, cache, sampler, graphs.vocab_size)
        self.greedy = sampler.greedy
        self._graph_model, self._graph_cache = model, cache
        self._inputs = inputs
        self._graph: BoundGraph = graphs.bound("greedy_draft" if self.greedy else "draft", inputs)
        self._uniform = np.zeros(1, np.int64)
        self._graph.bind_input("uniform", self._uniform, changes=True)

    def prefill(self, tokens: Sequence[int]) -> None:
        """Feed the prompt, if it fits; its logits stay where they are."""
        feed = tokens[self._cache.length :]
        if len(feed) <= self._cache.room and self._knows(tokens):
            self._graph_model.forward_resident(feed, self._graph_cache, 1)

    def room(self, tokens: Sequence[int], num_draft_tokens: int) -> int:
        """How many tokens can be drafted behind `tokens`, up to `num_draft_tokens`."""
        feed = tokens[self._cache.length :]
        room = min(num_draft_tokens, self._cache.room - len(feed) + 1)  # the last one drawn is not fed
        if not self._knows(feed):
            return 0
        # Where nothing is left for this model the draft ends, as on the host; the target may still have something.
        return next(
            (step for step in range(room) if not self._inputs.leaves_a_token(len(tokens) + step, self._ids)),
            max(room, 0),
        )

    def draft(
        self,
        tokens: Sequence[int],
        ids: AnyArray,
        probs: AnyArray,
        healthy: NDArray[np.bool_],
        streams: Streams,
    ) -> None:
        """Draft behind `tokens`.

        Args:
            tokens: the whole text so far.
            ids: int64 `[k + 1]`, -1 everywhere; the first k become the drafted tokens.
            probs: float32 `[k, width]`, becomes the rows they were drawn from, unless drafting is greedy.
            healthy: `[k]`, becomes false where the draft model's logits are no distribution.
            streams: decide.
        """
        position = len(tokens)
        self._inputs.move(tokens)
        self._graph.bind_input("drafted", ids[np.newaxis])
        for step in range(len(healthy)):
            if step == 0:
                logits = self._graph_model.forward_resident(tokens[self._cache.length :], self._graph_cache, 1)
            else:
                logits = self._graph_model.forward_in_place(ids[step - 1 : step], self._graph_cache, 1)
            self._graph.bind_input("logits", logits[np.newaxis])
            self._graph.bind_input("bias", self._inputs.bias(position + step, 1))
            self._graph.bind_output("token", ids[step : step + 1, np.newaxis])
            self._graph.bind_output("healthy", healthy[step : step + 1])
            if not self.greedy:
                self._uniform[0] = streams.integer(position + step, Purpose.DRAFT, round_start=position)
                self._graph.bind_output("probs", probs[step : step + 1])
            self._graph.run()


class GraphRound:
    """Plays the rounds of one generation; see `paceline.rounds.PlayRound`."""

    def __init__(self, graphs: SamplerGraphs, inputs: GraphInputs) -> None:
        self._graphs = graphs
        self._inputs = inputs
        self._verifiers: dict[str, BoundGraph] = {}
        self._device = graphs.provider.device
        self._probs = self._new_probs(0)

    def __call__(
        self,
        tokens: list[int],
        limit: int,
        num_draft_tokens: int,
        *,
        target: CausalLM,
        cache: KVCache,
        drafter: Drafter | None,
        sampler: RowSampler,
        vocab_size: int,
        chance: Chance,
        rule: str,
        num_top_logprobs: int | None,
        wants_confidences: bool,
    ) -> Round:
        """Play a round; see `paceline.rounds.play_round`. Nothing plans it, so no confidences are wanted."""
        model = cast(ResidentLM, target)
        streams = cast(Streams, chance)
        drafting = cast(GraphDrafter, drafter)
        num_forced = take_forced(tokens, limit, sampler)
        position = len(tokens)
        self._inputs.move(tokens)

        count = drafting.room(tokens, min(num_draft_tokens, limit - 1 - num_forced)) if drafter else 0
        feed = tokens[cache.length :]
        ids = placed(np.array([*feed, *[-1] * (count + 1)], np.int64), self._device)
        resident = ids[len(feed) :]  # [count + 1]
        if len(self._probs) <= count:
            self._probs = self._new_probs(count + 1)
        probs = self._probs[: count + 1]
        healthy = np.ones(count, np.bool_)
        if count:
            drafting.draft(tokens, resident, probs, healthy, streams)
            logits = model.forward_in_place(ids[:-1], cache, count + 1)
        else:
            logits = model.forward_resident(feed, cache, 1)

        greedy_draft = count == 0 or drafting.greedy
        name = "greedy" if sampler.greedy else "deterministic" if greedy_draft else rule
        num_accepted, next_token, bad_row = self._verify(name, logits, resident, probs, position, streams)
        drafted = on_host(resident)
        # What was drafted behind an end token does not count; the verifier has seen to it.
        ends = np.flatnonzero(np.isin(drafted[:count], self._inputs.end_token_ids))
        num_proposed = int(ends[0]) + 1 if len(ends) else count
        healthy = healthy[:num_proposed]
        if not healthy.all():
            raise _no_distribution("draft", position + int(np.argmin(healthy)))
        if bad_row >= 0:
            # numpy says why: no token is left, penalties overflow, or the model is at fault.
            sampler.distribution(on_host(logits)[bad_row, :vocab_size], tokens, drafted[:bad_row].tolist())
            raise _no_distribution("target", position + bad_row)
        tokens += drafted[:num_accepted].tolist()
        tokens.append(next_token)
        if count:
            cache.rollback(len(tokens) - 1)
            drafting.rollback(len(tokens) - 1)
        return Round(num_forced, num_proposed, num_accepted, None)

    def _new_probs(self, rows: int) -> AnyArray:
        """Room for `rows` rows of the draft's probabilities, where the graphs run."""
        shape = (max(rows, 1), self._graphs.width)
        return (
            np.empty(shape, np.float32) if self._device is None else DeviceArray.empty(self._device, shape, np.float32)
        )

    def _verify(
        self,
        name: str,
        logits: AnyArray,
        drafted: AnyArray,
        probs: AnyArray,
        position: int,
        streams: Streams,
    ) -> tuple[int, int, int]:
        """The verdict of the graph of this name."""
        rows = len(drafted)
        positions = range(position, position + rows)
        drawn = (
            [Purpose.TARGET] * rows if name == "deterministic" else [Purpose.RECOVER] * (rows - 1) + [Purpose.TARGET]
        )
        # As in `verify_block`, whose numbers behind the prefix decide and come up again in the next round.
        judged_in = position if name == "block" else 0
        graph = self._verifiers.get(name) or self._verifiers.setdefault(name, self._graphs.bound(name, self._inputs))
        verdict = np.empty(3, np.int64)
        inputs: dict[str, AnyArray] = {
            "logits": logits[np.newaxis],
            "drafted": drafted[np.newaxis],
            "bias": self._inputs.bias(position, rows),
            "draft_probs": probs,
            "any_deterministic": np.array(False),
            "deterministic": np.zeros(rows, np.bool_),
            "accept_uniforms": np.array([streams.integer(place, Purpose.ACCEPT, judged_in) for place in positions]),
            "draw_uniforms": np.array([streams.integer(*what) for what in zip(positions, drawn, strict=True)]),
        }
        for key, value in inputs.items():
            graph.bind_input(key, value)
        graph.bind_output("verdict", verdict)
        graph.run()

        num_accepted, next_token, bad_row = verdict.tolist()
        return num_accepted, next_token, bad_row


def _no_distribution(model: str, position: int) -> ModelOutputError:
    return ModelOutputError(
        f"The {model} model's logits for position {position} contain NaN or infinity, or penalties, biases and masks "
        "leave no finite one. Check the exported model with `paceline check`."
    )
