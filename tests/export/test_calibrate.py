"""Calibration and measured quality: layers run one at a time are the model, and an export says what it costs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import sizes, tiny_checkpoint, tiny_tokenizer

from paceline.bundle import Bundle, Manifest
from paceline.errors import CheckpointError, InvalidInputError
from paceline_export.calibrate.layers import LayerwiseModel, NotLayerwiseError
from paceline_export.calibrate.quality import Scores
from paceline_export.calibrate.texts import calibration_ids, cut, held_out_ids
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import ExportReport, export_bundle
from paceline_export.own_attention import reference_attention
from paceline_export.parity import check_bundle
from paceline_export.source import resolve

ARCHITECTURES = {
    "llama": transformers.LlamaConfig(**sizes()),
    "llama, tied": transformers.LlamaConfig(**sizes(tie_word_embeddings=True)),
    "qwen2": transformers.Qwen2Config(**sizes()),
    "cohere": transformers.CohereConfig(**sizes()),
    "granite": transformers.GraniteConfig(**sizes(logits_scaling=2.0, residual_multiplier=0.5)),
    "phi3": transformers.Phi3Config(**sizes()),
    "gemma, tied": transformers.GemmaConfig(**sizes(head_dim=16)),
    "falcon": transformers.FalconConfig(vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "falcon, alibi": transformers.FalconConfig(
        vocab_size=272, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "mpt": transformers.MptConfig(vocab_size=272, d_model=64, n_heads=4, n_layers=2, max_seq_len=256),
    "gemma3": transformers.Gemma3TextConfig(
        **sizes(head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    ),
    "olmo3": transformers.Olmo3Config(**sizes(sliding_window=16, layer_types=["sliding_attention", "full_attention"])),
}


def export(checkpoint: Path, out: Path, **options: Any) -> ExportReport:
    return export_bundle(resolve(str(checkpoint)), None, out, **({"block_size": 32} | options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), transformers.LlamaConfig(**sizes()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_run_one_at_a_time_are_the_model(name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", ARCHITECTURES[name])
    checkpoint = Checkpoint.open(resolve(str(folder)))
    layerwise = LayerwiseModel(checkpoint.config, checkpoint.weights(check_architecture(checkpoint.config)))
    texts = [torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)) for shape in ((3, 40), (1, 7))]
    hidden = layerwise.embed(*texts)
    for index in range(len(layerwise)):
        layer = layerwise.layer(index)
        hidden = [layer(given) for given in hidden]
    implementation = reference_attention(checkpoint.config)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    for ids, given in zip(texts, hidden, strict=True):
        with torch.no_grad():
            expected = reference(ids).logits
        torch.testing.assert_close(torch.stack(list(layerwise.logits(given))), expected, rtol=1e-4, atol=1e-4)


def test_an_export_says_what_it_costs(llama: Path, tmp_path: Path) -> None:
    entries = {}
    for name, options in {
        "gptq": {"precision": "int4"},
        "none": {"precision": "int4", "calibration": "none"},
        "int8": {"precision": "int8"},
        "fp32": {"precision": "fp32"},
    }.items():
        report = export(llama, tmp_path / name, **options)
        bundle = Bundle.open(tmp_path / name, verify_hashes=True)
        entries[name] = bundle.manifest.target
        assert report.models[0].quality == entries[name].quality is not None
        assert not report.models[0].notes
        assert name != "gptq" or check_bundle(bundle).passed
    kl = {name: entry.quality.prompts.kl for name, entry in entries.items() if entry.quality is not None}
    assert 0 <= kl["fp32"] < 1e-6 < kl["int8"] < kl["gptq"] < kl["none"]
    attention = {f"model.layers.{layer}.self_attn.{part}_proj.weight": 8 for layer in range(2) for part in "qkvo"}
    wide = attention | {f"lm_head.weight[:{ARCHITECTURES['llama'].vocab_size}]": 8}
    for name, calibration, mixed in (("gptq", "gptq", wide), ("none", None, wide), ("int8", None, None)):
        assert (entries[name].calibration, entries[name].mixed_bits) == (calibration, mixed)
    quality = entries["fp32"].quality
    assert quality is not None
    assert quality.code.argmax_agreement > 0.99
    assert quality.code.perplexity == pytest.approx(quality.code.full_perplexity, rel=1e-4)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(llama: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(llama, tmp_path / "m")
    weights = load_file(llama / "model.safetensors")
    weights[name].view(-1)[7] = float("nan")
    save_file(weights, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}' holds values .*NaN or infinite"):
        export(tmp_path / "m", tmp_path / "bundle", precision="int4")


def test_without_quality_nothing_is_measured(llama: Path, tmp_path: Path) -> None:
    report = export(llama, tmp_path / "b", precision="int8", quality=False)
    assert report.models[0].quality is None
    assert Bundle.open(tmp_path / "b").manifest.target.quality is None


def test_the_draft_is_rounded_unless_it_is_asked_for(llama: Path, tmp_path: Path) -> None:
    for chosen in (None, "gptq"):
        export_bundle(
            resolve(str(llama)),
            resolve(str(llama)),
            tmp_path / "b",
            precision="fp32",
            draft_precision="int4",
            block_size=32,
            draft_calibration=chosen,
            quality=False,
            overwrite=True,
        )
        draft = Bundle.open(tmp_path / "b").manifest.draft
        assert draft is not None
        assert (draft.calibration, draft.mixed_bits, draft.quality) == (chosen, None, None)


def test_a_model_whose_layers_cannot_be_told_is_rounded_and_says_so(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, *texts: torch.Tensor) -> None:
        raise NotLayerwiseError("its layers cannot be told")

    monkeypatch.setattr(LayerwiseModel, "embed", refuse)
    report = export(llama, tmp_path / "b", precision="int4")
    assert "rounded to nearest" in report.models[0].notes[0]
    assert Bundle.open(tmp_path / "b").manifest.target.calibration is None
    with pytest.raises(CheckpointError, match="cannot be told"):
        export(llama, tmp_path / "c", precision="int4", calibration="gptq")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": "awq"}, "Unknown calibration 'awq': expected one of gptq, none"),
        ({"calibration": "gptq", "precision": "int8"}, "for int4 weights, and these are int8"),
        ({"draft_calibration": "gptq"}, "there is none"),
        ({"quality": "yes"}, "quality must be of type bool"),
    ],
)
def test_what_cannot_be_honoured_is_refused(llama: Path, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        export(llama, tmp_path / "b", **options)


def test_manifests_from_before_still_open(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "b", precision="int8")
    data = json.loads((tmp_path / "b/paceline.json").read_text())
    for name in ("calibration", "mixed_bits", "quality"):
        del data["target"][name]
    manifest = Manifest.from_json(json.dumps(data))
    target = Bundle.open(tmp_path / "b").manifest.target
    assert manifest.target == dataclasses.replace(target, calibration=None, mixed_bits=None, quality=None)


@pytest.mark.slow
def test_a_real_model_gains_from_calibration(tmp_path: Path) -> None:
    kl = {}
    for calibration in ("none", "gptq"):
        source = resolve("smollm2-135m", cache_dir=Path(__file__).parents[2] / ".cache")
        out = tmp_path / calibration
        report = export_bundle(source, None, out, precision="int4", calibration=calibration)
        quality = report.models[0].quality
        assert quality is not None
        kl[calibration] = (quality.prompts.kl, quality.code.kl)
    assert all(after < before for before, after in zip(kl["none"], kl["gptq"], strict=True))


def test_scores_are_those_of_known_distributions() -> None:
    scores = Scores()
    full = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log().numpy()
    shipped = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log().numpy()
    scores.add(torch.tensor([0, 1]).numpy(), full, shipped)
    found = scores.result()
    assert found.positions == 2
    assert found.kl == pytest.approx(0.5 * (0.5 * torch.tensor(4 / 3).log().item()), rel=1e-5)
    assert found.argmax_agreement == 0.5
    assert (found.perplexity, found.full_perplexity) == pytest.approx((4 / 3, 2.0))


def test_held_out_texts_are_not_in_the_calibration_text() -> None:
    tokenizer = tiny_tokenizer()
    calibration = calibration_ids(tokenizer, 272, 256).flatten().tolist()
    seen = {tuple(calibration[i : i + 40]) for i in range(len(calibration))}
    for ids in held_out_ids(tokenizer, 272, 256).values():
        text = torch.cat(ids).tolist()
        shared = sum(tuple(text[i : i + 40]) in seen for i in range(len(text)))
        assert shared == 0


def test_texts_are_cut_into_sequences_of_one_length() -> None:
    assert cut(list(range(1000)), 999, 256, 600).shape == (3, 200)
    assert cut(list(range(5)), 999, 256, 600).tolist() == [[0, 1, 2, 3, 4]]
    assert cut([1, 500, 2], 500, 256, 600).tolist() == [[1, 2]]
