"""Measure texts: every method in turn, prompt by prompt, in one process."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from paceline import Generation, SamplingParams, SpeculativeDecoder
from paceline_tools.peers.engines import EngineError, EngineProcess

from .meters import EnergyMeter
from .methods import OURS, Method

__all__ = ["Failure", "Measurement", "Plan", "all_decoders", "measure"]

_WARM_UP_TOKENS = 16
_DIGITS = 6  # of seconds: a document holds microseconds


@dataclass(frozen=True, slots=True)
class Measurement:
    """One text that was written. All times in seconds.

    Attributes:
        prompt: its index in the document.
        method: its index in the document.
        repeat: from 0.
        steps_s: time from the call, or from the step before, to each step, by a clock outside the generator. The first
            step is the target's pass over the prompt; the second one's time holds the draft's pass over it, too.
        steps_tokens: tokens that each step emitted.
        steps_proposed: drafted tokens that each step verified.
        steps_accepted: how many of them stood, before a stop or a limit cut the step's tokens.
        prefill_s: `Stats.prefill_s` of the text, and so on.
        decode_s: time in rounds, inside the generator.
        target_s: the part of it in the target's own runs.
        draft_s: the part of it in the draft's own runs.
        finish_reason: "stop" or "length"; None of a peer, which also has no times of models, and nothing drafted.
        text: a hash of the emitted ids: equal texts have equal ones.
        predicted_speedup: what the planner expected; None where nothing was planned.
        energy_j: joules of the processor's packages meanwhile; None where the machine does not tell.
    """

    prompt: int
    method: int
    repeat: int
    steps_s: tuple[float, ...]
    steps_tokens: tuple[int, ...]
    steps_proposed: tuple[int, ...]
    steps_accepted: tuple[int, ...]
    prefill_s: float
    decode_s: float
    target_s: float
    draft_s: float
    finish_reason: str | None
    text: str
    predicted_speedup: float | None
    energy_j: float | None

    @property
    def new_tokens(self) -> int:
        """Emitted tokens."""
        return sum(self.steps_tokens)

    @property
    def decoded(self) -> int:
        """Emitted tokens behind those of the pass over the prompt."""
        return sum(self.steps_tokens[1:])

    @property
    def rounds(self) -> int:
        """Target passes behind the one over the prompt."""
        return len(self.steps_s) - 1

    @property
    def wall_s(self) -> float:
        """Time from the call to the last token."""
        return sum(self.steps_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """A peer could not write a text; `prompt`, `method` and `repeat` as in `Measurement`."""

    prompt: int
    method: int
    repeat: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How texts are written.

    Attributes:
        methods: each writes a text for each prompt and repeat.
        max_new_tokens: of each text.
        repeats: at least 1.
        knobs: sampling parameters besides temperature and seed.
        seed: of the first repeat of sampled texts, the second one's is one more; None draws fresh numbers.
        ignore_end: write on behind end tokens.
        stop: strings that end a text of paceline's; it is cut before them.
    """

    methods: tuple[Method, ...]
    max_new_tokens: int
    repeats: int
    knobs: SamplingParams
    seed: int | None
    ignore_end: bool
    stop: tuple[str, ...] = ()

    def sampling(self, method: Method, repeat: int) -> SamplingParams:
        """Sampling parameters of a text. Greedy texts have no seed: the clock may plan them."""
        seed = None if self.seed is None or not method.temperature else self.seed + repeat
        return replace(self.knobs, temperature=method.temperature, seed=seed)

    def generation(
        self, decoder: SpeculativeDecoder, ids: Sequence[int], method: Method, repeat: int, request: int = 0
    ) -> Generation:
        """A text that has not begun; `request` tells texts with the same seed apart."""
        return decoder.generate(
            ids,
            self.sampling(method, repeat),
            max_new_tokens=self.max_new_tokens,
            num_draft_tokens=method.num_draft_tokens,
            stop=self.stop,
            drafter=method.drafter,
            verification=method.verification,
            request=request,
        )


def measure(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
    meter: EnergyMeter,
    engines: Mapping[str, EngineProcess],
    on_progress: Callable[[str, float], None],
    on_text: Callable[[Measurement, str], None] = lambda one, text: None,
    beside: Mapping[str, SpeculativeDecoder] = MappingProxyType({}),
) -> Iterator[Measurement | Failure]:
    """Write every text, after a short one by each method to warm up.

    Repeat by repeat, prompt by prompt, all methods write in turn: a machine that grows warmer or busier favours none.
    The order moves on by one with each prompt and turns round with each repeat.

    Args:
        decoder: loaded.
        prompts: token ids.
        plan: how texts are written.
        meter: of energy.
        engines: the peers' processes, by name. A peer's method that fails is left out from there on.
        on_progress: takes the stage at hand and the fraction of the whole that is done.
        on_text: takes each measurement of paceline's, before it is given, and what was written.
        beside: decoders of other bundles, by the label that their methods have.
    """
    decoders = all_decoders(decoder, beside, plan)
    count = len(plan.methods)
    failed: set[int] = set()

    def write(prompt: int, index: int, repeat: int, plan: Plan) -> tuple[Measurement | Failure, str | None]:
        where, method = (prompt, index, repeat), plan.methods[index]
        if method.engine == OURS:
            return _write(decoders[method.bundle], prompts[prompt], method, plan, meter, where)
        try:
            return _write_by_peer(engines[method.engine], decoder, prompts[prompt], method, plan, meter, where), None
        except EngineError as error:
            failed.add(index)
            return Failure(*where, str(error)), None

    short = replace(plan, max_new_tokens=min(_WARM_UP_TOKENS, plan.max_new_tokens))
    shortest = min(range(len(prompts)), key=lambda index: len(prompts[index]))
    for index in range(count):
        on_progress("warm up", 0.0)
        found, _ = write(shortest, index, 0, short)
        if isinstance(found, Failure):
            yield found
    done = 0
    for repeat in range(plan.repeats):
        for prompt in range(len(prompts)):
            order = [(prompt + index) % count for index in range(count)]
            for index in order if repeat % 2 == 0 else reversed(order):
                on_progress(f"repeat {repeat + 1} of {plan.repeats}", done / (count * len(prompts) * plan.repeats))
                if index not in failed:
                    found, text = write(prompt, index, repeat, plan)
                    if text is not None and isinstance(found, Measurement):
                        on_text(found, text)
                    yield found
                done += 1
    on_progress("done", 1.0)


def all_decoders(
    decoder: SpeculativeDecoder, beside: Mapping[str, SpeculativeDecoder], plan: Plan
) -> dict[str, SpeculativeDecoder]:
    """Decoders by the label of their bundle, as `plan` has their texts end."""
    found = {"": decoder, **beside}
    return {name: replace(one, eos_token_ids=()) for name, one in found.items()} if plan.ignore_end else found


def _write(
    decoder: SpeculativeDecoder,
    ids: Sequence[int],
    method: Method,
    plan: Plan,
    meter: EnergyMeter,
    where: tuple[int, int, int],
) -> tuple[Measurement, str]:
    steps: list[tuple[float, int, int, int]] = []
    joules = meter.read()
    last = time.perf_counter()
    generation = plan.generation(decoder, ids, method, where[2])
    with generation:
        for step in generation:
            now = time.perf_counter()
            steps.append((now - last, len(step.token_ids), step.num_proposed, step.num_accepted))
            last = now
    stats = generation.stats
    seconds, tokens, proposed, accepted = zip(*steps, strict=True)
    used = meter.since(joules)
    found = Measurement(
        *where,
        tuple(round(one, _DIGITS) for one in seconds),
        tokens,
        proposed,
        accepted,
        round(stats.prefill_s, _DIGITS),
        round(stats.decode_s, _DIGITS),
        round(stats.target_s, _DIGITS),
        round(stats.draft_s, _DIGITS),
        generation.finish_reason,
        _hash(generation.token_ids),
        stats.predicted_speedup,
        used,
    )
    return found, generation.text


def _write_by_peer(
    engine: EngineProcess,
    decoder: SpeculativeDecoder,
    ids: Sequence[int],
    method: Method,
    plan: Plan,
    meter: EnergyMeter,
    where: tuple[int, int, int],
) -> Measurement:
    """A text of a peer, which tells its steps alone."""
    engine.open(method.mode)
    sampling = plan.sampling(method, where[2])
    joules = meter.read()
    found = engine.run(
        method.mode,
        prompt_ids=list(ids),
        max_new_tokens=plan.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=-1 if sampling.seed is None else sampling.seed,
        ignore_end=plan.ignore_end,
        end_ids=list(decoder.eos_token_ids),
    )
    steps = tuple(round(float(one), _DIGITS) for one in found["steps_s"])
    if not steps:
        raise EngineError(f"{engine.name} wrote nothing.")
    nothing = (0,) * len(steps)
    return Measurement(
        *where,
        steps_s=steps,
        steps_tokens=tuple(found["steps_tokens"]),
        steps_proposed=nothing,
        steps_accepted=nothing,
        prefill_s=steps[0],
        decode_s=round(math.fsum(steps[1:]), _DIGITS),
        target_s=0.0,
        draft_s=0.0,
        finish_reason=None,
        text=_hash(found["token_ids"]),
        predicted_speedup=None,
        energy_j=meter.since(joules),
    )


def _hash(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(token_ids, np.int64).tobytes()).hexdigest()[:16]
