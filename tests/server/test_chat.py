"""Chats through OpenAI's own client: whatever the server says is what the library says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from paceline import Generation, SamplingParams, SpeculativeDecoder

from .conftest import MODEL, Running

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, the 😀"}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def library(decoder: SpeculativeDecoder, sampling: SamplingParams, **options: Any) -> Generation:
    """The same text by the library alone, finished."""
    assert decoder.tokenizer is not None
    prompt = decoder.tokenizer.encode_chat(options.pop("messages", MESSAGES))
    generation = replace(decoder, prefixes=None).generate(prompt, sampling, **options)
    for _ in generation:
        pass
    return generation


def test_a_chat_is_the_librarys_text(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=3, max_tokens=40)
    wanted = library(decoder, SamplingParams(temperature=1.0, seed=3), max_new_tokens=40)
    (choice,) = answer.choices
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == wanted.stats.prompt_tokens
    assert answer.usage.completion_tokens == wanted.stats.new_tokens
    extra = answer.usage.model_extra
    assert extra is not None
    figures = (wanted.stats.accepted, wanted.stats.proposed, wanted.stats.rounds)
    assert (extra["accepted"], extra["proposed"], extra["rounds"]) == figures


def test_sixteen_streams_at_once_are_the_librarys_texts(server: Running, decoder: SpeculativeDecoder) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        messages: list[Any] = [{"role": "user", "content": f"Text {seed % 5}"}]
        chunks = await client.chat.completions.create(
            model=MODEL, messages=messages, seed=seed, max_tokens=60, stream=True, temperature=0.9
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(16)))

    wanted = [
        library(
            decoder,
            SamplingParams(temperature=0.9, seed=seed),
            max_new_tokens=60,
            messages=[{"role": "user", "content": f"Text {seed % 5}"}],
        ).text
        for seed in range(16)
    ]
    assert asyncio.run(all_of_them()) == wanted
    assert len(set(wanted)) == 16


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_across_tokens_is_cut_exactly(
    client: openai.OpenAI, decoder: SpeculativeDecoder, length: int
) -> None:
    whole = library(decoder, SamplingParams(temperature=1.0, seed=8), max_new_tokens=60).text
    stop = whole[12 : 12 + length]
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 8, "max_tokens": 60, "stop": [stop]}
    answer = client.chat.completions.create(**asked)
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert "".join(choice.delta.content or "" for choice in streamed) == whole[: whole.index(stop)]
    assert streamed[-1].finish_reason == answer.choices[0].finish_reason == "stop"


def test_a_streams_shape(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=1,
            max_tokens=9,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        wanted = library(decoder, SamplingParams(temperature=1.0, seed=1), max_new_tokens=9, request=index)
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == wanted.text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + [wanted.finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 18


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_library(client: openai.OpenAI, decoder: SpeculativeDecoder, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "logprobs": True, "seed": 2}
    asked |= {"top_logprobs": 3, "temperature": 0}
    wanted = library(decoder, SamplingParams(seed=2), max_new_tokens=20, logprobs=3)
    if stream:
        entries = [
            entry
            for chunk in client.chat.completions.create(**asked, stream=True)
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
    else:
        entries = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert wanted.logprobs is not None
    assert wanted.finish_reason == "length"  # so that the last token has a text
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in wanted.logprobs], abs=1e-4)
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace") == wanted.text
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"presence_penalty": 1.5, "frequency_penalty": -0.5}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}),
        ({"logit_bias": {"70": 30, "71": 30}}, {"logit_bias": {70: 30.0, 71: 30.0}}),
        ({"extra_body": {"top_k": 4, "min_p": 0.1}}, {"top_k": 4, "min_p": 0.1}),
        ({"extra_body": {"typical_p": 0.5, "repetition_penalty": 1.3}}, {"typical_p": 0.5, "repetition_penalty": 1.3}),
        ({"extra_body": {"min_tokens": 30}}, {"min_new_tokens": 30}),
    ],
)
def test_settings_reach_the_library(
    client: openai.OpenAI, decoder: SpeculativeDecoder, asked: dict[str, Any], sampling: dict[str, Any]
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=5, max_tokens=30, **asked)
    wanted = library(decoder, SamplingParams(**{"temperature": 1.0, "seed": 5} | sampling), max_new_tokens=30)
    assert answer.choices[0].message.content == wanted.text
    assert wanted.text != library(decoder, SamplingParams(temperature=1.0, seed=5), max_new_tokens=30).text


def test_speculation_is_the_requests_choice(client: openai.OpenAI) -> None:
    def usage(**extra: Any) -> dict[str, Any]:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, seed=1, extra_body={"min_tokens": 20, **extra}
        )
        assert answer.usage is not None
        assert answer.usage.model_extra is not None
        return answer.usage.model_extra

    assert usage(num_draft_tokens=0) | {"prompt_tokens_details": None} == {
        "accepted": 0, "proposed": 0, "rounds": 19, "prompt_tokens_details": None,
    }  # fmt: skip
    assert usage(num_draft_tokens=4, verification="token")["proposed"] > 0
    assert usage(num_draft_tokens=4, drafter="prompt-lookup")["rounds"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_json_that_a_schema_accepts(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"is_big": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
        "required": ["is_big", "colour"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 90, "stream": stream}
    asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked))
    else:
        text = client.chat.completions.create(**asked).choices[0].message.content or ""
    value = json.loads(text)
    assert set(value) == {"is_big", "colour"}
    assert value["colour"] in ("red", "green")


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=50, response_format={"type": "json_object"}
    )
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


def test_parts_and_developers_reach_the_template(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "the 😀"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, seed=3, max_tokens=40)
    wanted = library(decoder, SamplingParams(temperature=1.0, seed=3), max_new_tokens=40)
    assert answer.choices[0].message.content == wanted.text


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    """The client's own message objects bear fields that say nothing."""
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)
    again: list[Any] = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=5).choices


def test_the_next_turn_finds_its_prefix(client: openai.OpenAI) -> None:
    first: list[Any] = [{"role": "user", "content": "A first turn of a chat that goes on."}]
    answer = client.chat.completions.create(model=MODEL, messages=first, max_tokens=20)
    turn = [
        *first,
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "On"},
    ]
    usage = client.chat.completions.create(model=MODEL, messages=turn, max_tokens=5).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 30
