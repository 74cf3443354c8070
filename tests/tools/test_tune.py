"""`paceline tune` on a real bundle, and what becomes of its profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import SamplingParams
from paceline.cost_profile import CostProfile, default_folder
from paceline.errors import ProfileError
from paceline.planner import MOST_DRAFT_TOKENS
from paceline.theory import speedup

from .conftest import Invoke, environment, run_paceline

LENGTHS = (32, 512)


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture(scope="module")
def tuned(smol_bundle: Path, cache_home: Path) -> dict[str, Any]:
    done = run_paceline("tune", smol_bundle, "--lengths", "512,32", "--repeats", 3, "--json", env=environment())
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_the_profile_holds_what_was_measured(tuned: dict[str, Any], smol_bundle: Path, cache_home: Path) -> None:
    path = Path(tuned["path"])
    assert path.parent == cache_home / "paceline" / "profiles" == default_folder()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    profile = CostProfile.read(path)
    assert json.loads(profile.to_json()) == tuned["profile"]
    assert profile.lengths == LENGTHS
    assert [len(passes) for passes in profile.target_pass] == [MOST_DRAFT_TOKENS + 1] * 2
    assert profile.draft_step is not None
    for passes, step in zip(profile.target_pass, profile.draft_step, strict=True):
        # In fp32 the target reads four times the draft's bytes, and more rows are more work.
        assert step < passes[0] < passes[-1]
    assert str(smol_bundle) not in path.read_text()


def test_predictions_are_the_theorys(tuned: dict[str, Any]) -> None:
    costs = CostProfile.read(Path(tuned["path"])).costs()
    assert {one["length"] for one in tuned["predictions"]} == set(LENGTHS)
    for one in tuned["predictions"]:
        at = costs.at(one["length"])
        first = at.target(1)
        expected = [
            speedup(
                one["acceptance"],
                k,
                at.draft_step / first,
                verification_cost=lambda k, at=at, first=first: at.target(k + 1) / first,  # type: ignore[misc]
            )
            for k in range(MOST_DRAFT_TOKENS + 1)
        ]
        assert list(one["speedups"].values()) == pytest.approx(expected[1:])
        assert one["best_speedup"] == pytest.approx(max(expected))
        assert one["best"] == expected.index(max(expected))


def test_load_plans_by_the_profile_that_fits(tuned: dict[str, Any], smol_bundle: Path) -> None:
    decoder = paceline.load(smol_bundle)
    assert decoder.costs == CostProfile.read(Path(tuned["path"])).costs()
    for sampling in (SamplingParams(), SamplingParams(1.0, seed=3)):
        generation = decoder.generate("Once upon a time", sampling, max_new_tokens=24)
        list(generation)
        assert (
            generation.stats.costs_from
            == f"profile {Path(tuned['path']).name}, measured " + (tuned["profile"]["measured_at"])
        )
        assert generation.stats.predicted_speedup is not None
        assert 0.3 < generation.stats.predicted_speedup < 10
    assert paceline.load(smol_bundle, profile=tuned["path"]).costs == decoder.costs
    assert paceline.load(smol_bundle, profile=None).costs is None


def test_a_seed_gives_the_same_text_by_the_same_profile(tuned: dict[str, Any], smol_bundle: Path) -> None:
    decoder = paceline.load(smol_bundle, profile=tuned["path"])

    def steps() -> list[Any]:
        return list(decoder.generate("Once upon a time", SamplingParams(1.0, seed=5), max_new_tokens=32))

    assert steps() == steps()


def test_generate_says_what_it_planned_by(
    invoke: Invoke, tuned: dict[str, Any], smol_bundle: Path, cache_home: Path
) -> None:
    args = ("generate", smol_bundle, "--prompt", "Once upon a time", "--max-new-tokens", 8, "--json", "--stats")
    name = Path(tuned["path"]).name
    for profile, costs_from in (("auto", f"profile {name}"), (tuned["path"], f"profile {name}"), ("none", "measured")):
        result = invoke(*args, "--profile", profile)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["settings"]["profile"] == profile
        assert found["stats"]["costs_from"].startswith(costs_from)
        assert f"costs {costs_from}" in result.stderr
    # Another number of threads is another setup.
    measured = tuned["profile"]["setup"]["threads"]  # 1 where the tests have a core each, 0 where they have all
    other = 1 if measured != 1 else 2
    done = run_paceline(*args, "--threads", other, env=environment())
    assert done.returncode == 0
    assert json.loads(done.stdout)["stats"]["costs_from"] == "measured"
    assert f"does not fit (threads {measured} where {other} is expected) and is not used" in done.stderr
    done = run_paceline(*args, "--threads", other, "--profile", tuned["path"], env=environment())
    assert done.returncode == 1
    assert f"threads {measured} where {other} is expected" in done.stderr
    assert done.stdout == ""


def test_a_damaged_profile_does_not_stop_a_load(
    tuned: dict[str, Any], smol_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_folder() / Path(tuned["path"]).name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tuned["profile"])[:500])
    assert paceline.load(smol_bundle).costs is None
    with pytest.raises(ProfileError, match="is damaged"):
        paceline.load(smol_bundle, profile=path)


def test_the_tables_of_a_tiny_pair(tiny_bundle: Path, cache_home: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    done = run_paceline("tune", tiny_bundle, "--repeats", 3, "-o", output, env=environment())
    assert done.returncode == 0, done.stderr
    assert f"Stored in {output}." in done.stdout
    assert "target, 1 row " in done.stdout
    assert f"target, {MOST_DRAFT_TOKENS + 1} rows" in done.stdout
    assert "Predicted speedup over plain decoding at length" in done.stdout
    assert "warm up" in done.stderr
    assert paceline.load(tiny_bundle, profile=output).costs is not None
    assert os.listdir(tmp_path) == ["profile.json"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_profile_that_cannot_be_written_is_printed_all_the_same(
    tiny_bundle: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    code = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "
        "runpy.run_module('paceline_tools', run_name='__main__')"
    )
    path = tmp_path / "p.json"
    arguments = ["tune", str(tiny_bundle), "--repeats", "3", "-o", str(path), *options]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 1
    assert f"{path} cannot be written (File too large), so the measurements are only printed" in done.stderr
    assert not list(tmp_path.iterdir())
    if options:
        printed = json.loads(done.stdout)
        assert printed["path"] is None
        assert printed["profile"]["target_pass"]
    else:
        assert "target, 1 row " in done.stdout
        assert "Stored in" not in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--lengths", "0"), "lengths of at least 1 with commas between them are expected"),
        (("--lengths", "a,b"), "lengths of at least 1"),
        (("--lengths", "99999999"), "use at most"),
        (("--repeats", "1"), "1 is not in the range"),
    ],
)
def test_wrong_usage_is_said(tiny_bundle: Path, args: tuple[str, ...], message: str) -> None:
    done = run_paceline("tune", tiny_bundle, *args)
    assert done.returncode == 2
    assert message in done.stderr
