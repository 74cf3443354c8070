"""`paceline bench --paper`: quality, its figures recomputed, and what is saved."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline_tools.__main__ import TERMINATED
from paceline_tools.benchmark.bootstrap import mean
from paceline_tools.benchmark.measurement import Failure, Measurement, measure
from paceline_tools.benchmark.paper_document import PaperDocument
from paceline_tools.benchmark.paper_figures import summarise_paper
from paceline_tools.benchmark.solutions import run_program
from paceline_tools.benchmark.tasks import read_task

from .conftest import Invoke, run_paceline

QUICK = ("--max-new-tokens", 16, "--repeats", 2)


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Problems whose programs a text of letters passes or fails by its letters: each asks for another one."""
    path = tmp_path / "problems.jsonl"
    rows = [
        {
            "task_id": f"Toy/{letter}",
            "prompt": 'text = """',
            "entry_point": "text",
            "test": f'"""\ndef check(text):\n    assert {letter!r} in text\n',
        }
        for letter in "aeqx"
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    rows = [
        {"document": "abc def.", "reference": "a b c"},
        {"question_id": 7, "category": "summarization", "turns": ["Summarize: xyz"], "reference": ["x y", "z"]},
        {"question_id": 8, "category": "qa", "turns": ["who?"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_task_reads_its_file_once(problems: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(problems.read_bytes()), isatty=lambda: False)
    monkeypatch.setattr(sys, "stdin", stdin)
    task = read_task("humaneval:-", raw=True, limit=None, count=None, run_code=False)
    assert [prompt.name for prompt in task.prompts] == ["Toy/a", "Toy/e", "Toy/q", "Toy/x"]


def check_tables(data: dict[str, Any]) -> int:
    """Recompute scores, differences, times and speedups of all parts from the JSON by plain loops; returns how many."""
    count = 0
    for part, found in zip(data["parts"], data["summary"]["parts"], strict=True):
        by_key = {(one["method"], one["prompt"], one["repeat"]): one for one in part["measurements"]}
        scores = {(one["method"], one["prompt"], one["repeat"]): one["score"] for one in part["answers"]}
        repeats, fewest = range(data["run"]["settings"]["repeats"]), min(8, part["settings"]["max_new_tokens"] - 1)
        for index, method in enumerate(part["methods"]):
            of_sampling = [i for i, one in enumerate(part["methods"]) if one["sampling"] == method["sampling"]]
            plain = of_sampling[0]
            means, differences, ms, ratios, loops = [], [], [], [], []
            for prompt in range(len(part["prompts"])):
                judged = {r: scores.get((index, prompt, r)) for r in repeats}
                known = [one for one in judged.values() if one is not None]
                if known:
                    means.append(statistics.mean(known))
                both = [
                    one - scores[plain, prompt, r]
                    for r, one in judged.items()
                    if one is not None and scores.get((plain, prompt, r)) is not None
                ]
                if both:
                    differences.append(statistics.mean(both))
                cells = [
                    [by_key.get((i, prompt, r)) for i in (index, plain)]
                    for r in repeats
                    if all(
                        (i, prompt, r) in by_key and sum(by_key[i, prompt, r]["steps_tokens"][1:]) >= fewest
                        for i in of_sampling
                    )
                ]
                if cells:
                    times = [
                        [1000 * one["decode_s"] / sum(one["steps_tokens"][1:]) for one in cell if one] for cell in cells
                    ]
                    ours, theirs = (statistics.median(one[i] for one in times) for i in (0, 1))
                    ms.append(ours)
                    ratios.append(theirs / ours)
                    loops.append(
                        statistics.median(
                            1000 * cell[0]["decode_s"] / (len(cell[0]["steps_s"]) - 1) for cell in cells if cell[0]
                        )
                    )
            expected: dict[str, tuple[float | None, Any]] = {}
            if part["stage"] == "table":
                quality = found["quality"][method["sampling"]][method["name"]]
                figures = found["bench"]["samplings"][method["sampling"]]["methods"][method["name"]]["all"]
                expected["score"] = (statistics.mean(means) if means else None, quality["score"])
                if index != plain:
                    difference = statistics.mean(differences) if differences else None
                    expected["difference"] = (difference, quality["difference"])
                assert quality["judged"] == sum(one is not None for key, one in scores.items() if key[0] == index)
            else:
                key = method["sampling"], method["name"]
                figures = next(one for one in found["curve"] if (one["sampling"], one["method"]) == key)
                texts = [one for one in part["measurements"] if one["method"] == index]
                proposed, accepted, tokens = (
                    sum(sum(one[name][1:]) for one in texts)
                    for name in ("steps_proposed", "steps_accepted", "steps_tokens")
                )
                rounds = sum(len(one["steps_s"]) - 1 for one in texts)
                assert figures["acceptance_rate"] == (accepted / proposed if proposed else None)
                assert figures["loop_efficiency"] == pytest.approx(tokens / rounds / (method["num_draft_tokens"] + 1))
                expected["loop_ms"] = (statistics.geometric_mean(loops) if loops else None, figures["loop_ms"])
            expected["ms_per_token"] = (statistics.geometric_mean(ms) if ms else None, figures["ms_per_token"])
            if index != plain:
                expected["speedup"] = (statistics.geometric_mean(ratios) if ratios else None, figures["speedup"])
            for name, (value, got) in expected.items():
                if value is None:
                    assert got is None, name
                else:
                    assert got["value"] == pytest.approx(value, rel=1e-9, abs=1e-12), name
                    assert got["low"] is None or got["low"] <= got["value"] <= got["high"]
                count += 1
    return count


def test_the_table_and_the_curves_can_be_recomputed_from_the_json(
    invoke: Invoke, table_bundle: Path, problems: Path, documents: Path, tmp_path: Path
) -> None:
    file, page = tmp_path / "paper.json", tmp_path / "paper.md"
    sources = ("--prompts", f"humaneval:{problems}", "--prompts", f"summaries:{documents}")
    args = (*QUICK, "--raw", "--draft-tokens", "auto,2", "--curve", "1,3", "--json", file, "--markdown", page)
    result = invoke("bench", table_bundle, "--paper", "--run-generated-code", *sources, *args)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("paceline bench --paper", 1)
    assert [(part["task"], part["stage"]) for part in data["parts"]] == [
        ("humaneval", "table"),
        ("summaries", "table"),
        ("humaneval", "curves"),
        ("summaries", "curves"),
    ]
    code, prose = data["parts"][:2]
    assert (code["settings"]["temperature"], code["settings"]["top_p"]) == (0.8, 0.95)
    assert (prose["settings"]["temperature"], prose["settings"]["top_p"]) == (1.0, 0.8)
    assert [one["name"] for one in prose["prompts"]] == ["summary 1", "summary 7"]
    assert len(code["answers"]) == len(code["measurements"]) == 4 * 2 * 6
    # Each answer is judged by its own problem: the letter that it asks for is in the text, or not.
    assert all(one["score"] == float("aeqx"[one["prompt"]] in one["text"]) for one in code["answers"])
    assert {one["score"] for one in code["answers"]} == {0.0, 1.0}
    assert check_tables(data) == 2 * (4 * 4 + 2 * 2) + 2 * 2 * (3 * 2 + 2)
    assert [(point["sampling"], point["k"]) for point in data["summary"]["parts"][2]["curve"]] == [
        (sampling, k) for sampling in ("temperature 0.8", "greedy") for k in (0, 1, 3)
    ]
    greedy = data["summary"]["parts"][0]["quality"]["greedy"]
    assert greedy["K = 2"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for text in (result.stdout, page.read_text(encoding="utf-8")):
        assert "ArS nucleus" in text
        assert "SpS greedy, K = 2" in text
        assert f"{greedy['plain']['score']['value']:.3f} (" in text
        assert "tokens/loop ÷ (K + 1)" in text
        assert "4 prompts, against K, nucleus of temperature 0.8 and top-p 0.95, and greedy, at most 16 tokens" in text
        assert "nucleus, 3" in text
        assert "greedy, 3" in text
    document = PaperDocument.read(file)
    assert json.loads(json.dumps(summarise_paper(document))) == data["summary"]
    again = invoke("bench", "--paper", "--from", file)
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout


def test_no_program_runs_unless_the_user_says_so(
    invoke: Invoke, table_bundle: Path, problems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("a program ran")

    monkeypatch.setattr("paceline_tools.benchmark.tasks.run_program", forbidden)
    monkeypatch.setattr("paceline_tools.benchmark.paper.run_program", forbidden)
    file = tmp_path / "paper.json"
    args = ("--prompts", f"humaneval:{problems}", *QUICK, "--raw", "--curve", "none", "--json", file)
    result = invoke("bench", table_bundle, "--paper", *args)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("8 without --run-generated-code") == 4
    data = json.loads(file.read_text(encoding="utf-8"))
    assert {one["score"] for one in data["parts"][0]["answers"]} == {None}
    assert data["run"]["shut_in"] is None
    assert check_tables(data) == 4 * 2 + 2 * 2


@pytest.fixture
def handler() -> Iterator[None]:
    """The command's own handler of SIGTERM, in this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_keeps_and_judges_what_is_there(
    invoke: Invoke,
    table_bundle: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    name: str,
) -> None:
    def interrupted(*args: Any, **options: Any) -> Iterator[Measurement | Failure]:
        for index, one in enumerate(measure(*args, **options)):
            yield one
            if index == 5:
                os.kill(os.getpid(), number)

    monkeypatch.setattr("paceline_tools.benchmark.paper.measure", interrupted)
    file, page = tmp_path / "paper.json", tmp_path / "paper.md"
    args = ("--prompts", f"humaneval:{problems}", *QUICK, "--raw", "--run-generated-code", "--json", file)
    result = invoke("bench", table_bundle, "--paper", *args, "--markdown", page)
    assert result.exit_code == code
    assert f"THE RUN WAS BROKEN OFF ({name})" in result.stdout
    assert "THE RUN WAS BROKEN OFF" in page.read_text(encoding="utf-8")
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [len(part["answers"]) for part in data["parts"]] == [6]
    assert all(one["score"] is not None for one in data["parts"][0]["answers"])
    assert data["run"]["complete"] is False
    assert invoke("bench", "--paper", "--from", file).stdout == result.stdout


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_answers_are_judged_loses_no_time_that_was_taken(
    invoke: Invoke,
    table_bundle: Path,
    problems: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    programs = 0

    def interrupted(program: str) -> Any:
        nonlocal programs
        programs += 1
        if programs == 3:
            os.kill(os.getpid(), number)
        return run_program(program)

    monkeypatch.setattr("paceline_tools.benchmark.tasks.run_program", interrupted)
    file = tmp_path / "paper.json"
    args = ("--prompts", f"humaneval:{problems}", *QUICK, "--raw", "--curve", "none", "--json", file)
    result = invoke("bench", table_bundle, "--paper", "--run-generated-code", *args)
    assert result.exit_code == code, result.output
    (part,) = json.loads(file.read_text(encoding="utf-8"))["parts"]
    assert len(part["measurements"]) == len(part["answers"]) == 4 * 2 * 4
    assert [one["score"] is None for one in part["answers"]] == [False] * 2 + [True] * 30
    assert {one["outcome"] for one in part["answers"][2:]} == {"not judged"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--paper", "--prompts", "demo"], "--paper measures humaneval and summaries"),
        (["--paper", "--prompts", "summaries"], "a 'document' and a 'reference' in each line"),
        (["--paper", "--prompts", "summaries:lines.jsonl"], "line 1: 'reference' should be a summary, or a list"),
        (["--paper", "--prompts", "humaneval:lines.jsonl"], "line 1: 'task_id' should be text"),
        (["--paper", "--temperature", "0.5"], "leave --temperature out"),
        (["--paper", "--top-p", "0.5"], "leave --top-p out"),
        (["--paper", "--html", "a.html"], "leave --html out"),
        (["--paper", "--curve", "0,1"], "none, or different numbers of at least 1"),
        (["--paper", "--curve", "2,2"], "none, or different numbers of at least 1"),
        (["--paper", "--json", "a", "--markdown", "a"], "--json and --markdown name the same file"),
        (["--run-generated-code"], "--run-generated-code is for --paper"),
        (["--curve", "1"], "--curve is for --paper"),
    ],
)
def test_wrong_usage(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text('{"document": "abc", "reference": 5}', encoding="utf-8")
    result = invoke("bench", table_bundle, *args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_documents_of_the_other_kind_are_told_apart(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"format": "paceline bench --paper", "version": 1}', encoding="utf-8")
    result = invoke("bench", "--from", path)
    assert result.exit_code == 2
    assert "it is one of `paceline bench --paper --json`" in result.stderr
    result = invoke("bench", "--paper", "--from", path)
    assert result.exit_code == 2
    assert "run.json is damaged: run should be an object, and parts a list" in result.stderr


def test_rouge_2_counts_pairs_of_words(documents: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    rows = [
        {"document": "d", "reference": "the cat sat on the mat"},
        {"document": "d", "reference": ["nothing of this", "the cat sat on the mat"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = read_task(f"summaries:{path}", raw=False, limit=None, count=None, run_code=False)
    judge, of_two = task.judges.values()
    # Of five pairs, "the cat", "on the" and "the mat" are in both: precision and recall are 3 / 5.
    assert judge("The cat lay on the mat.").score == pytest.approx(0.6)
    assert judge("the cat sat on the mat").score == 1.0
    assert judge("").score == 0.0
    assert of_two("the cat lay on the mat").score == pytest.approx(0.6)


def test_the_interval_of_a_mean_covers_it() -> None:
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(100):
        levels = rng.normal(0.5, 0.2, 25)  # of prompts
        values = levels[:, None] + rng.normal(0, 0.1, (25, 2))
        values[rng.random((25, 2)) < 0.1] = np.nan
        found = mean(values)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.value == pytest.approx(np.nanmean([np.nanmean(row) for row in values if not np.isnan(row).all()]))
        inside += found.low <= 0.5 <= found.high
    assert 88 <= inside <= 100  # 95 expected; outside of this once in a thousand seeds
    assert mean(np.full((2, 2), np.nan)) is None
    one = mean(np.array([[0.25]]))
    assert one is not None
    assert (one.value, one.low, one.high) == (0.25, None, None)
    of_repeats = mean(np.array([[0.0, 1.0, math.nan, 1.0]]))
    assert of_repeats is not None
    assert of_repeats.value == pytest.approx(2 / 3)
    assert of_repeats.low is not None


def test_a_real_pair(smol_bundle: Path, tmp_path: Path) -> None:
    problem = {
        "task_id": "Toy/0",
        "prompt": 'def add(a: int, b: int) -> int:\n    """Add two numbers."""\n',
        "entry_point": "add",
        "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    }
    problems, file = tmp_path / "problems.jsonl", tmp_path / "paper.json"
    problems.write_text(json.dumps(problem), encoding="utf-8")
    args = ("--max-new-tokens", 40, "--prompts", f"humaneval:{problems}", "--curve", "2", "--json", file)
    done = run_paceline("bench", smol_bundle, "--paper", "--run-generated-code", "--raw", *args)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    assert check_tables(data) == 4 * 2 + 2 * 2 + 2 * (2 * 2 + 1)
    answers = data["parts"][0]["answers"]
    assert len(answers) == 4
    assert {one["score"] for one in answers} <= {0.0, 1.0}
    assert all("\ndef" not in one["text"] for one in answers)  # ended at the end of the function
