"""`paceline recommend`, and the other commands with a draft that has a tokenizer of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny import sizes, tiny_checkpoint, tiny_tokenizer

from paceline.bundle import MANIFEST_NAME, Bundle, file_sha256
from paceline.theory import best_num_draft_tokens, tokens_per_round
from paceline_export.export import export_bundle
from paceline_export.source import resolve
from paceline_tools.benchmark.measurement import Measurement
from paceline_tools.recommend import _further, judge

from .conftest import Invoke, run_paceline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts for it: one of another tokenizer by each method, and its own first layer."""
    root = tmp_path_factory.mktemp("drafts")
    target = tiny_checkpoint(root / "target", transformers.LlamaConfig(**sizes(num_hidden_layers=3)))
    config = transformers.LlamaConfig(**sizes(num_hidden_layers=1, vocab_size=280))
    tiny_checkpoint(root / "draft", config, tiny_tokenizer(("<other>",)), seed=1)
    options: dict[str, Any] = {"precision": "fp32", "quality": False}
    own, source = resolve(str(target)), resolve(str(root / "draft"))
    export_bundle(own, source, root / "intersection", **options)
    ready = Bundle.open(root / "intersection")
    export_bundle(ready, source, root / "text", draft_method="text", **options)
    export_bundle(own, None, root / "self", draft_layers=1, **options)
    export_bundle(own, None, root / "alone", **options)
    return root


PROMPTS = ("--prompts", "prompts.jsonl", "--raw", "--max-new-tokens", 12, "--repeats", 1, "--draft-tokens", 3)


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the other"}\n{"prompt": "and é 😀"}\n', encoding="utf-8")


def measured(method: int, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "prompt": 0,
        "method": method,
        "repeat": 0,
        "steps_s": (1.0,) * 5,
        "steps_tokens": (1,) * 5,
        "steps_proposed": (0,) * 5,
        "steps_accepted": (0,) * 5,
        "prefill_s": 1.0,
        "decode_s": 4.4,
        "target_s": 4.0,
        "draft_s": 0.0,
        "finish_reason": "length",
        "text": "",
        "predicted_speedup": None,
        "energy_j": None,
    }
    return Measurement(**(fields | changes))


def test_what_is_expected_is_the_theorys() -> None:
    plain = measured(0)  # 1.1 s a round, 1 s of it in the target
    drafted = measured(
        1,
        steps_tokens=(1, 3, 2, 1, 3),
        steps_proposed=(0, 2, 2, 2, 2),
        steps_accepted=(0, 2, 1, 0, 2),
        target_s=5.2,
        draft_s=0.8,
        decode_s=6.8,
    )
    found = judge("small", None, [plain, drafted], 2)
    # 3 of 4 stand in the first place, 2 of the 3 behind them in the second.
    assert list(found.acceptance) == pytest.approx([3 / 4, 2 / 3])
    assert found.draft_cost == pytest.approx(0.8 / 8 / 1.1)
    assert found.pass_cost == pytest.approx(1.3 / 1.1)
    assert found.overhead == pytest.approx(0.2 / 1.1)
    best, gain = best_num_draft_tokens(
        found.acceptance,
        found.draft_cost,
        verification_cost=lambda k: (1 + 0.15 * k) / 1.1,
        overhead=found.overhead,
        most=2,
    )
    assert found.num_draft_tokens == best
    assert found.predicted == pytest.approx(gain)
    assert found.tokens_per_round == tokens_per_round(found.acceptance, best)
    assert found.measured == pytest.approx((4.4 / 4) / (6.8 / 9))


def test_a_draft_that_is_never_right_does_not_pay() -> None:
    drafted = measured(1, steps_proposed=(0, 2, 2, 2, 2), target_s=5.2, draft_s=0.8, decode_s=6.8)
    found = judge("small", None, [measured(0), drafted], 2)
    assert found.acceptance == (0.0, 0.0)
    assert (found.num_draft_tokens, found.predicted) == (0, 1.0)


def test_the_drafts_of_bundles_and_further_ones_are_compared(invoke: Invoke, folder: Path, prompts: None) -> None:
    more = ("--draft", folder / "draft", "--draft-precision", "fp32")
    result = invoke("recommend", folder / "intersection", folder / "text", folder / "self", *more, *PROMPTS, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = sorted(one["draft"] for one in found["drafts"])
    assert names == [
        "draft, fp32, by intersection",
        "draft, fp32, by intersection",
        "draft, fp32, by text",
        "target, first 1 of 3 layers, fp32",
    ]
    assert sorted(one["bundle"] is None for one in found["drafts"]) == [False, False, False, True]
    predicted = [one["predicted"] for one in found["drafts"]]
    assert predicted == sorted(predicted, reverse=True)
    assert min(predicted) >= 1
    assert all(len(one["acceptance"]) == 3 and one["draft_cost"] > 0 for one in found["drafts"])
    # Random models: the two that are the same draft accept the same.
    same = [one["acceptance"] for one in found["drafts"] if "intersection" in one["draft"]]
    assert same[0] == same[1]
    assert found["recommended"] in (None, found["drafts"][0]["draft"])


def test_a_table_and_a_verdict_for_readers(invoke: Invoke, folder: Path, prompts: None) -> None:
    result = invoke("recommend", folder / "self", *PROMPTS, "--temperature", 1)
    assert result.exit_code == 0, result.output
    assert "target, first 1 of 3 layers, fp32" in result.stdout
    assert "2 prompts, temperature 1." in result.stdout
    assert "Take target, first 1" in result.stdout or "None pays: the best" in result.stdout


def test_what_cannot_be_compared_is_refused(invoke: Invoke, folder: Path, tiny_bundle: Path, prompts: None) -> None:
    for arguments, message in (
        ((folder / "alone",), "has no draft model; name drafts with --draft"),
        ((folder / "self", folder / "alone"), "has no draft model"),
        ((folder / "self", tiny_bundle), "hold different targets"),
        ((folder / "self", folder / "self"), "names a bundle twice"),
        ((folder / "self", "--draft-precision", "fp32"), "--draft-precision is for drafts of --draft"),
        ((folder / "self", "--draft", "self:x"), "--draft self:x: a number of layers of at least 1"),
        ((folder / "self", "--draft", "self:3"), "the target has 3 layers; choose from self:1 to self:2"),
    ):
        result = invoke("recommend", *arguments, *PROMPTS)
        assert result.exit_code == 2
        assert re.search(message, " ".join(result.stderr.split()))
        assert "measure" not in result.stderr  # said before anything is run


def test_own_layers_come_from_the_folder_that_the_target_came_from(
    invoke: Invoke, folder: Path, tmp_path: Path, prompts: None
) -> None:
    bundle = Bundle.open(folder / "self")
    found = _further(bundle, "self:1", None)
    assert found.source.folder.samefile(folder / "target")
    assert (found.layers, found.adapter) == (1, None)
    moved = Path(shutil.copytree(folder / "self", tmp_path / "elsewhere" / "self"))
    for message in ("there is none of this name in this folder. Run this", "and other weights are in"):
        result = invoke("recommend", moved, "--draft", "self:1", *PROMPTS)
        assert result.exit_code == 2
        said = " ".join(result.stderr.split())
        assert message in said
        assert "paceline export --target PATH/target --draft self:1 -o NEW, and name NEW as DIR" in said
        shutil.copytree(folder / "draft", "target", dirs_exist_ok=True)
    shutil.rmtree("target")
    shutil.copytree(folder / "target", "target")
    assert _further(Bundle.open(moved), "self:1", None).source.folder.samefile("target")


def test_own_layers_have_the_adapter_of_the_target(invoke: Invoke, folder: Path, tmp_path: Path, prompts: None) -> None:
    """The first layers of the merged weights, not those of the base; the adapter must be at hand, and the same one."""
    weights = tmp_path / "lora" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"any")
    moved = Path(shutil.copytree(folder / "self", tmp_path / "self"))
    shutil.copytree(folder / "target", tmp_path / "target")
    manifest = json.loads((moved / MANIFEST_NAME).read_text())
    manifest["target"]["source"]["adapter"] = {"name": "lora", "sha256": file_sha256(weights)}
    (moved / MANIFEST_NAME).write_text(json.dumps(manifest))
    adapter = _further(Bundle.open(moved), "self:1", None).adapter
    assert adapter is not None
    assert adapter.samefile("lora")
    weights.write_bytes(b"other")
    result = invoke("recommend", moved, "--draft", "self:1", *PROMPTS)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "needs the adapter that the target of" in said
    assert "paceline export --target PATH/target --adapter PATH/lora --draft self:1 -o NEW" in said


@pytest.mark.parametrize("method", ["intersection", pytest.param("text", marks=pytest.mark.slow)])
def test_the_commands_take_such_a_bundle(invoke: Invoke, folder: Path, method: str) -> None:
    bundle = folder / method
    shown = invoke("info", bundle)
    assert shown.exit_code == 0
    assert (
        "draft's own tokenizer: 263 ids, 262 of them shared with the target's; it drafts by " + method in shown.stdout
    )
    written = [
        run_paceline("generate", bundle, "--prompt", "the é", "--max-new-tokens", 12, "--draft-tokens", k).stdout
        for k in (0, 3)
    ]
    assert written[0] == written[1]
    tuned = invoke("tune", bundle, "--lengths", 64, "--repeats", 3)
    assert tuned.exit_code == 0, tuned.output
    assert "draft, a step" in tuned.stdout
    assert invoke("check", bundle).exit_code == 0
    options = ("--samples", 100, "--draft-tokens", 2, "--seed", 1, "--temperature", 1, "--prompt", "the é", "--json")
    verified = invoke("verify", bundle, *options)
    assert verified.exit_code == 0, verified.output
    found = json.loads(verified.stdout)
    assert found["passed"]
    assert all(text["parts_at"] is None for text in found["greedy"])
    assert any(finding["name"].startswith("drafted tokens") for finding in found["law"]) == (method == "intersection")
