"""`paceline demo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline_tools import demo
from paceline_tools.demo import PROMPTS
from paceline_tools.measure import Divergence

from .conftest import Invoke, run_paceline, write_table_bundle


def test_it_answers_measures_and_compares(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", tuple(demo.Prompt(f"prompt {i}", text) for i, text in enumerate("abc")))
    file = tmp_path / "figures.json"
    result = invoke("demo", table_bundle, "--max-new-tokens", 16, "--draft-tokens", 2, "--json", file)
    assert result.exit_code == 0, result.output
    for i in range(3):
        assert f"── prompt {i} ──" in result.stdout
    header = next(line for line in result.stdout.splitlines() if "speedup" in line)
    assert header.split()[:5] == ["tokens/s", "plain", "K", "=", "2"]
    assert "Plain and speculative texts are identical for 3 of 3 prompts." in result.stdout
    assert result.stderr.count("measure: ") == 3

    document = json.loads(file.read_text())
    assert list(document) == ["command", "machine", "prompts"]
    assert list(document["prompts"]) == ["prompt 0", "prompt 1", "prompt 2"]
    for found in document["prompts"].values():
        assert found["identical"]
        assert found["speedup"] > 0
        assert len(found["plain_runs"]) == len(found["speculative_runs"]) == 4
    assert [path.name for path in tmp_path.glob("figures.json*")] == ["figures.json"]


def test_texts_that_part_are_shown(invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPTS", (demo.Prompt("one", "a"), demo.Prompt("two", "b"), demo.Prompt("three", "c")))
    found = iter((Divergence(5, 65, 66, 0.031, (65, 66)), Divergence(7, 65, None, 2.5, (70, 71)), None))
    monkeypatch.setattr("paceline_tools.measure.find_divergence", lambda *_: next(found))
    result = invoke("demo", table_bundle, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "identical for 1 of 3 prompts" in text
    assert "the target's two best; the two best logits are 0.031 apart" in text
    assert "speculative the end, NOT the target's two best; the two best logits are 2.5 apart" in text
    assert "to token 5" in text


def test_the_prompts_are_those_of_the_readme() -> None:
    assert [prompt.name for prompt in PROMPTS] == ["write a function", "explain a concept", "fix a bug"]
    assert PROMPTS[2].text.endswith("    return s / len(x)\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft-tokens", "0"], "auto or a number of at least 1"),
        (["--repeats", "0"], "is not in the range x>=1"),
        (["--max-new-tokens", "1"], "is not in the range x>=2"),
        (["--json", "nowhere/figures.json"], "there is no folder"),
        (["--json", ""], "got an empty text where a path is expected"),
        (["--json", "/proc/figures.json"], "/proc/figures.json cannot be written"),
        (["--json", "/dev/null"], "/dev/null is not a regular file"),
        (["--threads", "0"], "0 is not in the range 1<=x<=1024"),
        (["--threads", "1000000"], "1000000 is not in the range 1<=x<=1024"),
    ],
)
def test_wrong_usage(invoke: Invoke, tmp_path: Path, args: list[str], message: str) -> None:
    result = invoke("demo", write_table_bundle(tmp_path / "tables"), *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [(["--draft-tokens", 9999999], "use at most 63"), ([], "tokens, but the target model's context holds 64")],
)
def test_what_cannot_be_answered_is_said_before_anything_is_printed(
    invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch, args: list[object], message: str
) -> None:
    last = "c" if args else "c" * 64
    monkeypatch.setattr(demo, "PROMPTS", tuple(demo.Prompt(text[0], text) for text in ("a", "b", last)))
    result = invoke("demo", table_bundle, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_figures_go_through_a_link_to_its_file(
    invoke: Invoke, table_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PROMPTS", (demo.Prompt("one", "a"),))
    (tmp_path / "link.json").symlink_to("file.json")
    args = ("--max-new-tokens", 4, "--repeats", 1, "--json", tmp_path / "link.json")
    assert invoke("demo", table_bundle, *args).exit_code == 0
    assert (tmp_path / "link.json").is_symlink()
    assert list(json.loads((tmp_path / "file.json").read_text())["prompts"]) == ["one"]


def test_a_bundle_without_a_draft_is_refused(invoke: Invoke, table_bundle: Path, tmp_path: Path) -> None:
    result = invoke("demo", write_table_bundle(tmp_path / "single", draft=False))
    assert result.exit_code == 2
    assert "has no draft model" in result.stderr


def test_a_real_pair(smol_bundle: Path) -> None:
    done = run_paceline("demo", smol_bundle, "--max-new-tokens", 8, "--repeats", 1)
    assert done.returncode == 0, done.stderr
    assert "identical for 3 of 3 prompts" in done.stdout  # the target is fp32: no near-ties to tip
