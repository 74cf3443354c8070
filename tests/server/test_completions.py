"""Completions through OpenAI's own client, and scores as evaluations ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from paceline import SamplingParams, SpeculativeDecoder

from .conftest import MODEL, Running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def library(decoder: SpeculativeDecoder, prompt: Any, sampling: SamplingParams, **options: Any) -> str:
    generation = replace(decoder, prefixes=None).generate(prompt, sampling, **options)
    return "".join(step.text for step in generation)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once the", [90, 91, 92], ["One", "Two the"], [[90, 91], [92]]])
def test_every_form_of_prompt(client: openai.OpenAI, decoder: SpeculativeDecoder, prompt: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "n": 2, "seed": 4, "stream": stream}
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    wanted = [
        library(decoder, one, SamplingParams(temperature=1.0, seed=4), max_new_tokens=12, request=choice)
        for one in prompts
        for choice in range(2)
    ]
    texts = [""] * len(wanted)
    if stream:
        for chunk in client.completions.create(**asked):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        for choice in client.completions.create(**asked).choices:
            texts[choice.index] = choice.text
    assert texts == wanted


def test_the_default_length_is_openais(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once", seed=1, extra_body={"min_tokens": 16})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
def test_an_echo_is_scored(client: openai.OpenAI, decoder: SpeculativeDecoder, max_tokens: int, stream: bool) -> None:
    """As lm-eval asks for likelihoods; checked against the text's own generation under the same tokens."""
    assert decoder.tokenizer is not None
    prompt = "the cat and the é hat"
    ids = decoder.tokenizer.encode(prompt)
    asked: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": max_tokens, "echo": True, "logprobs": 2}
    asked |= {"temperature": 0, "seed": 1}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    else:
        choices = client.completions.create(**asked).choices
    text = "".join(choice.text for choice in choices)
    shapes = [choice.logprobs for choice in choices if choice.logprobs]
    logprobs = [value for shape in shapes for value in shape.token_logprobs]
    tops = [value for shape in shapes for value in shape.top_logprobs]
    tokens = [value for shape in shapes for value in shape.tokens]
    offsets = [value for shape in shapes for value in shape.text_offset]
    assert text == decoder.tokenizer.decode(ids) + (
        library(decoder, ids, SamplingParams(), max_new_tokens=max_tokens) if max_tokens else ""
    )
    forced = decoder.generate(
        ids[:1], SamplingParams(forced_token_ids=tuple(ids[1:])), max_new_tokens=max(len(ids) - 1, 1), logprobs=2
    )
    wanted = [entry for step in forced for entry in step.logprobs or ()]
    assert logprobs[0] is None
    assert logprobs[1 : len(ids)] == pytest.approx([entry.logprob for entry in wanted], abs=1e-4)
    assert len(logprobs) == len(tokens) == len(tops) == len(offsets) == len(ids) + max_tokens
    assert offsets[:2] == [0, len(tokens[0])]
    assert all(max(top.values()) >= top[token] for token, top in zip(tokens[1:], tops[1:], strict=True))
    if max_tokens:  # greedy, so that the new tokens are the most probable ones
        assert all(
            max(top.values()) == top[token] for token, top in zip(tokens[-max_tokens:], tops[-max_tokens:], strict=True)
        )


def test_a_prompt_of_one_token_is_echoed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[90], max_tokens=0, echo=True, logprobs=1)
    assert answer.model_dump()["choices"][0]["logprobs"]["token_logprobs"] == [None]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 0)
