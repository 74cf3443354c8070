"""`paceline generate`: where the prompt comes from, what goes where, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.bundle import Bundle
from paceline.generation import Generation
from paceline.ort import OrtModel
from paceline.testing import TableModel

from .conftest import CONTEXT, VOCAB, Invoke, environment, run_paceline, write_table_bundle

STATS = [
    *("prompt_tokens", "cached_tokens", "new_tokens", "rounds", "proposed", "accepted", "acceptance_rate"),
    "block_efficiency",
    *("prefill_s", "decode_s", "ms_per_token", "target_s", "draft_s", "overhead_s", "predicted_speedup", "costs_from"),
]


def document(invoke: Invoke, *args: object, **options: Any) -> dict[str, Any]:
    result = invoke("generate", *args, "--json", **options)
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_the_text_alone_goes_to_stdout(invoke: Invoke, table_bundle: Path) -> None:
    result = invoke("generate", table_bundle, "--prompt", "hi", "--max-new-tokens", 20, "--stats")
    assert result.exit_code == 0
    expected = paceline.load(table_bundle).generate("hi", max_new_tokens=20)
    list(expected)
    assert result.stdout == expected.text + "\n"
    assert "20 tokens" in result.stderr
    assert "acceptance rate" in result.stderr
    assert "seed" not in result.stderr


def test_json_is_one_document_and_says_all(invoke: Invoke, table_bundle: Path) -> None:
    args = ("--prompt", "hi", "--max-new-tokens", 20, "--draft-tokens", 2, "--stop-token-id", 7, "--threads", 2)
    found = document(invoke, table_bundle, *args)
    assert list(found) == ["text", "token_ids", "finish_reason", "stats", "settings"]
    assert list(found["stats"]) == STATS
    assert len(found["token_ids"]) == found["stats"]["new_tokens"] == len(found["text"]) == 20
    assert found["stats"]["prompt_tokens"] == 2
    assert found["finish_reason"] == "length"
    assert found["settings"] == {
        "bundle": str(table_bundle),
        "chat": False,
        "num_draft_tokens": 2,
        "drafter": None,
        "verification": "block",
        "draft_temperature": None,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "no_repeat_ngram_size": 0,
        "logit_bias": [],
        "banned_token_ids": [],
        "forced_token_ids": [],
        "min_new_tokens": 0,
        "seed": None,
        "max_new_tokens": 20,
        "stop": [],
        "stop_token_ids": [7],
        "json_schema": None,
        "regex": None,
        "logprobs": None,
        "provider": "cpu",
        "threads": 2,
        "profile": "auto",
    }


def test_the_provider_that_is_named_opens_the_models(
    invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    open_model = OrtModel.open

    def noted(*args: Any, **options: Any) -> Any:
        opened.append(options["provider"])
        return open_model(*args, **options)

    monkeypatch.setattr(OrtModel, "open", noted)
    args = ("--prompt", "hi", "--max-new-tokens", 4, "--provider", "openvino")
    assert document(invoke, table_bundle, *args)["settings"]["provider"] == "openvino"
    assert opened == ["openvino", "openvino"]
    result = invoke("generate", table_bundle, "--prompt", "hi", "--provider", "tpu")
    assert result.exit_code == 2
    assert "'tpu' is not one of 'cpu', 'cuda', 'tensorrt', 'tensorrt-rtx', 'tensorrt-rtx-engine', " in result.stderr


def test_a_provider_that_does_not_start_is_said(
    invoke: Invoke, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_openvino", None)
    result = invoke("generate", tiny_bundle, "--prompt", "hi", "--provider", "openvino")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "pip install 'paceline[openvino]'" in result.stderr


def test_logprobs_and_a_draft_of_its_own_temperature(invoke: Invoke, table_bundle: Path) -> None:
    args = ("--prompt", "hi", "--max-new-tokens", 20, "--temperature", 1, "--seed", 5, "--draft-tokens", 3)
    found = document(invoke, table_bundle, *args, "--draft-temperature", 0.3, "--logprobs", 2)
    assert found["settings"]["draft_temperature"] == 0.3
    assert [one["token_id"] for one in found["logprobs"]] == found["token_ids"]
    for one in found["logprobs"]:
        (_, best), (_, second) = one["top"]
        assert 0 > best >= second
        assert one["logprob"] <= best
    as_the_target = document(invoke, table_bundle, *args)
    assert found["stats"]["accepted"] != as_the_target["stats"]["accepted"]
    refused = invoke("generate", table_bundle, *args, "--logprobs", 2)
    assert refused.exit_code == 2
    assert "give --json too" in refused.stderr
    refused = invoke("generate", table_bundle, *args, "--draft-temperature", -1)
    assert refused.exit_code == 2
    assert "temperature must be a finite number of at least 0, got -1.0" in refused.stderr


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_the_text_keeps_to_a_regex_or_a_json_schema(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_tokens: int
) -> None:
    def open_model(bundle: Bundle, which: str, **options: Any) -> TableModel:
        return TableModel.random(VOCAB, seed=len(which), order=1, max_length=CONTEXT)

    monkeypatch.setattr(OrtModel, "open", open_model)
    args = (table_bundle, "--prompt", "hi", "--temperature", 1, "--seed", 3, "--draft-tokens", draft_tokens)
    found = document(invoke, *args, "--regex", "(up|down)[0-9]{3}")
    assert re.fullmatch("(up|down)[0-9]{3}", found["text"])
    assert found["finish_reason"] == "stop"
    assert found["settings"]["regex"] == "(up|down)[0-9]{3}"

    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], '
                      '"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}')  # fmt: skip
    found = document(invoke, *args, "--json-schema", schema)
    assert json.loads(found["text"]) == {"a": "b"}
    assert found["settings"]["json_schema"] == str(schema)


def test_bad_constraints_are_wrong_usage(invoke: Invoke, table_bundle: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "uniqueItems": true}')
    latin = tmp_path / "latin.json"
    latin.write_bytes(b'{"const": "\xe4"}')
    for options, reason in (
        (("--regex", "(a"), "unclosed group"),
        (("--json-schema", schema), "uniqueItems"),
        (("--json-schema", latin), "UTF-8"),
        (("--json-schema", tmp_path / "none.json"), "does not exist"),
        (("--json-schema", schema, "--regex", "a"), "exclude each other"),
    ):
        result = invoke("generate", table_bundle, "--prompt", "a", *options)
        assert result.exit_code == 2
        assert reason in result.stderr


@pytest.mark.parametrize("draft", [True, False])
def test_drafts_are_planned_by_default(invoke: Invoke, table_bundle: Path, tmp_path: Path, draft: bool) -> None:
    bundle = write_table_bundle(tmp_path / "other", draft=draft)
    found = document(invoke, bundle, "--prompt", "a", "--max-new-tokens", 30)
    assert found["settings"]["num_draft_tokens"] == "auto"
    assert (found["stats"]["proposed"] > 0) == draft


def test_the_drafter_can_be_chosen(invoke: Invoke, table_bundle: Path) -> None:
    args = ("generate", table_bundle, "--prompt", "abcabcabc", "--max-new-tokens", 30)
    texts = {invoke(*args, "--drafter", name).stdout for name in ("draft-model", "prompt-lookup", "hybrid")}
    assert texts == {invoke(*args, "--draft-tokens", 0).stdout}
    assert invoke(*args, "--drafter", "oracle").exit_code == 2
    refused = invoke(*args, "--drafter", "hybrid", "--draft-tokens", 2)
    assert refused.exit_code == 2
    assert "--drafter hybrid plans its drafts" in refused.stderr


@pytest.mark.parametrize("k", range(1, 7))
def test_greedy_speculative_is_greedy_plain(invoke: Invoke, table_bundle: Path, k: int) -> None:
    plain, speculative = (
        document(invoke, table_bundle, "--prompt", "The", "--max-new-tokens", 40, "--draft-tokens", n) for n in (0, k)
    )
    assert plain["stats"]["proposed"] == 0 < speculative["stats"]["proposed"]
    assert plain["token_ids"] == speculative["token_ids"]


def test_a_sampled_text_can_be_repeated_with_the_seed_that_is_told(invoke: Invoke, table_bundle: Path) -> None:
    args = (table_bundle, "--prompt", "a", "--temperature", 1, "--top-k", 20, "--top-p", 0.9, "--max-new-tokens", 30)
    first, second = document(invoke, *args), document(invoke, *args)
    assert first["text"] != second["text"]
    seed = first["settings"]["seed"]
    assert document(invoke, *args, "--seed", seed)["text"] == first["text"]
    assert f"seed      {seed}" in invoke("generate", *args, "--seed", seed, "--stats").stderr


@pytest.mark.parametrize("source", ["option", "file", "dash", "pipe"])
def test_every_way_to_give_a_prompt(invoke: Invoke, table_bundle: Path, tmp_path: Path, source: str) -> None:
    text = "héllo\n\n"
    (tmp_path / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    args: list[object] = {
        "option": ["--prompt", text],
        "file": ["--prompt-file", tmp_path / "prompt.txt"],
        "dash": ["--prompt-file", "-"],
        "pipe": [],
    }[source]  # type: ignore[assignment]
    piped = (text + "\n").encode() if source in ("dash", "pipe") else b"not this"
    found = document(invoke, table_bundle, *args, "--max-new-tokens", 4, input=piped)
    assert found["stats"]["prompt_tokens"] == len(text.encode())


def test_a_chat_goes_through_the_template(invoke: Invoke, table_bundle: Path) -> None:
    found = document(invoke, table_bundle, "--chat", "--prompt", "q", "--system", "s", "--max-new-tokens", 4)
    assert found["stats"]["prompt_tokens"] == len("<system>s<user>q")


def test_a_stop_string_cuts_the_text(invoke: Invoke, table_bundle: Path) -> None:
    text = document(invoke, table_bundle, "--prompt", "a", "--max-new-tokens", 20)["text"]
    stop = text[8:10]
    found = document(invoke, table_bundle, "--prompt", "a", "--max-new-tokens", 20, "--stop", "?!", "--stop", stop)
    assert found["text"] == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "", "--chat"], "The prompt is empty"),
        (["--prompt", "a" * CONTEXT], f"has {CONTEXT} tokens, but the target model's context holds {CONTEXT}"),
        (["--prompt", "a", "--draft-tokens", "-1"], "auto or a number of at least 0"),
        (["--prompt", "a", "--draft-tokens", str(CONTEXT)], f"use at most {CONTEXT - 1}"),
        (["--prompt", "a", "--draft-tokens", "x"], "auto or a number of at least 0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be an integer of at least 1"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature must be"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature must be"),
        (["--prompt", "a", "--top-k", "-1"], "--top-k must be"),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be"),
        (["--prompt", "a", "--seed", "-1"], "--seed must be"),
        (["--prompt", "a", "--threads", "0"], "0 is not in the range 1<=x<=1024"),
        (["--prompt", "a", "--threads", "1000000"], "1000000 is not in the range 1<=x<=1024"),
        (["--prompt", "a", "--stop", ""], "--stop must be"),
        (["--prompt", "a", "--engines", "x"], "--engines x is of no use: cpu runs the bundle's graphs"),
        (["--prompt", "a", "--stop-token-id", "999"], "--stop-token-id holds id 999"),
        (["--prompt", "a", "--prompt-file", __file__], "exclude each other"),
        (["--prompt-file", "nowhere.txt"], "does not exist"),
        (["--prompt", "a", "--system", "s"], "--system is a message of a chat"),
        (["--prompt", "a\udcff"], "--prompt is not valid UTF-8 at character 1"),
        (["--prompt", "a", "--stop", "\udcff"], "--stop is not valid UTF-8"),
    ],
)
def test_bad_input_exits_with_2_and_writes_no_text(
    invoke: Invoke, table_bundle: Path, args: list[str], message: str
) -> None:
    result = invoke("generate", table_bundle, *args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("from_file", [True, False])
def test_bytes_that_are_not_utf8_are_refused(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, from_file: bool
) -> None:
    data = "ä".encode() + b"\xff"
    (tmp_path / "prompt").write_bytes(data)
    args = ["--prompt-file", tmp_path / "prompt"] if from_file else []
    result = invoke("generate", table_bundle, *args, input=data)
    assert result.exit_code == 2
    assert "is not UTF-8: byte 2 is 0xff" in result.stderr


def test_a_terminal_is_not_waited_for(invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_tools.generate._is_terminal", lambda: True)
    result = invoke("generate", table_bundle)
    assert result.exit_code == 2
    assert "There is no prompt" in result.stderr


def test_no_draft_model_and_no_template_are_refused(invoke: Invoke, table_bundle: Path, tmp_path: Path) -> None:
    bundle = write_table_bundle(tmp_path / "other", draft=False, template=None)
    for args, message in ((["--draft-tokens", 2], "nothing to draft with"), (["--chat"], "no chat template")):
        result = invoke("generate", bundle, "--prompt", "a", *args)
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_keeps_what_was_written(
    invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    step_of = Generation.__next__

    def interrupted(self: Generation) -> Any:
        if len(self.token_ids) >= 5:
            raise KeyboardInterrupt
        return step_of(self)

    monkeypatch.setattr(Generation, "__next__", interrupted)
    result = invoke("generate", table_bundle, "--prompt", "a", "--stats", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert "ended by an interruption" in result.stderr
    if as_json:
        assert json.loads(result.stdout)["finish_reason"] is None
    else:
        assert len(result.stdout.rstrip("\n")) >= 5
        assert result.stdout.endswith("\n")


def test_a_real_pair_in_a_process_of_its_own(smol_bundle: Path) -> None:
    args = ["generate", smol_bundle, "--prompt", "The capital of France is", "--max-new-tokens", 12]
    streamed = run_paceline(*args, "--stats")
    assert streamed.returncode == 0, streamed.stderr
    assert "Paris" in streamed.stdout
    assert "acceptance rate" in streamed.stderr
    found = json.loads(run_paceline(*args, "--json").stdout)
    assert found["text"] + "\n" == streamed.stdout
    assert found["stats"]["accepted"] > 0


def start(bundle: Path) -> subprocess.Popen[bytes]:
    """A process that has begun to write a long text."""
    args = ["generate", str(bundle), "--prompt", "Once", "--max-new-tokens", "1000", "--stats"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline_tools", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # it streams: the text comes long before its end
    return process


def test_ctrl_c_in_a_process(smol_bundle: Path) -> None:
    with start(smol_bundle) as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stdout.endswith(b"\n")
    assert b"ended by an interruption" in stderr
    assert b"Traceback" not in stderr


def test_a_reader_that_goes_ends_it_quietly(smol_bundle: Path) -> None:
    with start(smol_bundle) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
