"""Tools: what reaches the template, calls that are read out of texts, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openai
import pytest
import tokenizers

import paceline
from paceline import SpeculativeDecoder
from paceline.testing import TableModel
from paceline.tokenizer import Tokenizer
from paceline_server.bodies import ChatBody
from paceline_server.tool_bodies import MOST_CALLS
from paceline_server.tool_calls import CLOSE, OPEN, CallReader, tool_constraint

from .conftest import MODEL, Running, plain_client, running
from .writer import writing

# In the manner of Qwen's.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> "
    '<tool_call>{"name": …, "arguments": …}</tool_call>{% endif %}'
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}<assistant>'
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "Rain?"}]
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


Serve: TypeAlias = Callable[[SpeculativeDecoder], tuple[Running, openai.OpenAI]]


@pytest.fixture(scope="module")
def serve(decoder: SpeculativeDecoder) -> Iterator[Serve]:
    """Lets the one server of these tests run a decoder from now on, as it does with a bundle that is loaded anew."""
    with (
        running(decoder) as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600, http_client=plain_client()
        ) as client,
    ):

        def run(other: SpeculativeDecoder) -> tuple[Running, openai.OpenAI]:
            server.served.decoder = other
            return server, client

        yield run


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Content, calls and finish reason of an answer, whole or put together from a stream."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 300} | options
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        calls = [call.function for call in choice.message.tool_calls or ()]
        ids = [call.id for call in choice.message.tool_calls or ()]
        content = choice.message.content or ""
        reason = choice.finish_reason
    else:
        content, reason, calls, ids = "", "", [], []
        for chunk in client.chat.completions.create(**asked, stream=True):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.index == len(calls)
                calls.append(call.function)
                ids.append(call.id)
            reason = choice.finish_reason or reason
    assert len(set(ids)) == len(ids)
    return content, [(call.name, json.loads(call.arguments)) for call in calls], reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "content", "calls", "reason"),
    [
        (OSLO, "", ["weather"], "tool_calls"),
        (f"I shall look.\n{OSLO}\n{NOW}", "I shall look.", ["weather", "now"], "tool_calls"),
        ("No <tool needed.", "No <tool needed.", [], "stop"),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None, [], "stop"),
        ('<tool_call>{"name": "now"}</tool_call>', None, [], "stop"),
        ("<tool_call>no JSON</tool_call>", None, [], "stop"),
        (OSLO.removesuffix("</tool_call>"), "", ["weather"], "tool_calls"),
    ],
)
def test_calls_are_read_out_of_the_text(
    serve: Serve,
    decoder: SpeculativeDecoder,
    stream: bool,
    answer: str,
    content: str | None,
    calls: list[str],
    reason: str,
) -> None:
    _, client = serve(writing(decoder, TEMPLATE, answer))
    found = ask(client, stream)
    assert found[0] == (answer if content is None else content)
    assert [name for name, _ in found[1]] == calls
    assert found[2] == reason
    for name, arguments in found[1]:
        assert arguments == ({"city": "Oslo", "days": 2} if name == "weather" else {})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"a {OSLO} b", "ab", ["weather"]),
        (f"{NOW}{NOW}\n", "", ["now", "now"]),
        (
            '<tool_call>{"name": "now", "arguments": {"text": "</tool_call>"}}</tool_call> end',
            "end",
            ["now"],
        ),
        (f"x <tool_call>? </tool_call> y {NOW}", "x <tool_call>? </tool_call> y", ["now"]),
        ("x < y <tool_cal", "x < y <tool_cal", []),
        ("x <tool_call>{", "x <tool_call>{", []),
        (" \n x \n ", " \n x \n ", []),
    ],
)
def test_a_text_in_any_pieces_gives_the_same_calls(size: int, text: str, content: str, names: list[str]) -> None:
    reader = CallReader(frozenset(["weather", "now"]))
    parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)] + [reader.end()]
    assert "".join(part for part, _ in parts) == content
    calls = [call for _, more in parts for call in more]
    assert [call.name for call in calls] == names
    assert reader.num_calls == len(calls)


def test_one_call_is_enough_where_parallel_ones_are_not_wanted(serve: Serve, decoder: SpeculativeDecoder) -> None:
    _, client = serve(writing(decoder, TEMPLATE, f"{OSLO}\n{NOW}"))
    for stream in (False, True):
        _, calls, reason = ask(client, stream, parallel_tool_calls=False)
        assert (calls, reason) == ([("weather", {"city": "Oslo", "days": 2})], "tool_calls")


def test_tools_and_earlier_calls_reach_the_template(serve: Serve, decoder: SpeculativeDecoder) -> None:
    """The prompt's length tells: every character is a token of this tokenizer, or nearly so."""
    writer = writing(decoder, TEMPLATE, "Rain.")
    assert writer.tokenizer is not None
    function = {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
    ]
    parsed = {"id": "1", "type": "function", "function": function | {"arguments": {"city": "Oslo", "days": 2}}}
    for_template = [
        QUESTION[0],
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
    ]
    _, client = serve(writer)
    for tools in (TOOLS, None):
        more: dict[str, Any] = {"tools": tools} if tools else {}
        answer = client.chat.completions.create(model=MODEL, messages=messages, **more)
        assert answer.choices[0].message.content == "Rain."
        assert answer.usage is not None
        wanted = writer.tokenizer.encode_chat(for_template, tools=tools)
        assert answer.usage.prompt_tokens == len(wanted)
    # With none of them to be called, none is shown.
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="none")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(writer.tokenizer.encode_chat(QUESTION))


def random_text(decoder: SpeculativeDecoder, template: str) -> SpeculativeDecoder:
    """A decoder whose model writes noise."""
    assert decoder.tokenizer is not None
    tokenizer = Tokenizer(decoder.tokenizer._backend, decoder.tokenizer._entry, template)
    size = decoder.vocab_size
    model = TableModel(np.random.default_rng(1).standard_normal((size, size)), max_length=4096)
    return SpeculativeDecoder(model, None, tokenizer, size, decoder.eos_token_ids)


@pytest.fixture(params=["tags are text", "tags are tokens"])
def either(request: pytest.FixtureRequest, decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The pair as it is, or with tags that are tokens of their own and stand in texts, as Qwen's are."""
    if request.param == "tags are text":
        return decoder
    assert decoder.tokenizer is not None
    backend = tokenizers.Tokenizer.from_str(decoder.tokenizer.to_json())
    backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in (OPEN, CLOSE)])
    size = backend.get_vocab_size()
    tokenizer = Tokenizer(backend, replace(decoder.tokenizer._entry, vocab_size=size))
    assert len(tokenizer.encode(OPEN + CLOSE)) == 2
    return replace(decoder, tokenizer=tokenizer, vocab_size=size)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_call_that_is_required_is_made_and_fits_its_schema(
    serve: Serve, either: SpeculativeDecoder, stream: bool, choice: Any, names: set[str]
) -> None:
    _, client = serve(random_text(either, TEMPLATE))
    for seed in range(3):
        content, calls, reason = ask(
            client, stream, tool_choice=choice, seed=seed, parallel_tool_calls=False, max_tokens=1000
        )
        assert (content, reason) == ("", "tool_calls")
        ((name, arguments),) = calls
        assert name in names
        if name == "weather":
            assert arguments["city"] in ("Oslo", "Rome")
            assert arguments["days"] in range(1, 10)
        else:
            assert arguments == {}


@pytest.mark.parametrize("answer", [OSLO, f"{OSLO}\n", f"{OSLO}\n{NOW}", f"{NOW}\n{NOW}\n{OSLO}\n"])
def test_how_many_calls_are_made_where_one_is_required_is_the_models_choice(
    serve: Serve, either: SpeculativeDecoder, answer: str
) -> None:
    _, client = serve(writing(either, TEMPLATE, answer))
    content, calls, reason = ask(client, False, tool_choice="required")
    assert (content, reason, len(calls)) == ("", "tool_calls", answer.count(OPEN))
    for one in ({"parallel_tool_calls": False}, {"tool_choice": {"type": "function", "function": {"name": "now"}}}):
        _, calls, reason = ask(client, False, **{"tool_choice": "required"} | one)
        assert (reason, len(calls)) == ("tool_calls", 1)


def test_no_more_calls_are_made_than_a_message_may_have(decoder: SpeculativeDecoder) -> None:
    body = ChatBody.model_validate({"model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"})
    tokenizer = decoder.tokenizer
    assert tokenizer is not None
    constraint = tool_constraint(tokenizer, body, body.tools or [])
    assert constraint is not None
    (end,), (tag,) = tokenizer.eos_token_ids, tokenizer.encode("<")
    for calls, follow in ((1, {tag, end}), (MOST_CALLS - 1, {tag, end}), (MOST_CALLS, {end})):
        mask = constraint(tokenizer.encode(f"{NOW}\n" * calls))
        assert mask is not None
        assert set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))) == follow


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_function_is_held_to_its_schema(serve: Serve, either: SpeculativeDecoder, stream: bool) -> None:
    """The model would say 77 days, after some text of its own."""
    strict: list[Any] = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    answer = f"Well. {OSLO.replace('2', '77')}\nBye."
    _, client = serve(writing(either, TEMPLATE, answer))
    content, calls, reason = ask(client, stream, tools=strict)
    assert content.startswith("Well.")
    assert calls[0][0] == "weather"
    assert calls[0][1]["days"] in range(1, 10)
    assert reason in ("tool_calls", "length")
    content, calls, reason = ask(client, stream)
    assert calls[0][1]["days"] == 77


def schema_of(characters: int, **more: Any) -> dict[str, Any]:
    """A function whose schema is a little longer than that."""
    parameters = {"type": "object", "description": "x" * characters}
    return {"type": "function", "function": {"name": f"f{characters}", "parameters": parameters, **more}}


LARGE, STRICT = schema_of(40_000, strict=True), schema_of(30_000, strict=True)


@pytest.mark.parametrize(
    ("template", "body", "param", "words"),
    [
        (PLAIN, {}, "tools", "knows nothing of tools"),
        (TEMPLATE.replace("<tool_call>", "[CALL]"), {}, "tools", "in another way"),
        (TEMPLATE + "{# <function= #}", {}, "tools", "in another way"),
        (TEMPLATE, {"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        (TEMPLATE, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools"),
        (TEMPLATE, {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "tools"),
        (
            TEMPLATE,
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools",
            "type object",
        ),
        (TEMPLATE, {"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        (TEMPLATE, {"tools": [schema_of(70_000)], "tool_choice": "required"}, "tools", "65,536 characters together"),
        (TEMPLATE, {"tools": [LARGE, STRICT]}, "tools", "65,536 characters together"),
        (TEMPLATE, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no function x"),
        (TEMPLATE, {"tools": [schema_of(1, strict=True, parameters={"x-guidance": 5})]}, "tools", "x-guidance holds 5"),
        (TEMPLATE, {"response_format": {"type": "json_object"}}, "response_format", "exclude"),
        (TEMPLATE, {"stream": True, "stream_options": {"include_pieces": True}}, "stream_options", "exclude"),
    ],
)
def test_tools_that_cannot_be_honoured(
    serve: Serve, decoder: SpeculativeDecoder, template: str, body: dict[str, Any], param: str, words: str
) -> None:
    server, _ = serve(writing(decoder, template, "x"))
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "tools": TOOLS} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


@pytest.mark.parametrize(
    ("template", "role", "function", "words"),
    [
        (PLAIN, "assistant", {"name": "weather", "arguments": "{}"}, "drops tool_calls"),
        (TEMPLATE, "assistant", {"name": "weather", "arguments": "[]"}, "JSON object"),
        (TEMPLATE, "assistant", {"name": "weather", "arguments": "{"}, "JSON object"),
        (TEMPLATE, "user", {"name": "weather", "arguments": "{}"}, "Only the assistant"),
    ],
)
def test_calls_in_messages_that_cannot_be_honoured(
    serve: Serve, decoder: SpeculativeDecoder, template: str, role: str, function: dict[str, str], words: str
) -> None:
    call = {"id": "1", "type": "function", "function": function}
    server, _ = serve(writing(decoder, template, "x"))
    messages = [*QUESTION, {"role": role, "content": "", "tool_calls": [call]}]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages"), error
    assert words in error["message"]


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_qwen_calls_a_function_that_it_has_to_call_and_reads_what_it_returns(
    serve: Serve, qwen_bundle: Path, stream: bool
) -> None:
    """Left to itself, this model writes its calls in a fence of Markdown, whatever its template asks: serving.md."""
    _, client = serve(paceline.load(qwen_bundle))
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo for the next 3 days?"}]
    asked: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 400}
    wanted = ("weather", {"city": "Oslo", "days": 3})
    for options in (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ):
        assert ask(client, stream, **asked, **options) == ("", [wanted], "tool_calls")
    _, calls, _ = ask(client, stream, **asked, tool_choice="required")
    assert calls[0] == wanted
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(wanted[1])}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Sun and 11 °C"},
    ]
    content, calls, _ = ask(client, stream, **asked)
    assert "11" in content
    assert not calls
