"""Clients that people have, unchanged: LangChain's chat model, and lm-eval's likelihoods. Both are heavy to install.

pip install langchain-openai 'lm-eval[api]'
pytest -m slow tests/server/test_clients.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams, SpeculativeDecoder
from paceline.scoring import Scoring

from .conftest import MODEL, Running, running
from .test_chat import library
from .test_tools import OSLO, TEMPLATE, TOOLS
from .writer import writing

# Their warnings are not ours.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def chat_model(url: str, **options: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    return langchain_openai.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_retries=0, **options)


def test_langchain_chats(server: Running, decoder: SpeculativeDecoder) -> None:
    model = chat_model(server.url, temperature=1.0, seed=3, max_tokens=20)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    wanted = library(decoder, SamplingParams(temperature=1.0, seed=3), messages=messages, max_new_tokens=20)
    answer = model.invoke(messages)
    assert answer.content == wanted.text
    assert answer.usage_metadata["output_tokens"] == wanted.stats.new_tokens
    assert "".join(chunk.content for chunk in model.stream(messages)) == wanted.text
    assert [one.content for one in model.batch([messages, messages])] == [wanted.text] * 2


def test_langchain_calls_tools_and_reads_structures(decoder: SpeculativeDecoder) -> None:
    with running(writing(decoder, TEMPLATE, f"Look.{OSLO}")) as server:
        model = chat_model(server.url).bind_tools(TOOLS)
        answer = model.invoke("Rain?")
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo", "days": 2})
        again = model.invoke(["Rain?", answer, {"role": "tool", "tool_call_id": call["id"], "content": "wet"}])
        assert again.tool_calls
        parts = list(model.stream("Rain?"))
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        assert [one["args"] for one in whole.tool_calls] == [{"city": "Oslo", "days": 2}]
    with running(writing(decoder, TEMPLATE, '{"city": "Rome"}')) as server:
        schema = {
            "title": "Place",
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        }
        model = chat_model(server.url).with_structured_output(schema, method="json_schema")
        assert model.invoke("Where?") == {"city": "Rome"}


def test_lm_eval_finds_the_librarys_likelihoods(server: Running, decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="pip install 'lm-eval[api]'")
    from lm_eval.api.instance import Instance
    from tiny import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path)
    model = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        num_concurrent=2,
        max_retries=1,
        max_length=200,
    )
    assert decoder.tokenizer is not None
    pairs = [("The cat sat on", " the mat"), ("the hat and", " é 😀"), ("Question: 1 + 1?\nAnswer:", " 2")]
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)])
    for (context, continuation), (logprob, is_greedy) in zip(pairs, found, strict=True):
        ids = decoder.tokenizer.encode(context) + decoder.tokenizer.encode(continuation)
        entries = [entry for piece in Scoring(decoder, ids, 1) for entry in piece]
        entries = entries[-len(decoder.tokenizer.encode(continuation)) :]
        assert logprob == pytest.approx(sum(entry.logprob for entry in entries), abs=1e-3)
        assert is_greedy == all(entry.top[0][0] == entry.token_id for entry in entries)
    arguments = json.loads('{"until": ["z"], "max_gen_toks": 8, "temperature": 0}')
    (text,) = model.generate_until([Instance("generate_until", {}, ("the cat", arguments), 0)])
    steps = decoder.generate("the cat", SamplingParams(), max_new_tokens=8, stop=("z",))
    assert text == "".join(step.text for step in steps)
