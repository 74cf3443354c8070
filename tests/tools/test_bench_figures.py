"""The figures of `paceline bench`: formulas against plain sums, intervals against simulation."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import InvalidInputError
from paceline_tools.benchmark.bootstrap import Term, Times, estimate
from paceline_tools.benchmark.document import Document
from paceline_tools.benchmark.figures import summarise
from paceline_tools.benchmark.methods import all_methods
from paceline_tools.benchmark.report import report

from .bench_documents import PASS_MS, REST_MS, RUN, STEP_MS, made_up

MEASUREMENT = asdict(made_up(1, prompts=2, repeats=1).measurements[0])
STEPS = len(MEASUREMENT["steps_s"])


def recomputed(data: dict[str, Any], sampling: str, name: str, category: str | None) -> dict[str, Any]:
    """Every figure that is no interval, from the JSON by plain loops: what `models/benchmark.md` says."""
    of_sampling = [i for i, method in enumerate(data["methods"]) if method["sampling"] == sampling]
    index = next(i for i in of_sampling if data["methods"][i]["name"] == name)
    plain = next(i for i in of_sampling if data["methods"][i]["name"] == "plain")
    chosen = [i for i, prompt in enumerate(data["prompts"]) if category in (None, prompt["category"])]
    texts = [one for one in data["measurements"] if one["method"] == index and one["prompt"] in chosen]
    fewest = min(8, data["run"]["settings"]["max_new_tokens"] - 1)
    by_key = {(one["method"], one["prompt"], one["repeat"]): one for one in data["measurements"]}

    def decoded(one: dict[str, Any]) -> int:
        return int(sum(one["steps_tokens"][1:]))

    timed: dict[int, list[int]] = {}  # repeats by prompt
    for prompt in chosen:
        for repeat in range(data["run"]["settings"]["repeats"]):
            cell = [by_key.get((i, prompt, repeat)) for i in of_sampling]
            if all(one is not None and decoded(one) >= fewest for one in cell):
                timed.setdefault(prompt, []).append(repeat)

    def over_prompts(figure: Any, method: int) -> float | None:
        logs = []
        for prompt, repeats in timed.items():
            values = [figure(by_key[method, prompt, repeat]) for repeat in repeats]
            values = [value for value in values if value is not None]
            if values:
                logs.append(math.log(statistics.median(values)))
        return math.exp(statistics.mean(logs)) if logs else None

    def ms(one: dict[str, Any]) -> float:
        return 1000 * float(one["decode_s"]) / decoded(one)

    def ms_whole(one: dict[str, Any]) -> float:
        return float(1000 * sum(one["steps_s"]) / sum(one["steps_tokens"]))

    def at(values: list[float], share: int) -> float:
        return sorted(values)[max(math.ceil(share / 100 * len(values)) - 1, 0)]

    def percentiles(values: list[float]) -> dict[str, float] | None:
        return {f"p{share}": at(values, share) for share in (50, 90, 99)} if values else None

    steps = [
        (1000 * seconds, tokens, proposed, accepted)
        for one in texts
        for seconds, tokens, proposed, accepted in list(
            zip(one["steps_s"], one["steps_tokens"], one["steps_proposed"], one["steps_accepted"], strict=True)
        )[1:]
    ]
    places = range(1, max((step[2] for step in steps), default=0) + 1)
    proposed_at = [sum(step[2] >= place for step in steps) for place in places]
    accepted_at = [sum(step[3] >= place for step in steps) for place in places]
    lengths = [step[3] for step in steps if step[2]]
    wall = sum(sum(one["steps_s"]) for one in texts)
    shares = {
        "prompt": sum(one["prefill_s"] for one in texts) / wall,
        "target": sum(one["target_s"] for one in texts) / wall,
        "draft": sum(one["draft_s"] for one in texts) / wall,
        "other": sum(one["decode_s"] - one["target_s"] - one["draft_s"] for one in texts) / wall,
    }
    per_token, base = over_prompts(ms, index), over_prompts(ms, plain)
    whole, base_whole = over_prompts(ms_whole, index), over_prompts(ms_whole, plain)
    first = {one["prompt"]: one["text"] for one in texts if one["repeat"] == 0}
    same = [by_key[plain, prompt, 0]["text"] == text for prompt, text in first.items()]
    assert per_token is not None
    assert base is not None
    assert whole is not None
    assert base_whole is not None
    new_tokens = sum(sum(one["steps_tokens"]) for one in texts)
    joules = [one["energy_j"] for one in texts]
    return {
        "texts": len(texts),
        "timed_prompts": len(timed),
        "timed_texts": sum(map(len, timed.values())),
        "energy_j_per_token": None if None in joules else sum(joules) / new_tokens,
        "predicted_speedup": over_prompts(lambda one: one["predicted_speedup"], index),
        "new_tokens": new_tokens,
        "rounds": len(steps),
        "ms_per_token": per_token,
        "tokens_per_second": 1000 / per_token,
        "ms_per_token_whole": whole,
        "speedup": None if index == plain else base / per_token,
        "speedup_whole": None if index == plain else base_whole / whole,
        "first_token_ms": percentiles([1000 * one["steps_s"][0] for one in texts]),
        "token_gap_ms": percentiles([step[0] / step[1] for step in steps for _ in range(step[1])]),
        "burst_gap_ms": percentiles([step[0] for step in steps if step[1]]),
        "proposed_at": proposed_at,
        "accepted_at": accepted_at,
        "acceptance_rate": sum(accepted_at) / sum(proposed_at) if proposed_at else None,
        "block_efficiency": sum(map(decoded, texts)) / len(steps),
        "accepted_lengths": [lengths.count(n) for n in range(max(lengths, default=-1) + 1)],
        "shares": {**shares, "outside": 1 - sum(shares.values())},
        "same_as_plain": None if index == plain or sampling != "greedy" else {"same": sum(same), "prompts": len(same)},
    }


# How many figures `recomputed` gives.
FIGURES = 22


def check_summary(data: dict[str, Any]) -> int:
    """Compare every figure of a document's summary with `recomputed`; returns how many."""
    count = 0
    for sampling, found in data["summary"]["samplings"].items():
        for name, groups in found["methods"].items():
            for category, figures in [(None, groups["all"]), *groups["categories"].items()]:
                for key, value in recomputed(data, sampling, name, category).items():
                    got = figures[key]
                    if isinstance(got, dict) and "value" in got:
                        assert got["low"] is None or got["low"] <= got["value"] <= got["high"]
                        got = got["value"]
                    expected = value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)
                    assert got == expected, (sampling, name, category, key)
                    count += 1
    return count


def test_every_figure_can_be_recomputed_from_the_json(tmp_path: Path) -> None:
    document = made_up(1, prompts=4, repeats=2, temperatures=(0.0, 0.8))
    measured = tuple(replace(one, energy_j=1.0 + index) for index, one in enumerate(document.measurements))
    document = replace(document, measurements=measured)
    path = tmp_path / "run.json"
    path.write_text(document.to_json(summarise(document)), encoding="utf-8")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert check_summary(data) == 2 * 4 * 3 * FIGURES
    plain = data["summary"]["samplings"]["greedy"]["methods"]["plain"]["all"]["ms_per_token"]["value"]
    reading_ms = 1000 * document.run["target_bytes"] / document.run["read_bytes_per_s"]
    assert data["summary"]["bandwidth_share"] == pytest.approx(reading_ms / plain)
    again = Document.read(path)
    assert again == document
    assert json.loads(json.dumps(summarise(again))) == data["summary"]  # the intervals, too
    assert report(again, data["summary"]) == report(document, summarise(document))
    path.write_text(json.dumps(_as_javascript(data)), encoding="utf-8")
    assert Document.read(path) == document


def _as_javascript(value: Any) -> Any:
    """What a program that knows one kind of number writes: whole ones without a point."""
    if isinstance(value, dict):
        return {name: _as_javascript(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_as_javascript(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_block_efficiency_is_one_and_the_accepted_per_round_where_nothing_was_cut() -> None:
    document = made_up(1)
    uncut = [
        replace(
            one,
            steps_s=one.steps_s[:-1],
            steps_tokens=one.steps_tokens[:-1],
            steps_proposed=one.steps_proposed[:-1],
            steps_accepted=one.steps_accepted[:-1],
        )
        for one in document.measurements
    ]  # the limit cut the last round alone
    summary = summarise(replace(document, measurements=tuple(uncut)))
    for found in summary["samplings"]["greedy"]["methods"].values():
        one = found["all"]
        assert one["block_efficiency"] == pytest.approx(1 + sum(one["accepted_at"]) / one["rounds"])


def test_shares_add_up_to_the_wall_time() -> None:
    for found in summarise(made_up(1))["samplings"]["greedy"]["methods"].values():
        shares = found["all"]["shares"]
        assert sum(shares.values()) == pytest.approx(1)
        assert abs(shares["outside"]) < 0.02


def test_the_speedup_is_that_of_the_given_costs() -> None:
    document = made_up(1, noise=0.0)
    methods = summarise(document)["samplings"]["greedy"]["methods"]
    assert methods["plain"]["all"]["ms_per_token"]["value"] == pytest.approx(PASS_MS + REST_MS, rel=1e-4)
    two = methods["K = 2"]["all"]
    round_ms = PASS_MS * 1.3 + 2 * STEP_MS + REST_MS
    assert two["speedup"]["value"] == pytest.approx(two["block_efficiency"] * (PASS_MS + REST_MS) / round_ms, rel=0.02)


def test_the_theory_predicts_what_is_measured_where_its_assumptions_hold() -> None:
    found = summarise(made_up(1, noise=0.0, prompts=60, repeats=1))["samplings"]["greedy"]
    (curve,) = found["forecast"]
    assert [point["k"] for point in curve["points"]] == [1, 2, 3, 4]
    for k in (2, 4):
        measured = found["methods"][f"K = {k}"]["all"]["speedup"]["value"]
        assert curve["points"][k - 1]["speedup"] == pytest.approx(measured, rel=0.03)


def test_the_theorys_curve_can_be_recomputed_from_the_json() -> None:
    document = made_up(1, prompts=3, repeats=2)
    data = json.loads(document.to_json(summarise(document)))
    by_k = {0: "plain", 2: "K = 2", 4: "K = 4"}
    texts = {
        k: [one for one in data["measurements"] if data["methods"][one["method"]]["name"] == name]
        for k, name in by_k.items()
    }

    def total(k: int, name: str) -> float:
        return float(sum(one[name] for one in texts[k]))

    rounds = {k: sum(len(one["steps_s"]) - 1 for one in found) for k, found in texts.items()}
    unit = total(0, "decode_s") / rounds[0]
    passes = {k: total(k, "target_s") / rounds[k] / unit for k in by_k}
    passes |= {1: (passes[0] + passes[2]) / 2, 3: (passes[2] + passes[4]) / 2}
    rest = [(total(k, "decode_s") - total(k, "draft_s") - total(k, "target_s")) / rounds[k] / unit for k in (2, 4)]
    drafted = sum(sum(one["steps_proposed"]) for k in (2, 4) for one in texts[k])
    step = (total(2, "draft_s") + total(4, "draft_s")) / drafted / unit
    (curve,) = data["summary"]["samplings"]["greedy"]["forecast"]
    for point in curve["points"]:
        speedups = []
        for prompt in range(3):
            pairs = [
                pair
                for k in (2, 4)
                for one in texts[k]
                if one["prompt"] == prompt
                for pair in list(zip(one["steps_proposed"], one["steps_accepted"], strict=True))[1:]
            ]
            tokens, survive = 1.0, 1.0
            for place in range(1, point["k"] + 1):
                reached = [stood for drafted, stood in pairs if drafted >= place and stood >= place - 1]
                survive *= sum(stood >= place for stood in reached) / len(reached)
                tokens += survive
            speedups.append(tokens / (point["k"] * step + passes[point["k"]] + statistics.mean(rest)))
        assert point["speedup"] == pytest.approx(statistics.geometric_mean(speedups))
    assert [point["k"] for point in curve["points"]] == [1, 2, 3, 4]


def test_texts_that_are_too_short_count_but_are_not_timed() -> None:
    document = made_up(1)
    first = document.measurements[0]
    short = replace(first, **{name: getattr(first, name)[:3] for name in asdict(first) if name.startswith("steps_")})
    methods = summarise(replace(document, measurements=(short, *document.measurements[1:])))["samplings"]["greedy"][
        "methods"
    ]
    for one in (found["all"] for found in methods.values()):
        assert (one["texts"], one["timed_texts"]) == (24, 23)


def test_a_run_that_was_broken_off_compares_the_same_texts() -> None:
    document = made_up(1)
    methods = summarise(replace(document, measurements=document.measurements[:30]))["samplings"]["greedy"]["methods"]
    assert [one["all"]["texts"] for one in methods.values()] == [8, 8, 7, 7]
    assert {one["all"]["timed_texts"] for one in methods.values()} == {7}


def test_a_single_text_has_no_interval() -> None:
    document = made_up(1, prompts=1, repeats=1)
    found = summarise(document)["samplings"]["greedy"]["methods"]["auto"]["all"]["speedup"]
    assert found["value"] > 0
    assert (found["low"], found["high"]) == (None, None)
    assert "auto" in report(document, summarise(document))


def simulated(rng: np.random.Generator, prompts: int, repeats: int, differ: float = 0.2) -> list[Term]:
    """Plain over another method that is 1.5 times as fast; prompts differ, and the machine drifts for both."""
    drift = rng.normal(0, 0.2, (prompts, repeats))
    hard = rng.normal(0, differ, (prompts, 1))
    plain = np.exp(3 + drift + rng.normal(0, 0.03, (prompts, repeats)))
    other = np.exp(3 - math.log(1.5) + hard + drift + rng.normal(0, 0.03, (prompts, repeats)))
    counts = np.full(prompts, repeats)
    return [Term(Times(plain, counts), 1), Term(Times(other, counts), -1)]


@pytest.mark.parametrize(
    ("prompts", "repeats", "fixed"), [(3, 4, False), (12, 2, False), (3, 2, True), (1, 4, True), (20, 1, True)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(prompts: int, repeats: int, fixed: bool) -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(150):
        terms = simulated(rng, prompts, repeats, differ=0.0 if fixed else 0.2)
        found = estimate(terms, fixed_prompts=fixed)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 1.5 <= found.high
    assert hits >= 0.9 * 150


def test_pairs_take_a_common_drift_out_of_the_interval() -> None:
    terms = simulated(np.random.default_rng(3), 1, 8)  # one prompt, whose repeats drift by a fifth
    paired = estimate(terms)
    apart = estimate([terms[0], Term(replace(terms[1].times, run=1), -1)])
    assert paired is not None
    assert apart is not None
    assert paired.low is not None
    assert paired.high is not None
    assert apart.low is not None
    assert apart.high is not None
    assert math.log(paired.high / paired.low) < 0.6 * math.log(apart.high / apart.low)
    assert estimate(terms) == paired  # the same every time


def test_missing_repeats_are_never_drawn() -> None:
    values = np.array([[1.0, np.nan, np.nan], [2.0, 2.0, np.nan]])
    found = estimate([Term(Times(values, np.array([1, 2])), 1)])
    assert found is not None
    assert found.value == pytest.approx(math.sqrt(2))
    # The bootstrap's figures are 1, √2 (twice as often) and 2: a standard error of √2 · log 2 / √8.
    assert found.low is not None
    assert found.high is not None
    assert math.log(found.high / found.value) == pytest.approx(12.706 * math.log(2) / 2, rel=0.05)
    assert found.low * found.high == pytest.approx(2)
    assert estimate([Term(Times(np.zeros((0, 0)), np.zeros(0, np.int64)), 1)]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "else"}, "is not a document of `paceline bench --json`"),
        ({"version": 99}, "has version 99 of the format, and this paceline reads 1"),
        ({"methods": None}, "is damaged: methods should be a list"),
        ({"prompts": [{"name": "a"}]}, r"is damaged: prompts\[0\] lacks category, tokens"),
        ({"prompts": []}, r"is damaged: measurements\[0\] is of a prompt or method that is not there"),
        ({"run": 3}, "is damaged: run should be of type dict, got 3"),
        ({"run": {**RUN, "machine": {}}}, "is damaged: run.machine.cpu should be of type str, got None"),
        ({"measurements": [{**MEASUREMENT, "steps_s": []}]}, "has no steps, or of different numbers"),
        ({"measurements": [{**MEASUREMENT, "decode_s": math.nan}]}, "has a time that is none"),
        ({"measurements": [{**MEASUREMENT, "steps_tokens": [-1] * STEPS}]}, "has a number of tokens that is none"),
        ({"measurements": [{**MEASUREMENT, "steps_tokens": [10**400] * STEPS}]}, "has a number of tokens that is none"),
        ({"measurements": [{**MEASUREMENT, "decode_s": 1e308}]}, "has a time that is none"),
        ({"run": {**RUN, "peers": None}}, "run.peers should be of type dict, got None"),
        (
            {"run": {**RUN, "read_bytes_per_s": "x"}},
            "run.read_bytes_per_s should be a number above 0, or null, got 'x'",
        ),
        ({"run": {**RUN, "seconds": math.nan}}, "run.seconds should be a time, got nan"),
        ({"measurements": [{**MEASUREMENT, "steps_s": "1"}]}, "steps_s should be of type list"),
    ],
)
def test_a_damaged_document_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    document = made_up(1, prompts=2, repeats=1)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(document.to_json(summarise(document))) | change), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        Document.read(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="is no JSON document"):
        Document.read(path)


def test_methods_are_all_combinations_once() -> None:
    found = all_methods(("auto", 2, 2), ("draft-model", "hybrid"), ("block", "token"), (0.0, 0.8))
    assert [method.name for method in found if method.sampling == "greedy"] == [
        "plain",
        "auto, draft-model",
        "K = 2, draft-model",
        "auto, draft-model, token rule",
        "K = 2, draft-model, token rule",
        "auto, hybrid",
        "auto, hybrid, token rule",
    ]
    assert [method.name for method in all_methods(("auto",), (), (), (0.8,))] == ["plain", "auto"]
    assert {method.sampling for method in found} == {"greedy", "temperature 0.8"}
