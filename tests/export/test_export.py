"""Bundles from tiny checkpoints: complete, checked against torch, and written whole or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from tiny import sizes, tiny_checkpoint, tiny_tokenizer

import paceline
from paceline.bundle import MANIFEST_NAME, Bundle, file_sha256
from paceline.errors import BundleError, CheckpointError, InvalidInputError, PacelineError
from paceline.ort import OrtModel
from paceline.testing import ScriptedDrafter
from paceline_export import parity, tokenizer_files
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import ExportReport, export_bundle
from paceline_export.pair import token_texts
from paceline_export.parity import check_bundle, reference_model
from paceline_export.source import resolve


def export(checkpoint: Path, out: Path, draft: Path | None = None, **options: Any) -> ExportReport:
    source = None if draft is None else resolve(str(draft))
    # test_calibrate.py has the others.
    defaults: dict[str, Any] = {"precision": "fp32", "calibration": "none", "quality": False}
    return export_bundle(resolve(str(checkpoint)), source, out, **(defaults | options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(**sizes()))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**sizes(vocab_size=264, num_hidden_layers=1, max_position_embeddings=128))
    return tiny_checkpoint(tmp_path_factory.mktemp("draft"), config, seed=1)


@pytest.fixture(scope="module")
def pair(llama: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "pair"
    export(llama, out, draft)
    return out


# More are in architectures.py.
ARCHITECTURES = {
    "llama, tied": transformers.LlamaConfig(**sizes(tie_word_embeddings=True)),
    "llama, uneven width": transformers.LlamaConfig(**sizes(hidden_size=72, intermediate_size=100, head_dim=16)),
    "one kv head": transformers.LlamaConfig(**sizes(num_key_value_heads=1)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fp32_is_torch(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", ARCHITECTURES[name])
    export(folder, tmp_path / "bundle")
    report = check_bundle(Bundle.open(tmp_path / "bundle", verify_hashes=True))
    (model,) = report.models
    assert report.passed, model.reason
    assert [phase.name for phase in model.phases] == ["prefill", "single steps", "verification", "after rollback"]
    assert all(phase.max_logit_diff < 2e-3 and phase.argmax_agreement == 1 for phase in model.phases)


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_other_precisions_are_torch_on_their_own_weights(precision: str, tied: bool, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**sizes(hidden_size=72, head_dim=16, tie_word_embeddings=tied))
    export(tiny_checkpoint(tmp_path / "model", config), tmp_path / "bundle", precision=precision, block_size=32)
    report = check_bundle(Bundle.open(tmp_path / "bundle"))
    assert report.passed, [model.reason for model in report.models]
    assert [model.arithmetic for model in report.models] == (["fp16"] if precision == "fp16" else ["fp32", "int8"])


def test_weights_of_the_bundle_are_those_of_the_checkpoint(llama: Path, pair: Path) -> None:
    from safetensors.torch import load_file

    from paceline_export.parity import stored_weights

    original, stored = load_file(llama / "model.safetensors"), stored_weights(pair / "target" / "model.onnx")
    assert set(original) == set(stored)
    for name, tensor in original.items():
        torch.testing.assert_close(stored[name], tensor, rtol=0, atol=0)


def test_half_precision_files_are_read_in_full(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes()))
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    export(folder, tmp_path / "bundle")
    assert check_bundle(Bundle.open(tmp_path / "bundle")).passed


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "whole", transformers.LlamaConfig(**sizes()))
    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    export(folder, tmp_path / "a")
    export(sharded, tmp_path / "b")
    assert (tmp_path / "a/target/model.onnx.data").read_bytes() == (tmp_path / "b/target/model.onnx.data").read_bytes()


def test_older_names_and_pieces_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    """As the hub has them: GPT-2 without the prefix of its base model, Mixtral's experts one by one."""
    from safetensors.torch import load_file, save_file

    sizes_of_gpt2 = {"vocab_size": 272, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 128}
    sizes_of_gpt2["eos_token_id"] = 260
    for name, config, old in (
        ("gpt2", transformers.GPT2Config(**sizes_of_gpt2), "h.0.attn.c_attn.weight"),
        (
            "mixtral",
            transformers.MixtralConfig(**sizes(num_local_experts=2, num_hidden_layers=1)),
            "model.layers.0.block_sparse_moe.experts.1.w2.weight",
        ),
    ):
        folder = tiny_checkpoint(tmp_path / name, config)
        path = folder / "model.safetensors"
        saved = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
        assert old in saved
        save_file(saved, path, {"format": "pt"})
        export(folder, tmp_path / f"{name}-bundle")
        stored = parity.stored_weights(tmp_path / f"{name}-bundle" / "target" / "model.onnx")
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for key, value in expected.items():
            if key in stored:  # a tied head is there once
                torch.testing.assert_close(stored[key].reshape(value.shape), value, rtol=0, atol=0)
        assert len(set(expected) - set(stored)) <= 1
        del saved[old]
        save_file(saved, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"no tensor|has shape"):
            export(folder, tmp_path / f"{name}-damaged")


def test_what_stays_in_full_precision_is_said(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**sizes(num_local_experts=2, num_hidden_layers=1))
    report = export(tiny_checkpoint(tmp_path / "model", config), tmp_path / "bundle", precision="int8")
    graph = onnx.load(tmp_path / "bundle" / "target" / "model.onnx", load_external_data=False).graph
    branches = [node for node in graph.node if node.op_type == "If"]  # an expert that no row chose is skipped
    assert len(branches) == 2
    for node in branches:
        then, other = sorted((attribute.g for attribute in node.attribute), key=lambda graph: -len(graph.node))
        assert sum(inner.op_type == "MatMulNBits" for inner in then.node) == 2
        assert [inner.op_type for inner in other.node] == ["Identity"]
    assert not any(".experts." in name for node in graph.node for name in node.input)
    assert report.models[0].notes == ("1 weight is left in full precision, such as model.layers.0.mlp.gate.weight",)


def test_the_manifest_describes_the_graphs(pair: Path) -> None:
    manifest = Bundle.open(pair, verify_hashes=True).manifest
    assert manifest.draft is not None
    for entry in (manifest.target, manifest.draft):
        graph = onnx.load(pair / entry.path, load_external_data=False).graph
        for specs, values in ((entry.inputs, graph.input), (entry.outputs, graph.output)):
            assert [spec.name for spec in specs] == [value.name for value in values]
            for spec, value in zip(specs, values, strict=True):
                tensor = value.type.tensor_type
                assert spec.shape == tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
                assert spec.dtype == onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    assert (manifest.target.vocab_size, manifest.draft.vocab_size, manifest.tokenizer.vocab_size) == (272, 264, 262)
    assert (manifest.target.max_length, manifest.draft.max_length) == (256, 128)
    assert manifest.tokenizer.eos_token_ids == (260,)
    listed = {*manifest.files, MANIFEST_NAME}
    assert listed == {str(path.relative_to(pair)) for path in pair.rglob("*") if path.is_file()}


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4, 5, 6])
def test_a_pair_of_padded_widths_writes_the_targets_text(pair: Path, num_draft_tokens: int) -> None:  # cases 17, 23
    decoder = paceline.load(pair)
    plain = decoder.generate([5, 6, 7], max_new_tokens=60, num_draft_tokens=0)
    speculative = decoder.generate([5, 6, 7], max_new_tokens=60, num_draft_tokens=num_draft_tokens)
    list(plain), list(speculative)
    assert speculative.token_ids == plain.token_ids
    assert speculative.stats.proposed > 0
    assert max(plain.token_ids) < 262


def test_the_draft_context_may_be_shorter_than_the_targets(pair: Path) -> None:  # case 19
    decoder = paceline.load(pair)
    generation = decoder.generate([5] * 100, max_new_tokens=100, num_draft_tokens=3)
    steps = list(generation)
    plain = decoder.generate([5] * 100, max_new_tokens=100, num_draft_tokens=0)
    list(plain)
    assert generation.token_ids == plain.token_ids
    if len(generation.token_ids) == 100:  # the text outgrew the draft's 128 positions
        assert steps[1].num_proposed > 0
        assert steps[-2].num_proposed == 0


def test_an_always_wrong_drafter_changes_nothing(pair: Path) -> None:  # case 24
    decoder = paceline.load(pair)
    plain = decoder.generate([5, 6], max_new_tokens=40, num_draft_tokens=0)
    list(plain)
    wrong = ScriptedDrafter.always_wrong([5, 6, *plain.token_ids], vocab_size=262)
    generation = decoder.generate([5, 6], max_new_tokens=40, num_draft_tokens=4, drafter=wrong)
    list(generation)
    assert generation.token_ids == plain.token_ids
    assert generation.stats.accepted == 0 < generation.stats.proposed


def test_a_single_model_exports_too(llama: Path, tmp_path: Path) -> None:
    report = export(llama, tmp_path / "bundle", max_length=64)
    assert Bundle.open(tmp_path / "bundle").manifest.draft is None
    assert [model.which for model in report.models] == ["target"]
    generation = paceline.load(tmp_path / "bundle").generate([5] * 60, max_new_tokens=100)
    list(generation)
    assert len(generation.token_ids) <= 4


def test_an_existing_folder_is_not_touched(llama: Path, pair: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(InvalidInputError, match="exists already"):
        export(llama, pair)
    with pytest.raises(InvalidInputError, match="not a bundle, so it is not replaced"):
        export(llama, tmp_path / "notes", overwrite=True)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"


def test_overwrite_replaces_a_bundle_when_the_new_one_is_complete(llama: Path, draft: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "bundle")
    export(draft, tmp_path / "bundle", overwrite=True)
    assert Bundle.open(tmp_path / "bundle").manifest.target.vocab_size == 264
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 257}, "exceeds the 256 positions"),
        ({"max_length": 1}, "at least 2"),
        ({"block_size": 48}, "expected one of 16, 32, 64, 128, 256"),
        ({"precision": "int5"}, "expected one of fp32, fp16, int8, int4"),
    ],
)
def test_bad_options_are_refused(llama: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        export(llama, tmp_path / "bundle", **options)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_architecture_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", transformers.LlamaConfig(**sizes()))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.0.self_attn.\w_proj.bias'"):
        export(folder, tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_tensors_that_are_not_plain_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Read as numbers, without the scales that belong to them, they would be other weights; the check would pass."""
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path / "m", transformers.LlamaConfig(**sizes()))
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}' is stored as"):
        export(folder, tmp_path / "bundle")


def test_a_quantised_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", transformers.LlamaConfig(**sizes()))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantised already"):
        export(folder, tmp_path / "bundle")


def edited(llama: Path, folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a checkpoint with other entries in one of its JSON files."""
    shutil.copytree(llama, folder)
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data | changes))
    return folder


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*args: Any, **kwargs: Any) -> None:
        pytest.fail("The fault was not found before the trace, which takes long.")

    monkeypatch.setattr("paceline_export.one_model.trace", reached)


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(
            (setting, value)
            for setting in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
            for value in (0, -4, "4", None, 1.5)
        ),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 3),
        *(("num_key_value_heads", value) for value in (0, -1, 3, 8, "2")),
        *(("head_dim", value) for value in (0, 15, -16, 24, 32, "16")),
        *(("max_position_embeddings", value) for value in (0, -1, "a")),
        *(("intermediate_size", value) for value in (0, -1, 128, None)),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0.0}),
        ("rope_parameters", {"rope_type": ["x"]}),
        ("eos_token_id", "x"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_at_once(
    llama: Path, tmp_path: Path, setting: str, value: object
) -> None:
    folder = edited(llama, tmp_path / "m", "config.json", **{setting: value})
    with pytest.raises(CheckpointError):
        export(folder, tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.parametrize("setting", ["num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim"])
def test_what_is_wrong_with_a_size_is_said(llama: Path, tmp_path: Path, setting: str) -> None:
    folder = edited(llama, tmp_path / "m", "config.json", **{setting: 0})
    with pytest.raises(CheckpointError, match=rf"{setting}=0; expected a whole number of at least 1\. Take"):
        export(folder, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("num_hidden_layers", 4_000_000_000, "num_hidden_layers=4000000000; expected at most [0-9]+, since its files"),
        (
            "intermediate_size",
            10**400,
            "intermediate_size=10{39}; expected at most [0-9,]+, since its files hold no more",
        ),
        ("rms_norm_eps", -1.0, "rms_norm_eps=-1.0; expected a small number of at least 0"),
        ("rms_norm_eps", math.nan, "rms_norm_eps=nan; expected a small number of at least 0"),
        ("max_position_embeddings", 10, "has 10 positions; expected at least 74, which `paceline check` needs"),
    ],
)
def test_numbers_that_no_model_can_be_built_from_are_named(
    llama: Path, tmp_path: Path, setting: str, value: object, message: str
) -> None:
    folder = edited(llama, tmp_path / "m", "config.json", **{setting: value})
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "bundle")


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json"]
)
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{}", b"[1]", b"", b"[" * 100_000], ids=range(5))
def test_files_that_are_no_json_objects_are_refused(llama: Path, tmp_path: Path, name: str, content: bytes) -> None:
    folder = tmp_path / "m"
    shutil.copytree(llama, folder)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        export(folder, tmp_path / "bundle")


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        *(
            ("generation_config.json", {"eos_token_id": value}, "generation_config.json: eos_token_id is .* expected a")
            for value in ("x", 1.5, [260, "x"], [[260]], {"a": 1}, True, -1)
        ),
        ("generation_config.json", {"eos_token_id": 262}, "end at token 262 .* ids end at 261. Correct"),
        ("tokenizer_config.json", {"eos_token": 5}, "cannot read"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"260": 5}}, "cannot read"),
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "cannot read"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template of its tokenizer is 5; expected a text"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "expected a text that UTF-8 can hold"),
    ],
)
def test_settings_of_a_wrong_type_are_refused_with_the_mend(
    llama: Path, tmp_path: Path, name: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        export(edited(llama, tmp_path / "m", name, **changes), tmp_path / "bundle")


def test_what_is_wrong_with_a_tokenizer_is_said(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "m"))
    path = folder / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as JSON"):
        export(folder, tmp_path / "bundle")
    path.write_bytes(json.dumps(json.loads(content) | {"model": {}}).encode())
    with pytest.raises(CheckpointError, match=r"cannot read its tokenizer \(.*tokenizer\.json\)"):
        export(folder, tmp_path / "bundle")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"cannot read its tokenizer: .* has no tokenizer\.json, take it from"):
        export(folder, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "nope"}, "nope"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"}},
            "factor='two' in its rope_parameters",
        ),
    ],
)
def test_what_transformers_says_of_a_setting_is_passed_on(
    llama: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        export(edited(llama, tmp_path / "m", "config.json", **changes), tmp_path / "bundle")
    assert "attention" not in str(raised.value)


def test_an_incomplete_checkpoint_is_told_from_one_of_another_architecture(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(llama, tmp_path / "m"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is incomplete: it holds no tensor 'model\.layers\.1\.mlp\.up_proj"):
        export(folder, tmp_path / "bundle")
    save_file({f"x.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not belong to this architecture"):
        export(folder, tmp_path / "bundle")


def test_an_absurd_token_id_takes_no_memory(llama: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((llama / "tokenizer.json").read_text())["model"]
    vocabulary["vocab"]["zzz"] = 4_000_000_000
    folder = edited(llama, tmp_path / "m", "tokenizer.json", model=vocabulary)
    with pytest.raises(CheckpointError, match="has 4000000001 ids, but the model knows only 272"):
        export(folder, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match="has 4000000001 ids, but the model knows only 272"):
        export(llama, tmp_path / "bundle", folder)


def end_tokens(folder: Path) -> tuple[int, ...]:
    checkpoint = Checkpoint.open(resolve(str(folder)))
    return tokenizer_files.end_tokens(checkpoint, token_texts(checkpoint.tokenizer))


def test_a_text_ends_where_the_settings_say_and_by_names_only_without_any(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**sizes())
    folder = tiny_checkpoint(tmp_path / "m", config, tiny_tokenizer(("<|im_end|>", "<|endoftext|>")))
    assert end_tokens(folder) == (260,)
    assert end_tokens(edited(folder, tmp_path / "a", "generation_config.json", eos_token_id=[263, 5])) == (5, 263)
    nothing = edited(folder, tmp_path / "b", "generation_config.json", eos_token_id=None)
    assert end_tokens(nothing) == (260, 262, 263)
    (folder / "generation_config.json").unlink()
    assert end_tokens(folder) == (260,)  # of config.json, which transformers takes, too
    assert end_tokens(edited(folder, tmp_path / "c", "config.json", eos_token_id=None)) == (260, 262, 263)


@pytest.mark.usefixtures("no_trace")
def test_weights_of_another_size_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path / "m", "config.json", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.gate_proj.weight' has shape \(96, 64\)"):
        export(folder, tmp_path / "bundle", precision="int4")


@pytest.mark.usefixtures("no_trace")
def test_a_missing_tensor_is_found_before_the_trace_and_one_too_many_is_allowed(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, tmp_path / "m")
    weights = load_file(llama / "model.safetensors")
    save_file(weights | {"extra": torch.ones(3)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(pytest.fail.Exception, match="before the trace"):
        export(tmp_path / "m", tmp_path / "bundle")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.1.mlp.down_proj.weight'"):
        export(tmp_path / "m", tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.1.mlp.down_proj.weight'"):
        export(llama, tmp_path / "bundle", tmp_path / "m")
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("fp32", "model.norm.weight"),
        ("fp32", "model.embed_tokens.weight"),
        ("fp16", "model.layers.1.mlp.up_proj.weight"),
        ("int8", "model.embed_tokens.weight"),
        ("int4", "model.norm.weight"),
        ("int4", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    llama: Path, tmp_path: Path, precision: str, name: str
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, tmp_path / "m")
    value = {"fp32": float("nan"), "fp16": 65520.0, "int8": float("-inf"), "int4": float("nan")}[precision]
    weights = load_file(llama / "model.safetensors")
    weights[name].view(-1)[7] = value
    save_file(weights, tmp_path / "m" / "model.safetensors")
    message = "float16 ends at 65504" if precision == "fp16" else "NaN or infinite"
    with pytest.raises(CheckpointError, match=f"'{name}' holds values .*{message}"):
        export(tmp_path / "m", tmp_path / "bundle", precision=precision)
    assert not list(tmp_path.glob("*bundle*"))


def test_a_full_disk_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paceline_export.one_model.ir.save", full)
    with pytest.raises(PacelineError, match="disk is full"):
        export(llama, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_an_exit_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a command line does at SIGTERM, so that its caller need not clean up."""

    def ended(*args: Any, **kwargs: Any) -> None:
        sys.exit(143)

    monkeypatch.setattr("paceline_export.one_model.ir.save", ended)
    with pytest.raises(SystemExit):
        export(llama, tmp_path / "bundle")
    assert not list(tmp_path.iterdir())


def test_a_file_beyond_the_largest_size_is_told_with_the_option(llama: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from paceline_export.export import export_bundle; "
        "from paceline_export.source import resolve; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "export_bundle(resolve(sys.argv[1]), None, Path(sys.argv[2]), precision='fp32', quality=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, llama, tmp_path / "bundle"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "PacelineError: A file of weights is larger than a file may be at" in done.stderr
    assert "export again with --max-file-size, such as 2GB" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_short_write_on_a_full_disk_says_so(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any, **kwargs: Any) -> None:
        raise OSError("6144 requested and 0 written")  # numpy's error, without an errno

    monkeypatch.setattr("paceline_export.one_model.ir.save", short)
    free = iter([1 << 30, 0])  # when it begins, and when it fails
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr("paceline_export.export.shutil.disk_usage", lambda path: usage(9, 9, next(free)))
    with pytest.raises(PacelineError, match="disk is full"):
        export(llama, tmp_path / "bundle")


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(("precision", "least"), [("fp32", 4.0), ("fp16", 2.0), ("int8", 1.0), ("int4", 0.5)])
def test_a_disk_without_room_is_told_at_once(
    precision: str, least: float, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(llama).parameters())
    usage = shutil._ntuple_diskusage(9, 9, int(count * least) - 1)
    monkeypatch.setattr("paceline_export.export.shutil.disk_usage", lambda path: usage)
    with pytest.raises(
        PacelineError, match=r"too full for this bundle: it needs more than [0-9.]+ (MB|kB) at .* where [0-9.]+"
    ):
        export(llama, tmp_path / "deep" / "bundle", precision=precision)
    assert not list(tmp_path.iterdir())


def test_overwrite_through_a_link_replaces_the_folder_behind_it(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "bundle", max_length=64)
    (tmp_path / "link").symlink_to("bundle")
    export(llama, tmp_path / "link", max_length=128, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert Bundle.open(tmp_path / "bundle").manifest.target.max_length == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "link"]


def test_a_kill_while_bundles_are_swapped_loses_neither(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "bundle", max_length=64)
    (tmp_path / "bundle").rename(tmp_path / ".bundle.replaced-999999999")  # what the kill leaves behind
    with pytest.raises(InvalidInputError, match="appeared while"):
        export(llama, tmp_path / "bundle", max_length=128)
    assert Bundle.open(tmp_path / "bundle", verify_hashes=True).manifest.target.max_length == 64


def test_a_killed_export_leaves_no_bundle_and_a_rerun_succeeds(llama: Path, tmp_path: Path) -> None:
    code = f"""
        import os, signal
        import paceline_export.export as export
        from paceline_export.source import resolve
        from pathlib import Path
        write = export.write_tokenizer
        def killed(*args):
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        export.write_tokenizer = killed
        export.export_bundle(resolve({str(llama)!r}), None, Path({str(tmp_path / "bundle")!r}), precision="fp32")
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "bundle").exists()
    assert len(list(tmp_path.iterdir())) == 1  # what the kill left behind, which the rerun clears away
    export(llama, tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle.open(tmp_path / "bundle", verify_hashes=True)


def test_the_check_finds_a_planted_fault(pair: Path, tmp_path: Path) -> None:
    """Each of these leaves the weights as they are and would pass a test that only looks at shapes."""
    model = onnx.load(pair / "target" / "model.onnx")

    def scale(graph: Any) -> None:
        node = next(n for n in graph.node if n.op_type == "GroupQueryAttention")
        next(a for a in node.attribute if a.name == "scale").f *= 1.01

    def rotation(graph: Any) -> None:
        cos = next(i for i in graph.initializer if i.name == "rotary.cos")
        cos.raw_data = np.roll(onnx.numpy_helper.to_array(cos), 1, axis=0).tobytes()

    def epsilon(graph: Any) -> None:
        for node in graph.node:
            if "LayerNormalization" in node.op_type:
                next(a for a in node.attribute if a.name == "epsilon").f = 1e-2

    for i, plant in enumerate((scale, rotation, epsilon)):
        broken = onnx.ModelProto()
        broken.CopyFrom(model)
        plant(broken.graph)
        folder = tmp_path / str(i)
        (folder / "target").mkdir(parents=True)
        for name in ("tokenizer.json", "target/config.json"):
            (folder / name).write_bytes((pair / name).read_bytes())
        onnx.save(broken, folder / "target/model.onnx")
        original = Bundle.open(pair)
        bundle = Bundle(folder, original.manifest)
        report = check_bundle_target(bundle)
        assert not report.passed, plant.__name__
        assert "a logit differs" in str(report.models[0].reason)


def test_positions_behind_the_first_piece_of_a_prompt_are_torch(tmp_path: Path) -> None:
    """A prompt is fed in pieces; `check_bundle` sees the first one alone, since torch takes long for more."""
    config = transformers.LlamaConfig(**sizes(max_position_embeddings=512))
    export(tiny_checkpoint(tmp_path / "m", config), tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    model, reference = OrtModel.open(bundle, "target"), reference_model(bundle, bundle.manifest.target)
    prompt, block, other = (np.random.default_rng(i).integers(0, 256, n).tolist() for i, n in enumerate((300, 5, 4)))
    cache = model.new_cache(320)
    found = [model.forward(prompt, cache, 2).copy(), model.forward(block, cache, 5).copy()]
    cache.rollback(301)
    found.append(model.forward(other, cache, 4).copy())
    with torch.no_grad():
        first = reference(torch.tensor([prompt + block])).logits[0, 298:]
        second = reference(torch.tensor([prompt + block[:1] + other])).logits[0, -4:]
    expected = torch.cat((first, second)).numpy()
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-3)
    assert np.ptp(expected) > 1  # the tolerance is small beside the logits


def check_bundle_target(bundle: Bundle) -> Any:
    import dataclasses

    return check_bundle(Bundle(bundle.root, dataclasses.replace(bundle.manifest, draft=None)))


@pytest.mark.parametrize("absolute", [False, True])
def test_external_data_outside_the_bundle_is_not_read(pair: Path, tmp_path: Path, absolute: bool) -> None:
    """The graph itself names its file of weights; one that names a file elsewhere must not open it."""
    bundle = tmp_path / "bundle"
    shutil.copytree(pair, bundle)
    outside = tmp_path / "outside.data"
    shutil.copy(bundle / "draft/model.onnx.data", outside)
    graph = onnx.load(bundle / "draft/model.onnx", load_external_data=False)
    for initializer in graph.graph.initializer:
        for entry in initializer.external_data:
            if entry.key == "location":
                entry.value = str(outside) if absolute else "../../outside.data"
    path = bundle / "draft/model.onnx"
    path.write_bytes(graph.SerializeToString())
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())  # made to agree, as an attacker would
    manifest["files"]["draft/model.onnx"] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    Bundle.open(bundle, verify_hashes=True)
    with pytest.raises(BundleError, match=r"cannot load .*draft/model\.onnx"):
        paceline.load(bundle)


def test_a_context_too_short_for_the_check_says_so(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "bundle", max_length=32)
    with pytest.raises(BundleError, match="too short for the check"):
        check_bundle(Bundle.open(tmp_path / "bundle"))


def test_export_takes_seconds_for_a_tiny_model_and_says_what_it_wrote(llama: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    started = time.perf_counter()
    report = export(llama, tmp_path / "bundle", on_progress=lambda stage, done: stages.append((stage, done)))
    assert report.seconds <= time.perf_counter() - started
    assert report.bytes_written == sum(
        path.stat().st_size
        for path in (tmp_path / "bundle").rglob("*")
        if path.is_file() and path.name != MANIFEST_NAME
    )
    shares = [done for _, done in stages]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
