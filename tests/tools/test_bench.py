"""`paceline bench` from the command line, on table models, and once on a real pair."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ModelOutputError
from paceline.testing import TableModel
from paceline_tools.benchmark.figures import summarise
from paceline_tools.benchmark.measurement import Failure, Measurement, measure
from paceline_tools.benchmark.meters import EnergyMeter, read_bandwidth

from .bench_documents import made_up
from .conftest import CONTEXT, Invoke, environment, run_paceline, write_table_bundle
from .test_bench_figures import FIGURES, check_summary

SHORT = ("--max-new-tokens", 24, "--repeats", 2, "--prompts")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "category": category} for text, category in (("ab", "x"), ("cd", "x"), ("efg", "y"))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


class Clock:
    """Advances by a millisecond, give or take a little, whenever it is looked at."""

    def __init__(self, seed: int, slower: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._slower = slower
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e-3 * self._slower * float(np.exp(self._rng.normal(0, 0.1)))
        return self._now


def test_it_measures_every_method_and_writes_what_it_prints(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    file, html = tmp_path / "run.json", tmp_path / "run.html"
    args = ("--draft-tokens", "auto,2", "--temperature", "0,0.8", "--verification", "token", "--json", file)
    result = invoke("bench", table_bundle, *SHORT, prompts, *args, "--html", html)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("paceline bench", 1)
    assert data["run"]["complete"] is True
    assert [(one["sampling"], one["name"]) for one in data["methods"]] == [
        ("greedy", "plain"),
        ("greedy", "auto, token rule"),
        ("greedy", "K = 2, token rule"),
        ("temperature 0.8", "plain"),
        ("temperature 0.8", "auto, token rule"),
        ("temperature 0.8", "K = 2, token rule"),
    ]
    assert len(data["measurements"]) == 6 * 3 * 2
    assert check_summary(data) == 6 * 3 * FIGURES
    greedy = data["summary"]["samplings"]["greedy"]["methods"]["auto, token rule"]["all"]
    assert greedy["same_as_plain"] == {"same": 3, "prompts": 3}
    assert f"{greedy['speedup']['value']:.2f}×" in result.stdout
    assert "36 texts of 3 prompts, 2 repeats, at most 24 new tokens" in result.stdout
    assert html.read_text(encoding="utf-8").count("<svg") == 12
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run.html", "run.json"]

    again = invoke("bench", "--from", file, "--compare", file)
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith(result.stdout)
    assert "No regressions" in again.stdout


def test_methods_take_turns(invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert invoke("bench", table_bundle, *SHORT, prompts, "--json", file).exit_code == 0
    order = [(one["repeat"], one["prompt"], one["method"]) for one in json.loads(file.read_text())["measurements"]]
    assert order == [
        *((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0), (0, 2, 0), (0, 2, 1)),
        *((1, 0, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1), (1, 2, 0)),
    ]


@pytest.mark.parametrize(("slower", "exit_code"), [(1.0, 0), (1.15, 1)])
def test_a_slower_run_is_told_from_the_same_again(
    invoke: Invoke,
    table_bundle: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slower: float,
    exit_code: int,
) -> None:
    old = tmp_path / "old.json"
    # As many repeats as by default: two of three prompts do not tell 15 % from a machine that wanders.
    args = (*SHORT, prompts, "--draft-tokens", 2, "--repeats", 4)
    monkeypatch.setattr(time, "perf_counter", Clock(1, 1.0))
    assert invoke("bench", table_bundle, *args, "--json", old).exit_code == 0
    monkeypatch.setattr(time, "perf_counter", Clock(2, slower))
    result = invoke("bench", table_bundle, *args, "--compare", old)
    assert result.exit_code == exit_code, result.output
    if slower == 1:
        assert "No regressions: " in result.stdout
    else:
        lines = [re.split(r"  +", line) for line in result.stdout.splitlines()]
        assert [line[-1] for line in lines if line[:2] == ["greedy: plain", "ms/token"]] == ["slower"]


def test_ctrl_c_keeps_what_is_there(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **options: Any) -> Iterator[Measurement | Failure]:
        for index, one in enumerate(measure(*args, **options)):
            yield one
            if index == 4:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("paceline_tools.benchmark.runner.measure", interrupted)
    file, html = tmp_path / "run.json", tmp_path / "run.html"
    result = invoke("bench", table_bundle, *SHORT, prompts, "--json", file, "--html", html)
    assert result.exit_code == 130
    assert "THE RUN WAS BROKEN OFF" in result.stdout
    data = json.loads(file.read_text())
    assert data["run"]["complete"] is False
    assert len(data["measurements"]) == 5
    assert "was broken off" in html.read_text(encoding="utf-8")


# The command as its entry point runs it, which signals itself behind the fifth text.
SIGNALLED = """
import os, sys
from paceline_tools.__main__ import main
from paceline_tools.benchmark import runner
measure = runner.measure
def signalled(*args, **options):
    for index, one in enumerate(measure(*args, **options)):
        yield one
        if index == 4:
            os.kill(os.getpid(), int(number))
runner.measure = signalled
number = sys.argv.pop(1)
main()
"""


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_process_that_is_signalled_keeps_what_is_there(
    tiny_bundle: Path, prompts: Path, tmp_path: Path, number: int, code: int, name: str
) -> None:
    file, html = tmp_path / "run.json", tmp_path / "run.html"
    args = ("bench", tiny_bundle, "--raw", *SHORT, prompts, "--draft-tokens", 2, "--json", file, "--html", html)
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken off; what was measured is kept." in done.stderr
    assert f"THE RUN WAS BROKEN OFF ({name})" in done.stdout
    data = json.loads(file.read_text())
    assert (data["run"]["complete"], data["run"]["ended_by"], len(data["measurements"])) == (False, name, 5)
    assert f"was broken off ({name})" in html.read_text(encoding="utf-8")


def test_ctrl_c_while_results_are_saved_loses_nothing(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(threads: int) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return read_bandwidth(threads)

    monkeypatch.setattr("paceline_tools.benchmark.loaded.read_bandwidth", interrupted)
    file = tmp_path / "run.json"
    result = invoke("bench", table_bundle, *SHORT, prompts, "--json", file)
    assert result.exit_code == 130, result.output
    assert "12 texts of 3 prompts" in result.stdout
    assert json.loads(file.read_text())["run"]["complete"] is True
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fault_in_the_middle_keeps_what_is_there(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, passes = TableModel.forward, 0

    def failing(self: TableModel, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == 200:
            raise ModelOutputError("The session ran out of memory.")
        return forward(self, *args, **options)

    monkeypatch.setattr(TableModel, "forward", failing)
    file = tmp_path / "run.json"
    result = invoke("bench", table_bundle, *SHORT, prompts, "--json", file)
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: The session ran out of memory.\n")
    assert "THE RUN WAS BROKEN OFF (The session ran out of memory.)" in result.stdout
    data = json.loads(file.read_text())
    assert (data["run"]["complete"], data["run"]["ended_by"]) == (False, "The session ran out of memory.")
    assert 0 < len(data["measurements"]) < 12
    again = invoke("bench", "--from", file)
    assert again.exit_code == 0
    assert again.stdout == result.stdout


def test_a_document_whose_place_has_gone_is_written_elsewhere(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, spare = tmp_path / "gone", tmp_path / "spare"
    gone.mkdir()
    spare.mkdir()

    def removing(*args: Any, **options: Any) -> Iterator[Measurement | Failure]:
        yield from measure(*args, **options)
        gone.rmdir()

    monkeypatch.setattr("paceline_tools.benchmark.runner.measure", removing)
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    result = invoke("bench", table_bundle, *SHORT, prompts, "--json", gone / "run.json")
    assert result.exit_code == 1
    rescued = spare / f"run-{os.getpid()}.json"
    assert f"it was written to {rescued} instead" in result.stderr
    assert "ms/token" in result.stdout
    assert json.loads(rescued.read_text())["run"]["complete"] is True


def test_short_texts_have_figures_too(invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    args = ("--max-new-tokens", 3, "--repeats", 2, "--prompts", prompts, "--json", file)
    assert invoke("bench", table_bundle, *args).exit_code == 0
    data = json.loads(file.read_text())
    figures = data["summary"]["samplings"]["greedy"]["methods"]["auto"]["all"]
    assert figures["timed_texts"] == 6
    assert figures["speedup"]["value"] > 0
    assert check_summary(data) == 2 * 3 * FIGURES


def test_a_limit_looks_at_the_first_prompts_alone(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    assert invoke("bench", table_bundle, *SHORT, prompts, "--limit", 2, "--json", file).exit_code == 0
    assert [one["category"] for one in json.loads(file.read_text())["prompts"]] == ["x", "x"]


def test_prompts_beyond_the_context_are_skipped_and_counted(invoke: Invoke, table_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    fits = CONTEXT - 24  # in bytes, each a token
    rows = [{"prompt": "a" * length} for length in (fits, fits + 1, 3)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    file = tmp_path / "run.json"
    result = invoke("bench", table_bundle, "--raw", *SHORT, path, "--json", file)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert [one["tokens"] for one in data["prompts"]] == [fits, 3]
    assert [one["tokens"] for one in data["skipped"]] == [fits + 1]
    assert "1 prompts were skipped: with 24 new tokens they exceed the context of 64." in result.stdout
    path.write_text(json.dumps({"prompt": "a" * 99}), encoding="utf-8")
    result = invoke("bench", table_bundle, "--raw", *SHORT, path)
    assert result.exit_code == 2
    assert "All 1 prompts were skipped: the shortest has 99 tokens" in result.stderr


# A disk of 8 kB, in namespaces of its own.
SMALL_DISK = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNT = 'mount -t tmpfs -o size=8k small "$0" && exec "$@"'


def test_a_run_whose_disk_is_full_is_written_to_the_folder_for_temporary_files(
    tiny_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    full, spare = tmp_path / "full", tmp_path / "spare"
    full.mkdir()
    spare.mkdir()
    try:
        subprocess.run([*SMALL_DISK, MOUNT, str(full), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    command = (sys.executable, "-m", "paceline_tools", "bench", tiny_bundle, "--raw", *SHORT, prompts)
    look = 'mount -t tmpfs -o size=8k small "$0" && "$@"; code=$?; ls -A "$0" >&2; exit $code'
    files = ("--json", full / "run.json", "--html", full / "run.html")
    done = subprocess.run(
        [*SMALL_DISK, look, *map(str, (full, *command, *files))],
        capture_output=True,
        text=True,
        env={**environment(), "TMPDIR": str(spare)},
        timeout=300,
    )
    assert done.returncode == 1
    for kind in ("json", "html"):
        (rescued,) = spare.glob(f"run-*.{kind}")
        assert f"run.{kind}: No space left on device; it was written to {rescued} instead" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")  # and no file lies on the disk that is full
    assert "ms/token" in done.stdout
    (document,) = spare.glob("run-*.json")
    assert json.loads(document.read_text())["run"]["complete"] is True


def test_a_disk_that_is_full_leaves_no_half_file_and_loses_no_figure(tmp_path: Path) -> None:
    document = made_up(1)
    old = tmp_path / "old.json"
    old.write_text(document.to_json(summarise(document)), encoding="utf-8")

    def limit() -> None:  # Python ignores the signal, so that writing fails with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    (tmp_path / "page.html").write_text("before", encoding="utf-8")
    done = run_paceline("bench", "--from", old, "--html", tmp_path / "page.html", preexec_fn=limit)
    assert done.returncode == 1
    assert f"{tmp_path / 'page.html'}: File too large" in done.stderr
    assert "K = 4" in done.stdout
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "page.html"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--draft-tokens", "auto,0"], "auto or a number of at least 1"),
        (["--draft-tokens", "two"], "auto or a number of at least 1"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "hot"], "numbers with commas between them are expected"),
        (["--top-p", "2"], "--top-p must be"),
        (["--prompts", "nowhere.jsonl"], "cannot be read (No such file or directory)"),
        (["--prompts", "spec-bench"], "give its file"),
        (["--repeats", "0"], "is not in the range x>=1"),
        (["--json", "nowhere/run.json"], "there is no folder"),
        (["--compare", "nowhere.json"], "does not exist"),
        (["--tolerance", "nan"], "a number is expected"),
        (["--tolerance", "0.1"], "--tolerance is for --compare"),
        (["--seed", "1", "--no-seed"], "--seed and --no-seed exclude each other"),
        (["--json", "run", "--html", "./run"], "--json and --html name the same file"),
        (["--drafter", "hybrid", "--draft-tokens", "2"], "--drafter hybrid plans its drafts: add auto"),
        (["--from", __file__], "or --from with a run that was saved"),
        (["--seed", str(2**64 - 1), "--repeats", "2"], f"got {2**64}"),
    ],
)
def test_wrong_usage(
    invoke: Invoke, table_bundle: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(table_bundle.parent)
    result = invoke("bench", table_bundle, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_nothing_that_a_run_reads_is_written_over(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    document = made_up(1)
    run = tmp_path / "run.json"
    run.write_text(document.to_json(summarise(document)), encoding="utf-8")
    text = tmp_path / "humaneval.jsonl"
    text.write_bytes(prompts.read_bytes())
    other = write_table_bundle(tmp_path / "other")
    before = {path: path.read_bytes() for path in (run, text, table_bundle / "paceline.json", other / "paceline.json")}
    for args in (
        ("--from", run, "--html", run),
        (table_bundle, "--prompts", text, "--json", text),
        (table_bundle, "--prompts", f"humaneval:{text}", "--html", text.parent / "." / text.name),
        (table_bundle, "--json", table_bundle / "paceline.json"),
        (table_bundle, "--json", other / "paceline.json"),
        (table_bundle, "--html", table_bundle / "page.html"),
    ):
        result = invoke("bench", *args)
        assert result.exit_code == 2
        assert "would be lost" in result.stderr or "lies in the bundle" in result.stderr
    assert {path: path.read_bytes() for path in before} == before
    assert not (table_bundle / "page.html").exists()


def test_runs_with_nothing_in_common_do_not_pass(invoke: Invoke, tmp_path: Path) -> None:
    document = made_up(1)
    run, other = tmp_path / "run.json", tmp_path / "other.json"
    run.write_text(document.to_json(summarise(document)), encoding="utf-8")
    renamed = replace(document, prompts=tuple(replace(one, name=f"another {one.name}") for one in document.prompts))
    other.write_text(renamed.to_json(summarise(renamed)), encoding="utf-8")
    assert invoke("bench", "--from", run, "--compare", run).exit_code == 0
    result = invoke("bench", "--from", run, "--compare", other)
    assert result.exit_code == 1
    assert "no method with prompts in common" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Give the folder of a bundle, or --from"),
        (["--from", __file__], "is no JSON document"),
        (["--from", __file__, "--repeats", "2"], "--from measures nothing, so --repeats cannot be honoured"),
    ],
)
def test_wrong_usage_without_a_bundle(invoke: Invoke, args: list[str], message: str) -> None:
    result = invoke("bench", *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_bundle_without_a_draft_needs_another_drafter(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    single = write_table_bundle(tmp_path / "single", draft=False)
    result = invoke("bench", single, *SHORT, prompts)
    assert result.exit_code == 2
    assert "export with --draft, or measure --drafter prompt-lookup" in result.stderr
    assert invoke("bench", single, *SHORT, prompts, "--drafter", "prompt-lookup").exit_code == 0


def test_a_bundle_without_a_template_needs_raw_prompts(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    base = write_table_bundle(tmp_path / "base", template=None)
    result = invoke("bench", base, *SHORT, prompts)
    assert result.exit_code == 2
    assert "give --raw" in result.stderr
    assert invoke("bench", base, *SHORT, prompts, "--raw").exit_code == 0


def test_seeds_make_sampled_texts_repeatable(invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    def texts(*args: str) -> list[str]:
        file = tmp_path / "run.json"
        assert (
            invoke("bench", table_bundle, *SHORT, prompts, "--temperature", "1", *args, "--json", file).exit_code == 0
        )
        return [one["text"] for one in json.loads(file.read_text())["measurements"]]

    assert texts() == texts()
    assert texts() != texts("--seed", "2")
    assert texts("--no-seed") != texts("--no-seed")


def test_energy_is_summed_over_packages_and_across_an_overflow(tmp_path: Path) -> None:
    for name, limit in (("intel-rapl:0", 1000), ("intel-rapl:1", 10**9), ("intel-rapl:0:0", 10**9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text("900\n")
        (tmp_path / name / "max_energy_range_uj").write_text(f"{limit}\n")
    (tmp_path / "intel-rapl:2").mkdir()  # without a counter
    meter = EnergyMeter(tmp_path)
    before = meter.read()
    assert before == {"intel-rapl:0": 900, "intel-rapl:1": 900}
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("99\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("2000900\n")
    assert meter.since(before) == pytest.approx(200e-6 + 2.0)
    assert EnergyMeter(tmp_path / "nothing").since({}) is None


def test_memory_is_read_at_a_plausible_speed() -> None:
    assert 1e8 < read_bandwidth(1) < 1e13


def test_a_real_pair(smol_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    args = ("--max-new-tokens", 12, "--repeats", 1, "--draft-tokens", "auto,3", "--prompts", "-", "--json", file)
    done = run_paceline("bench", smol_bundle, *args, input="Name three rivers.")
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert check_summary(data) == 3 * FIGURES
    for one in data["measurements"]:  # a limit or an end may cut the last step alone
        assert one["steps_tokens"][1:-1] == [accepted + 1 for accepted in one["steps_accepted"][1:-1]]
    for found in data["summary"]["samplings"]["greedy"]["methods"].values():
        assert abs(found["all"]["shares"]["outside"]) < 0.02
        assert found["all"]["shares"]["target"] > 0.3


def test_several_texts_at_once(invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    args = (*SHORT, prompts, "--draft-tokens", 2, "--concurrency", "1,2", "--json", file)
    result = invoke("bench", table_bundle, *args)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    crowds = data["crowds"]
    assert [(one["repeat"], tuple(one["prompts"]), one["method"]) for one in crowds] == [
        *((0, (0, 1), 0), (0, (0, 1), 1), (0, (2, 0), 1), (0, (2, 0), 0)),
        *((1, (0, 1), 1), (1, (0, 1), 0), (1, (2, 0), 0), (1, (2, 0), 1)),
    ]
    # What a text says does not depend on its company.
    alone = {(one["method"], one["prompt"]): sum(one["steps_tokens"]) for one in data["measurements"]}
    for one in crowds:
        for prompt, tokens, seconds in zip(one["prompts"], one["steps_tokens"], one["steps_s"], strict=True):
            assert sum(tokens) == alone[one["method"], prompt]
            assert sum(seconds) <= one["wall_s"] + 1e-3
    figures = {one["method"]: one for one in data["summary"]["samplings"]["greedy"]["crowds"]}
    for index, name in enumerate(("plain", "K = 2")):
        medians = [
            statistics.median(
                1000 * one["wall_s"] / sum(map(sum, one["steps_tokens"]))
                for one in crowds
                if one["method"] == index and one["prompts"] == group
            )
            for group in ([0, 1], [2, 0])
        ]
        assert figures[name]["ms_per_token"]["value"] == pytest.approx(statistics.geometric_mean(medians))
        first = sorted(1000 * text[0] for one in crowds if one["method"] == index for text in one["steps_s"])
        assert figures[name]["first_token_ms"]["p50"] == first[(len(first) - 1) // 2]
    ratio = figures["plain"]["ms_per_token"]["value"] / figures["K = 2"]["ms_per_token"]["value"]
    assert figures["K = 2"]["speedup"]["value"] == pytest.approx(ratio)
    assert "2: K = 2" in result.stdout
    assert invoke("bench", "--from", file).stdout == result.stdout
    wrong = invoke("bench", table_bundle, *SHORT, prompts, "--concurrency", "0")
    assert wrong.exit_code == 2
    assert "numbers from 1 to 1024 are expected" in wrong.stderr


def test_another_bundle_of_the_checkpoint_beside(
    invoke: Invoke, table_bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    other = write_table_bundle(tmp_path / "int8")
    args = (*SHORT, prompts, "--draft-tokens", 2, "--concurrency", "2", "--beside", other, "--json", file)
    result = invoke("bench", table_bundle, *args)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert [(one["name"], one["bundle"]) for one in data["methods"]] == [
        *(("plain", ""), ("K = 2", ""), ("int8: plain", "int8"), ("int8: K = 2", "int8")),
    ]
    assert check_summary(data) == 4 * 3 * FIGURES
    figures = data["summary"]["samplings"]["greedy"]["methods"]
    assert figures["int8: plain"]["all"]["speedup"]["value"] > 0  # over plain decoding with the first bundle
    assert len(data["summary"]["samplings"]["greedy"]["forecast"]) == 1
    assert len(data["crowds"]) == 4 * 2 * 2
    assert list(data["run"]["beside"]) == ["int8"]
    assert "int8: tiny-target (int4) with tiny-draft (int4)" in result.stdout
    again = invoke("bench", table_bundle, *args, "--beside", other)
    assert again.exit_code == 2
    assert "a bundle of this name is there already" in again.stderr
    manifest = other / "paceline.json"
    manifest.write_text(manifest.read_text().replace("0" * 64, "1" * 64))
    strange = invoke("bench", table_bundle, *args)
    assert strange.exit_code == 2
    assert "its checkpoint is another than that of" in strange.stderr


def test_energy_of_gpus_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a stand-in for NVML: no GPU was there to run it on."""
    joules = iter((5000, 5000, 7500))
    stand_in = types.ModuleType("pynvml")
    vars(stand_in).update(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(joules),
    )
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    meter = EnergyMeter(tmp_path, gpu=True)
    before = meter.read()
    assert before == {"nvml:0": 5_000_000}
    assert meter.since(before) == pytest.approx(2.5)
    assert EnergyMeter(tmp_path).read() == {}
