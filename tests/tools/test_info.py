"""`paceline info`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from paceline.bundle import MANIFEST_NAME, Bundle, EngineEntry, EngineProfile, FileEntry

from .conftest import Invoke, run_paceline, write_table_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_table_bundle(tmp_path / "tables")


def test_it_shows_models_tokenizer_and_files(invoke: Invoke, bundle: Path) -> None:
    result = invoke("info", bundle)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "target draft",
        "precision int4, block 32 int4, block 32",
        "layers 2 2",
        "KV heads × size 1 × 8 1 × 8",
        "context 64 tokens 64 tokens",
        "logits width 257 257",
        "KV cache per token 128 B (float32) 128 B (float32)",
        "KV cache, full context 8.19 kB 8.19 kB",
        "on disk 6 B 5 B",
        "source folder tiny-target folder tiny-draft",
        "tokenizer: 257 ids, BOS None, end 256, chat template: yes",
        "target/model.onnx 6 B",
    ):
        assert line in lines


def test_verify_tells_of_files_that_the_manifest_does_not_list(invoke: Invoke, bundle: Path) -> None:
    assert "Warning" not in invoke("info", bundle, "--verify").stdout
    assert json.loads(invoke("info", bundle, "--verify", "--json").stdout)["unlisted"] == []
    for name in ("b.jinja", "target/a"):
        (bundle / name).write_text("x")
    shown = invoke("info", bundle, "--verify")
    assert shown.exit_code == 0
    assert "Warning: the manifest does not list 'b.jinja', 'target/a'; nothing vouches for" in shown.stdout
    assert json.loads(invoke("info", bundle, "--verify", "--json").stdout)["unlisted"] == ["b.jinja", "target/a"]


def test_a_single_model_has_one_column(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("info", write_table_bundle(tmp_path / "single", draft=False, template=None))
    assert "draft" not in result.stdout
    assert "chat template: no" in result.stdout


def test_json_is_the_manifest_and_what_follows_from_it(invoke: Invoke, bundle: Path) -> None:
    found = json.loads(invoke("info", bundle, "--json").stdout)
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    assert {key: found[key] for key in manifest} == manifest
    assert found["verified"] is False
    assert found["computed"]["bytes"] == sum(entry["size"] for entry in manifest["files"].values())
    assert found["computed"]["models"]["draft"] == {
        "bytes": 5,
        "kv_bytes_per_token": 128,
        "kv_bytes_full_context": 8192,
    }


def test_measured_quality_and_mixed_bits_are_shown(invoke: Invoke, bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    text = {"positions": 512, "kl": 0.04321, "argmax_agreement": 0.91, "perplexity": 9.1, "full_perplexity": 8.9}
    manifest["target"] |= {
        "calibration": "gptq",
        "mixed_bits": {"a.weight": 8, "b.weight": 8},
        "quality": {"prompts": text, "code": text | {"kl": 0.02}},
    }
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    lines = [" ".join(line.split()) for line in invoke("info", bundle).stdout.splitlines()]
    for line in (
        "precision int4, block 32, 2 projections in 8 bits int4, block 32",
        "calibration gptq none",
        "target as stored against full precision, on held-out text:",
        "prompts 512 0.0432 91.0 % 9.100 8.900",
        "code 512 0.0200 91.0 % 9.100 8.900",
    ):
        assert line in lines


def test_verify_finds_an_altered_file_of_the_right_size(invoke: Invoke, bundle: Path) -> None:
    result = invoke("info", bundle, "--verify")
    assert result.exit_code == 0
    assert "Every file of the manifest has its size and its SHA-256." in result.stdout
    assert "hash files" in result.stderr
    assert json.loads(invoke("info", bundle, "--verify", "--json").stdout)["verified"] is True
    (bundle / "draft" / "model.onnx").write_bytes(b"drafx")
    assert invoke("info", bundle).exit_code == 0
    result = invoke("info", bundle, "--verify")
    assert result.exit_code == 1
    assert "'draft/model.onnx' has SHA-256" in result.stderr
    assert result.stdout == ""


def test_a_lost_engine_is_a_warning_and_how_to_build_it(invoke: Invoke, bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    profile = EngineProfile("verify", {"input_ids": ((1, 1), (1, 5), (1, 5))})
    entry = EngineEntry(
        *("engines/a.engine", "target", "tensorrt-rtx", "1.7", "8.9", "fp16", "0" * 64, 64, 4, 1, (profile,))
    )
    files = {**manifest.files, entry.path: FileEntry(5, "0" * 64)}
    changed = dataclasses.replace(manifest, engines=(entry,), files=files)
    (bundle / "paceline.json").write_text(changed.to_json())
    mend = f"paceline build {bundle} --backend tensorrt-rtx --sm 8.9`"
    result = invoke("info", bundle)
    assert result.exit_code == 0, result.output
    assert f"Warning: the engine 'engines/a.engine' is missing. `{mend} builds it again." in result.stdout
    result = invoke("info", bundle, "--verify")
    assert result.exit_code == 1
    assert f"'engines/a.engine' is missing. Build it again: `{mend}." in result.stderr


def test_what_is_no_bundle_is_refused_with_the_reason(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        result = invoke("info", folder)
        assert result.exit_code == 1
        assert result.stdout == ""
        return result.stderr

    assert "the folder does not exist" in message(tmp_path / "none")
    assert "has no paceline.json" in message(tmp_path)
    manifest = (bundle / MANIFEST_NAME).read_text()
    (bundle / MANIFEST_NAME).write_text(manifest.replace('"format_version": 1', '"format_version": 99'))
    assert "upgrade paceline" in message(bundle)
    (bundle / MANIFEST_NAME).write_text(manifest.replace("target/model.onnx", "../model.onnx"))
    assert "Unsafe file name '../model.onnx'" in message(bundle)
    (bundle / MANIFEST_NAME).write_text(manifest)
    (bundle / "target" / "model.onnx").write_bytes(b"targ")
    assert "has 4 bytes where 6 are expected" in message(bundle)
    (bundle / "target" / "model.onnx").unlink()
    assert "is missing" in message(bundle)


def test_a_real_bundle_is_healthy(smol_bundle: Path) -> None:
    done = run_paceline("info", smol_bundle, "--verify")
    assert done.returncode == 0, done.stderr
    assert "llama" in done.stdout
    assert "fp32" in done.stdout
