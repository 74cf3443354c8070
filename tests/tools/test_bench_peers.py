"""`paceline bench --against`: peers in their own processes, also those that crash, hang or are missing."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline import SamplingParams, SpeculativeDecoder
from paceline_tools.benchmark.document import Document, MeasuredPrompt
from paceline_tools.benchmark.figures import summarise
from paceline_tools.benchmark.measurement import Failure, Measurement, Plan, measure
from paceline_tools.benchmark.meters import EnergyMeter
from paceline_tools.benchmark.methods import Method, all_methods
from paceline_tools.benchmark.page import page
from paceline_tools.benchmark.report import report
from paceline_tools.peers import engines
from paceline_tools.peers.engines import EngineError, EngineProcess

from .bench_documents import RUN
from .conftest import VOCAB, Invoke, ascii_table, run_paceline

PEER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(engines.__file__).parent)!r})
from line_server import record, serve

class Peer:
    methods = ("plain", "crash", "hang")
    versions = {{"peer": "1"}}

    def open(self, method):
        if method == "refuse":
            raise ValueError("no such method")

    def run(self, method, request):
        if method == "crash":
            os._exit(3)
        if method == "hang":
            time.sleep(60)
        return record(self.blocks(), request)

    def blocks(self):
        for block in ([1], [], *[[2, 3]] * 99):
            time.sleep(0.001)
            yield block

serve(Peer())
"""


@contextmanager
def started(name: str, timeout_s: float = 30.0) -> Iterator[EngineProcess]:
    engine = EngineProcess(name, [sys.executable, "-c", PEER], timeout_s=timeout_s)
    try:
        yield engine
    finally:
        engine.close()


def peer(name: str, mode: str) -> Method:
    return Method(f"{name}: {mode}", "greedy", 0.0, 0, None, "", name, mode)


def test_peers_that_fail_are_left_out_and_the_run_goes_on() -> None:
    methods = (*all_methods((2,), (), (), (0.0,)), peer("a", "plain"), peer("b", "crash"), peer("b", "plain"))
    decoder = SpeculativeDecoder(ascii_table(1), ascii_table(2), None, VOCAB)
    plan = Plan(methods, 16, 2, SamplingParams(), 1, False)
    with started("a") as a, started("b") as b:
        told: list[float] = []
        found = list(
            measure(
                decoder, [[5], [6]], plan, EnergyMeter(), {"a": a, "b": b}, lambda _, fraction: told.append(fraction)
            )
        )
        assert a.resident_bytes() > 1e6
        assert b.resident_bytes() == 0
    failures = [one for one in found if isinstance(one, Failure)]
    assert [(one.method, one.reason) for one in failures] == [
        (3, "b has ended (exit code 3); what it wrote stands above."),
        (4, "b has ended (exit code 3)."),
    ]
    texts = tuple(one for one in found if isinstance(one, Measurement))
    assert len(texts) == 3 * 2 * 2
    assert told[-1] == 1.0
    of_a = [one for one in texts if one.method == 2]
    assert {one.steps_tokens for one in of_a} == {(1, 0, *[2] * 8)}
    assert all(one.rounds == 9 and one.decoded == 16 for one in of_a)

    prompts = (MeasuredPrompt("one", "x", 1), MeasuredPrompt("two", "x", 1))
    run = {**RUN, "peers": {"a": {"versions": {"peer": "1"}, "models": ["m"], "resident_bytes": 5}}}
    document = Document(run, methods, prompts, (), texts, tuple(failures))
    summary = summarise(document)
    figures = {name: one["all"] for name, one in summary["samplings"]["greedy"]["methods"].items()}
    assert figures["a: plain"]["speedup"]["value"] > 0
    assert figures["a: plain"]["timed_texts"] == figures["K = 2"]["timed_texts"] == 4
    assert figures["a: plain"]["shares"] is None
    assert figures["b: crash"]["ms_per_token"] is None
    text = report(document, summary)
    assert "b: crash (greedy) FAILED and was left out: b has ended (exit code 3)" in text
    assert "a: peer 1; 5 B resident; m." in text
    assert "failed and was left out" in page(document, summary)
    path = document.to_json(summary)
    assert json.loads(path)["failures"][0]["reason"].startswith("b has ended")


def test_behind_a_peer_that_hangs_the_run_goes_on() -> None:
    methods = (peer("a", "plain"), peer("b", "hang"), peer("b", "plain"))
    decoder = SpeculativeDecoder(ascii_table(1), None, None, VOCAB)
    plan = Plan(methods, 16, 1, SamplingParams(), 1, False)
    with started("a") as a, started("b", 1.0) as b:
        found = list(measure(decoder, [[5], [6]], plan, EnergyMeter(), {"a": a, "b": b}, lambda *_: None))
    failures = [one for one in found if isinstance(one, Failure)]
    assert [(one.method, one.reason) for one in failures] == [
        (1, "b gave no answer within 1 s, and was ended."),
        (2, "b has ended (signal SIGKILL)."),
    ]
    assert [one.prompt for one in found if isinstance(one, Measurement) and one.method == 0] == [0, 1]


def test_a_peer_that_hangs_is_ended() -> None:
    with started("a", 1.0) as engine:
        engine.open("plain")
        request = {"prompt_ids": [1], "max_new_tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 1}
        with pytest.raises(EngineError, match="a gave no answer within 1 s, and was ended"):
            engine.run("hang", **request, ignore_end=False, end_ids=[])
        assert engine.resident_bytes() == 0


def test_what_a_peer_raises_is_told() -> None:
    with started("a") as engine, pytest.raises(EngineError, match="a: ValueError: no such method"):
        engine.open("refuse")


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama.cpp is here")
def test_a_missing_peer_is_named_with_the_command_that_installs_it(
    invoke: Invoke, table_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "prompt.txt").write_text("a", encoding="utf-8")
    args = ("--prompts", tmp_path / "prompt.txt", "--max-new-tokens", 8)
    result = invoke("bench", table_bundle, *args, "--against", f"llama.cpp:{tmp_path / 'model.gguf'}")
    assert result.exit_code == 1
    assert "llama.cpp: the package 'llama_cpp' is missing." in result.stderr
    assert "pip install llama-cpp-python; or name another Python: --peer-python llama.cpp:PYTHON" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--against", "else:x"], "'else' is none of llama.cpp, onnxruntime-genai, openvino-genai, transformers"),
        (["--against", "llama.cpp:a:b"], "llama.cpp:TARGET is expected, with a GGUF file"),
        (["--against", "transformers"], "transformers:TARGET[:DRAFT] is expected"),
        (["--against", "transformers:nowhere"], "there is no nowhere; folders of save_pretrained, or GGUFs should"),
        (["--against", "transformers:."], "holds no config.json"),
        (["--against", "onnxruntime-genai:tiny.gguf"], "tiny.gguf is no folder; folders of onnxruntime_genai"),
        (["--against", "openvino-genai:folder:."], "the folder . holds no openvino_model.xml"),
        (["--against", "llama.cpp:folder"], "folder is a folder; a GGUF file should be there"),
        (["--against", "llama.cpp:folder/config.json"], "does not begin as a GGUF does"),
        (["--against", "transformers:tiny.gguf", "--top-k", "5"], "--temperature and --top-p alone"),
        (["--against", "transformers:folder"] * 2, "names a peer twice"),
        (["--peer-python", "python3"], "NAME:PYTHON is expected"),
        (["--peer-python", "transformers:python3"], "transformers is none here"),
    ],
)
def test_wrong_usage(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gguf").write_bytes(b"GGUF")
    Path("folder").mkdir()
    for name in ("config.json", "openvino_model.xml"):
        Path("folder", name).write_text("{}", encoding="utf-8")
    result = invoke("bench", table_bundle, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_transformers_writes_the_same_greedy_text(tiny_bundle: Path, tmp_path: Path) -> None:
    prompt, file = tmp_path / "prompt.txt", tmp_path / "run.json"
    prompt.write_text("hello", encoding="utf-8")
    models = f"transformers:{tiny_bundle.parent / 'target'}:{tiny_bundle.parent / 'draft'}"
    args = ("--raw", "--prompts", prompt, "--max-new-tokens", 20, "--ignore-end", "--repeats", 1, "--draft-tokens", 2)
    done = run_paceline("bench", tiny_bundle, *args, "--against", models, "--json", file)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [one["name"] for one in data["methods"]] == ["plain", "K = 2", "transformers: plain", "transformers: k2"]
    assert len(data["measurements"]) == 4
    assert len({one["text"] for one in data["measurements"]}) == 1  # the text has none of the ids that pad the logits
    assert {sum(one["steps_tokens"]) for one in data["measurements"]} == {20}
    assert list(data["run"]["peers"]["transformers"]["versions"]) == ["torch", "transformers"]
    assert data["failures"] == []
    figures = data["summary"]["samplings"]["greedy"]["methods"]
    assert figures["transformers: k2"]["all"]["speedup"]["value"] > 0
