"""Whether two runs of a benchmark agree: how that is counted, by made-up runs, and once on a real pair."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .bench_documents import made_up
from .measure_agreement import agreements, main, report, share


def test_runs_that_differ_by_noise_agree() -> None:
    found = agreements([made_up(seed) for seed in range(5)])
    assert {one.pairs for one in found} == {10}
    assert len(found) == 4 * 4 - 2  # four methods, and plain decoding has no speedup
    assert share(found) >= 0.9


def test_a_run_that_is_slower_as_a_whole_disagrees_in_times_alone() -> None:
    runs = [made_up(1, categories=("code",), noise=0.01), made_up(2, categories=("code",), noise=0.01, slower=3.0)]
    found = agreements(runs)
    inside = {(one.method, one.figure): one.inside for one in found}
    assert {inside[key] for key in inside if key[1].startswith("ms")} == {0}
    assert {inside[key] for key in inside if key[1].startswith("speedup")} == {1}
    assert "Inside, over all: 42.9 %" in report(found)  # 6 of 14


@pytest.mark.slow
def test_five_runs_of_a_real_pair_agree(smol_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--runs", "5", "--output", str(tmp_path), str(smol_bundle)]
    code = main([*args, "--max-new-tokens", "48", "--repeats", "2", "--draft-tokens", "2"])
    print(capsys.readouterr().out, file=sys.stderr)
    assert code == 0
    assert len(list(tmp_path.glob("run-*.json"))) == 5
