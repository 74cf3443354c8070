"""Do two runs of the same benchmark agree within the intervals that they print? They should, nine times of ten.

    python -m tests.tools.measure_agreement --runs 5 --output runs/ BUNDLE --prompts humaneval --limit 12 --repeats 2

Runs `paceline bench` again and again, each time in a process of its own, with the options behind BUNDLE, and compares
each pair of runs. Of ms/token, of speedup, and of both with the prompt included, it counts by method how often each
run's figure lies in the other's interval ("inside"), and how often the intervals overlap. Exit code 1 where fewer than
nine of ten are inside. `--output` keeps the documents; those of an earlier, broken-off call are taken as they are.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_tools.benchmark.document import Document
from paceline_tools.benchmark.figures import summarise
from paceline_tools.tables import percent, table

FIGURES = ("ms_per_token", "speedup", "ms_per_token_whole", "speedup_whole")
LEAST = 0.9


@dataclass(frozen=True, slots=True)
class Agreement:
    """One figure of one method over all pairs of runs.

    Attributes:
        method: its sampling and name.
        figure: of `FIGURES`.
        pairs: that have it with an interval.
        inside: in which each run's value lies in the other's interval.
        overlapping: whose intervals overlap.
        widest: largest value over smallest, over all runs.
        reach: mean of (high ÷ low) of the intervals.
    """

    method: str
    figure: str
    pairs: int
    inside: int
    overlapping: int
    widest: float
    reach: float


def agreements(documents: Sequence[Document]) -> list[Agreement]:
    """All figures of all methods, over all pairs of the runs."""
    summaries = [summarise(document) for document in documents]
    found = []
    for method, figure in itertools.product(documents[0].methods, FIGURES):
        ones = [summary["samplings"][method.sampling]["methods"][method.name]["all"][figure] for summary in summaries]
        ones = [one for one in ones if one and one["low"] is not None]
        pairs = list(itertools.combinations(ones, 2))
        if not pairs:
            continue
        values = [one["value"] for one in ones]
        found.append(
            Agreement(
                f"{method.sampling}: {method.name}",
                figure,
                len(pairs),
                sum(a["low"] <= b["value"] <= a["high"] and b["low"] <= a["value"] <= b["high"] for a, b in pairs),
                sum(a["low"] <= b["high"] and b["low"] <= a["high"] for a, b in pairs),
                max(values) / min(values),
                sum(one["high"] / one["low"] for one in ones) / len(ones),
            )
        )
    return found


def report(found: Sequence[Agreement]) -> str:
    """A table, and the share of all."""
    rows = [
        (
            one.method,
            one.figure,
            str(one.pairs),
            percent(one.inside / one.pairs),
            percent(one.overlapping / one.pairs),
            f"{one.widest:.3f}",
            f"{one.reach:.3f}",
        )
        for one in found
    ]
    header = ("method", "figure", "pairs", "inside", "overlapping", "most / least", "high / low")
    return (
        f"{table(header, rows)}\n\nInside, over all: {percent(share(found))} (at least {percent(LEAST)} is expected)."
    )


def share(found: Sequence[Agreement]) -> float:
    """How often two runs agree, over all figures."""
    return sum(one.inside for one in found) / sum(one.pairs for one in found)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_agreement", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs, at least 2 (default: 5, which makes 10 pairs)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs' documents")
    parser.add_argument("bundle", type=Path)
    options, bench = parser.parse_known_args(arguments)
    if options.runs < 2:
        parser.error("--runs should be at least 2")
    options.output.mkdir(parents=True, exist_ok=True)
    documents = []
    for number in range(1, options.runs + 1):
        path = options.output / f"run-{number}.json"
        if not path.exists():
            print(f"run {number} of {options.runs}", file=sys.stderr)
            command = [sys.executable, "-m", "paceline_tools", "bench", str(options.bundle), *bench]
            subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        documents.append(Document.read(path))
    found = agreements(documents)
    print(report(found))
    return int(share(found) < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
