"""Every architecture of `architectures.py`: the graph is torch, drafting changes nothing, and the page says so."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES, REFUSED
from measure_architectures import COLUMNS, PAGE, ROUTER, exported, measured, one_trace_a_dtype
from tiny import sizes, tiny_checkpoint

import paceline
from paceline.bundle import Bundle
from paceline.errors import CheckpointError
from paceline.ort import OrtModel
from paceline_export.causal_lm import trace
from paceline_export.parity import check_bundle

# What the default run has of the architectures; `pytest -m slow` has all, in every flavour and precision.
FAST = (
    *("llama 3", "mixtral", "qwen2-moe", "gemma 3", "phi 3", "stablelm", "gpt2", "opt", "gpt-oss", "cohere 2"),
    "bloom",
)
FAST_CASES = {(name, "ort", "fp32") for name in ARCHITECTURES if name.startswith(FAST)} | {
    (name, flavor, precision)
    for name in ARCHITECTURES
    for flavor, precision in COLUMNS
    if (flavor, precision, name.partition(",")[0])
    in {("trt", "int4", "gpt2"), ("trt", "fp16", "mpt"), ("ort", "int4", "mixtral"), ("ort", "int8", "opt")}
}


def stated() -> dict[str, list[str]]:
    """The page's cells by architecture."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- measured -->\n\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


@pytest.fixture(scope="module", autouse=True)
def _one_trace_a_dtype() -> Iterator[None]:
    with one_trace_a_dtype():
        yield


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> OrtModel:
    """One layer with random weights and the vocabulary of all others."""
    folder = tmp_path_factory.mktemp("draft")
    config = transformers.LlamaConfig(**sizes(num_hidden_layers=1))
    exported(tiny_checkpoint(folder / "model", config, seed=1), "ort", "fp32", folder / "bundle")
    return OrtModel.open(Bundle.open(folder / "bundle"), "target")


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of an architecture, made once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def made(name: str) -> Path:
        return tiny_checkpoint(folder / str(list(ARCHITECTURES).index(name)), ARCHITECTURES[name])

    return made


@pytest.mark.parametrize(
    ("name", "flavor", "precision"),
    [
        pytest.param(*case, marks=() if case in FAST_CASES else pytest.mark.slow)
        for name in ARCHITECTURES
        for case in ((name, *column) for column in COLUMNS)
    ],
)
def test_the_graph_is_torch_as_the_page_states(
    name: str, flavor: str, precision: str, draft: OrtModel, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    cell = stated()[name][COLUMNS.index((flavor, precision))]
    if cell.startswith("refused: "):
        with pytest.raises(CheckpointError) as refused:
            exported(checkpoint_of(name), flavor, precision, tmp_path / "bundle")
        assert str(refused.value) == cell.removeprefix("refused: ")
        return
    exported(checkpoint_of(name), flavor, precision, tmp_path / "bundle")
    if cell != ROUTER:
        parity, difference = measured(tmp_path / "bundle")
        assert difference <= float(cell)
        assert not any(phase.disagreements for phase in parity.phases)
    if flavor == "ort":
        assert float(cell) <= 2e-3
    # Random weights would end some texts at once.
    decoder = dataclasses.replace(paceline.load(tmp_path / "bundle"), draft=draft, eos_token_ids=())
    texts = []
    for drafted in (0, 4):
        generation = decoder.generate([5, 6, 7] * 4, max_new_tokens=24, num_draft_tokens=drafted)
        list(generation)
        texts.append(generation.token_ids)
    assert texts[0] == texts[1]
    assert generation.stats.proposed > 0


def test_the_page_has_a_row_for_every_architecture_and_every_refusal() -> None:
    found = stated()
    assert list(found) == list(ARCHITECTURES)
    assert {len(cells) for cells in found.values()} == {len(COLUMNS)}
    text = PAGE.read_text(encoding="utf-8")
    assert f"| architecture | {' | '.join(' '.join(column) for column in COLUMNS)} |" in text


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=reason) as refused:
        trace(config, max_length=128)
    assert time.perf_counter() - started < 30  # before any heavy work
    assert f"| {name} | {refused.value} |" in PAGE.read_text(encoding="utf-8")


def test_contributing_shows_the_lines_of_an_architecture_as_they_are() -> None:
    root = PAGE.parents[1]
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Adding an architecture")[2]
    row, code = (part.partition("```")[0] for part in text.split("```python\n")[1:])
    assert row in (root / "tests" / "export" / "architectures.py").read_text(encoding="utf-8")
    lines = (root / "export" / "paceline_export" / "own_attention.py").read_text(encoding="utf-8")
    for part in code.split("\n\n"):
        assert part.strip("\n") in lines
    assert row.count("\n") + code.count("\n") < 30


@pytest.mark.model
def test_gemma_3_is_torch_and_its_draft_changes_nothing(gemma_bundle: Path) -> None:
    report = check_bundle(Bundle.open(gemma_bundle))
    assert report.passed, [model.reason for model in report.models]
    assert max(phase.max_logit_diff for phase in report.models[0].phases) <= 2e-3
    decoder = paceline.load(gemma_bundle)
    texts = []
    for drafted in (0, 3):
        generation = decoder.generate("The capital of France is", max_new_tokens=40, num_draft_tokens=drafted)
        list(generation)
        texts.append(generation.token_ids)
    assert texts[0] == texts[1]
    assert generation.stats.accepted > 0
