"""The script that measures paceline beside other systems: its prompts, its sums, and a run with a small model."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_tools.peers.line_server import Request, record

from .conftest import ROOT, environment
from .measure_peers import parser, read
from .peers.prompts import edits, human_eval, spec_bench
from .peers.report import summarise, tables

PROBLEM = {"task_id": "HumanEval/{}", "prompt": "def twice(a):\n", "canonical_solution": "    return 2 * a\n"}


def problems(folder: Path, count: int) -> Path:
    path = folder / "HumanEval.jsonl.gz"
    rows = [{**PROBLEM, "task_id": f"HumanEval/{index}", "entry_point": "twice"} for index in range(count)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


def measurement(method: str, prompt: str, category: str, ms: float, **changes: Any) -> dict[str, Any]:
    """A text of 100 tokens behind the first one, which took `ms` each."""
    return {
        "prompt": prompt,
        "category": category,
        "method": method,
        "sampling": "greedy",
        "repeat": 0,
        "new_tokens": 101,
        "first_tokens": 1,
        "first_s": 1.01,
        "decode_s": ms / 10,
        "extra": {},
    } | changes


def test_problems_from_82_on_stay_shut(tmp_path: Path) -> None:
    path = problems(tmp_path, 164)
    numbers = [int(prompt.name.partition("/")[2]) for prompt in human_eval(path, 1000) + edits(path, 1000)]
    assert sorted(set(numbers)) == list(range(82))
    assert [prompt.name for prompt in human_eval(path, 2)] == ["HumanEval/0", "HumanEval/41"]


def test_edits_ask_for_a_new_name_and_for_type_hints(tmp_path: Path) -> None:
    first, second = edits(problems(tmp_path, 82), 2)
    assert "`a` to `given`" in first.text
    assert "type hints" in second.text
    assert "def twice(a):\n    return 2 * a\n" in first.text


def test_every_category_of_spec_bench_has_its_share(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    rows = [
        {"question_id": index, "category": "qa" if index < 7 else "rag", "turns": [f"{index}?", "and?"]}
        for index in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert [(prompt.category, prompt.text) for prompt in spec_bench(path, 3)] == [
        ("qa", "0?"),
        ("qa", "2?"),
        ("qa", "4?"),
        ("rag", "7?"),
        ("rag", "8?"),
    ]


def test_a_text_ends_at_an_end_token_and_at_its_limit() -> None:
    blocks = [[1], [2, 3, 9, 4], [5]]
    request = Request([7], 10, 0.0, 1.0, 0, ignore_end=False, end_ids=[9])
    assert record(iter(blocks), request).token_ids == [1, 2, 3, 9]
    assert record(iter(blocks), Request([7], 10, 0.0, 1.0, 0, True, [9])).token_ids == [1, 2, 3, 9, 4, 5]
    assert record(iter(blocks), Request([7], 2, 0.0, 1.0, 0, True, [9])).token_ids == [1, 2, 3, 9, 4]
    assert record(iter([[], *blocks]), request).first_tokens == 0


def test_speedups_are_geometric_means_over_prompts() -> None:
    rows = [
        measurement("paceline:plain", "a", "coding", 40.0),
        measurement("paceline:plain", "b", "qa", 40.0),
        measurement("paceline:auto", "a", "coding", 10.0, extra={"stats": {"predicted_speedup": 3.0}}),
        measurement("paceline:auto", "b", "qa", 40.0),
        measurement("paceline:k2", "a", "coding", 8.0),
        measurement("llama.cpp:plain", "a", "coding", 15.0),
        measurement("llama.cpp:plain", "b", "qa", 60.0),
    ]
    one = summarise(rows)["greedy"]
    auto = one["methods"]["paceline:auto"]
    assert auto["speedup_code"] == pytest.approx(4)
    assert auto["speedup_all"] == pytest.approx(2)
    assert (auto["least"], auto["least_prompt"]) == (pytest.approx(1), "b")
    assert auto["ms_all"] == pytest.approx(20)
    assert one["methods"]["paceline:plain"]["ms_all_with_prompt"] == pytest.approx(1000 * 5.01 / 101)
    assert [(peer["kind"], peer["best"], peer["bar"]) for peer in one["peers"]] == [
        ("code", "llama.cpp:plain", 1.5),
        ("all", "llama.cpp:plain", 1.15),
    ]
    assert [peer["ratio"] for peer in one["peers"]] == pytest.approx([1.5, 1.5])
    coding = one["categories"]["coding"]
    assert (coding["best_fixed"], coding["predicted"]) == ("paceline:k2", pytest.approx(3))
    assert coding["auto_over_best_fixed"] == pytest.approx(0.8)
    bars = {text: (value, bar) for text, value, bar in one["bars"]}
    assert bars["coding: auto over paceline:k2"] == (pytest.approx(0.8), 0.97)
    assert bars["coding: 1 - error of the predicted speedup"] == (pytest.approx(0.75), 0.9)
    text = tables({"greedy": one})
    assert "short" in text
    assert "over llama.cpp:plain, code" in text


def test_repeats_give_medians_and_short_texts_nothing() -> None:
    rows = [measurement("paceline:plain", "a", "rag", ms) for ms in (10.0, 90.0, 30.0)]
    rows += [measurement("paceline:plain", "b", "rag", 99.0, new_tokens=5)]
    rows += [measurement("paceline:auto", "a", "rag", 15.0), measurement("paceline:auto", "b", "rag", 1.0)]
    one = summarise(rows)["greedy"]
    assert one["methods"]["paceline:plain"]["ms_all"] == pytest.approx(30)
    assert one["categories"]["rag"]["hybrid_over_rival"] == pytest.approx(2)


def measure(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.tools.measure_peers", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def test_a_run_can_be_resumed_and_reported(smol_bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    arguments = ("--bundle", smol_bundle, "--humaneval", problems(tmp_path, 82), "--num-code", 2, "--num-edits", 0)
    arguments += ("--max-new-tokens", 10, "--repeats", 1, "--output", output)  # type: ignore[assignment]
    done = measure(*arguments, "--methods", "paceline:plain")
    assert done.returncode == 0, done.stderr
    lines = output.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 3  # what it ran on, and two texts
    assert measure(*arguments).returncode == 2  # the file is there
    output.write_text("\n".join([*lines[:2], lines[2][:50]]), encoding="utf-8")
    done = measure(*arguments, "--methods", "paceline:plain,paceline:auto", "--resume")
    assert done.returncode == 0, done.stderr
    found = read(output)
    assert sorted((one["prompt"], one["method"]) for one in found) == [
        ("HumanEval/0", "paceline:auto"),
        ("HumanEval/0", "paceline:plain"),
        ("HumanEval/41", "paceline:auto"),
        ("HumanEval/41", "paceline:plain"),
    ]
    assert all(one["decode_s"] > 0 and one["first_tokens"] == 1 for one in found)
    summary = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))["summary"]
    assert summary["greedy"]["methods"]["paceline:auto"]["speedup_code"] > 0
    assert measure("--report", output).stdout == output.with_suffix(".txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", ["--output", "--report"])
@pytest.mark.parametrize("suffix", [".json", ".txt"])
def test_a_report_never_replaces_its_measurements(option: str, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([option, f"run{suffix}"])
    assert "name it 'run.jsonl'" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_named(smol_bundle: Path, tmp_path: Path) -> None:
    done = measure(
        "--bundle", smol_bundle, "--llama-cpp", "/no/python:model.gguf", "--demo", "--output", tmp_path / "run.jsonl"
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: llama.cpp does not start")
    assert "Traceback" not in done.stderr
