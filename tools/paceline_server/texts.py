"""The texts of one request: generations that run together, and what they bring in the order of its coming."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from paceline import Generation, SamplingParams, Step
from paceline.constraint import Constraint
from paceline.engine import StepStream
from paceline.errors import ContextLengthError

from .api_error import ApiError
from .bodies import SamplingBody
from .fields import in_fields, of_field
from .metrics import Metrics
from .record import RequestRecord
from .served import Served

__all__ = ["Texts", "generations", "token_limit"]


def token_limit(served: Served, asked: int | None, default: int, name: str) -> int:
    """New tokens of a text.

    Raises:
        ApiError: more than this server allows.
    """
    most = served.limits.new_tokens
    if asked is not None and asked > most:
        raise ApiError(
            400, f"{name} is {asked}, but this server writes at most {most} tokens.", param=name, code="invalid_value"
        )
    return min(default, most) if asked is None else asked


def generations(
    served: Served,
    body: SamplingBody,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    logprobs: int | None,
    constraints: Sequence[Constraint | None] = (None,),
    more_stops: tuple[str, ...] = (),
) -> list[Generation]:
    """Start `n` generations for each prompt; nothing runs yet.

    `more_stops` are stop strings besides the request's own.

    A request with a seed takes nothing from the prefix cache, whose keys and values may differ in their last bits, so
    that its text does not depend on what was asked before.

    Raises:
        ApiError: too many texts, a bias for what is no token id, or whatever the library refuses.
    """
    limits, n = served.limits, body.n or 1
    if len(prompts) * n > limits.choices:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with n = {n} ask for {len(prompts) * n} texts, but this server writes at most "
            f"{limits.choices} a request.",
            param="n",
            code="invalid_value",
        )
    for prompt in prompts:
        if limits.prompt_tokens is not None and len(prompt) > limits.prompt_tokens:
            error = f"The prompt has {len(prompt)} tokens, but this server reads at most {limits.prompt_tokens}."
            raise of_field(body, ContextLengthError(error))
    decoder = served.decoder if body.seed is None else replace(served.decoder, prefixes=None)
    sampling = _sampling(body)
    stop = (*((body.stop,) if isinstance(body.stop, str) else body.stop or ()), *more_stops)
    options: dict[str, Any] = {} if body.verification is None else {"verification": body.verification}
    with in_fields(body):
        return [
            decoder.generate(
                list(prompt),
                sampling,
                max_new_tokens=max_new_tokens,
                num_draft_tokens="auto" if body.num_draft_tokens is None else body.num_draft_tokens,
                drafter=body.drafter,
                stop=stop,
                stop_token_ids=body.stop_token_ids or (),
                logprobs=logprobs,
                constraint=constraints[choice % len(constraints)],
                request=choice,
                **options,
            )
            for prompt in prompts
            for choice in range(n)
        ]


def _sampling(body: SamplingBody) -> SamplingParams:
    """The library's settings; what a request leaves out is as in OpenAI's API."""
    default = SamplingParams(temperature=1.0)

    def given(name: str, field: str | None = None) -> Any:
        value = getattr(body, name)
        return getattr(default, field or name) if value is None else value

    with in_fields(body):
        return SamplingParams(
            temperature=given("temperature"),
            top_k=given("top_k"),
            top_p=given("top_p"),
            min_p=given("min_p"),
            typical_p=given("typical_p"),
            repetition_penalty=given("repetition_penalty"),
            presence_penalty=given("presence_penalty"),
            frequency_penalty=given("frequency_penalty"),
            logit_bias=_biases(body.logit_bias or {}),
            min_new_tokens=given("min_tokens", "min_new_tokens"),
            seed=body.seed,
        )


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        reason = None
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            reason = f"must name token ids, got {name!r:.80}"
        elif int(name) in biases:
            reason = f"names the token id {int(name)} twice"
        if reason:
            raise ApiError(400, f"logit_bias {reason}.", param="logit_bias", code="invalid_value")
        biases[int(name)] = bias
    return biases


class Texts:
    """Generations on their way; leaving the `with` block ends them.

    Attributes:
        works: the generations, those of one prompt beside each other.
        num_choices: how many there are of each prompt.
        first_token: of `time.monotonic()`: when the first token of any of them came; None until then.
    """

    def __init__(
        self, served: Served, metrics: Metrics, works: list[Generation], body: SamplingBody, record: RequestRecord
    ) -> None:
        """Queue them, and let `record` know of them.

        Raises:
            ApiError: more texts than may run and wait, or one that takes more memory than all may.
            OverloadError: the queue is full; and whatever else `AsyncEngine.run` raises.
        """
        self.works = works
        self._body = body
        self.num_choices = body.n or 1
        self.first_token: float | None = None
        self._metrics = metrics
        most = served.limits.timeout_s
        self._started = time.monotonic()
        with in_fields(body, otherwise="n"):
            self._streams = served.engine.run_all(works, timeout_s=min(body.timeout or most, most))
        record.stream = bool(body.stream)
        record.texts = self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.cancel()

    async def steps(self) -> AsyncIterator[tuple[int, Step]]:
        """The steps of all texts as they come, each with its text's number.

        Raises:
            DeadlineError: the request takes too long; and whatever the library raises on the way.
        """
        before = [self._started] * len(self._streams)
        async with aclosing(_merged(self._streams)) as merged:
            with in_fields(self._body):  # some is seen only on the way, as a grammar that leads nowhere
                async for index, step in merged:
                    self._observe(step, before, index)
                    yield index, step

    def _observe(self, step: Step, before: list[float], index: int) -> None:
        now = time.monotonic()
        if self.first_token is None:
            self.first_token = now
        if before[index] == self._started:
            self._metrics.first_token_s.observe(now - before[index])
        elif step.token_ids:
            self._metrics.inter_token_s.observe((now - before[index]) / len(step.token_ids))
        before[index] = now

    def usage(self) -> dict[str, Any]:
        """Tokens of all texts, and how drafting went; a prompt of several texts counts once."""
        n, stats = self.num_choices, [work.stats for work in self.works]
        prompt_tokens = sum(one.prompt_tokens for one in stats[::n])
        new_tokens = sum(one.new_tokens for one in stats)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in stats[::n])},
            "accepted": sum(one.accepted for one in stats),
            "proposed": sum(one.proposed for one in stats),
            "rounds": sum(one.rounds for one in stats),
        }


async def _merged(streams: Sequence[StepStream[Step]]) -> AsyncGenerator[tuple[int, Step], None]:
    """The steps of several streams as they come, each with its stream's number; raises what the first one raises."""
    if len(streams) == 1:  # nothing to merge: a task and a queue less between the model and the client
        async for step in streams[0]:
            yield 0, step
        return
    queue: asyncio.Queue[tuple[int, Step | Exception | None]] = asyncio.Queue()

    async def pump(index: int) -> None:
        try:
            async for step in streams[index]:
                queue.put_nowait((index, step))
            queue.put_nowait((index, None))
        except Exception as error:  # raised below, where the request is
            queue.put_nowait((index, error))

    pumps = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    left = len(pumps)
    try:
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in pumps:
            task.cancel()
