"""LoRA adapters merged at export give what they give beside their base model; what cannot be merged is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle, file_sha256
from paceline.errors import CheckpointError, InvalidInputError
from paceline_export import layer_patterns
from paceline_export.adapter import AdaptedReader, Adapter
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, stored_weights
from paceline_export.source import resolve

PREFIX = "base_model.model."
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"), transformers.LlamaConfig(**sizes()))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tied"), transformers.LlamaConfig(**sizes(tie_word_embeddings=True)))


def factors(*modules: tuple[str, int, int], rank: int = 4) -> dict[str, torch.Tensor]:
    """Random A and B of linear layers, named as peft names them: module, rows, columns."""
    random = torch.Generator().manual_seed(7)
    found = {}
    for module, rows, columns in modules:
        found[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=random)
        found[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=random)
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def reader(base: Path, adapter: Path) -> AdaptedReader:
    checkpoint = Checkpoint.open(resolve(str(base)), adapter)
    weights = checkpoint.weights(check_architecture(checkpoint.config))
    assert isinstance(weights, AdaptedReader)
    return weights


def model_with(base: Path, adapter: Path, scales: dict[str, float]) -> torch.nn.Module:
    """The base model in torch whose linear layers add `s B (A x)` as they run: nothing is merged."""
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tensors = load_file(adapter / "adapter_model.safetensors")
    for module, scale in scales.items():
        a, b = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")

        def add(_: Any, given: Any, output: Any, a: Any = a, b: Any = b, scale: float = scale) -> torch.Tensor:
            return output + scale * (given[0] @ a.T) @ b.T  # type: ignore[no-any-return]

        model.get_submodule(module).register_forward_hook(add)
    return model


IDS = [259, 5, 40, 7, 200, 31, 31, 2]


def graph_logits(bundle: Path, ids: list[int]) -> torch.Tensor:
    from paceline_export.cpu import open_on_cpu

    entry = Bundle.open(bundle).manifest.target
    model = open_on_cpu(bundle / "target/model.onnx", entry, 64)
    return torch.from_numpy(model.forward(ids, model.new_cache(len(ids)), len(ids)))


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, {QUERY: 2.0, DOWN: 2.0}),
        ({"use_rslora": True}, {QUERY: 8 / math.sqrt(4), DOWN: 8 / math.sqrt(4)}),
        ({"r": 16, "rank_pattern": {"q_proj": 4, "down_proj": 4}}, {QUERY: 2.0, DOWN: 2.0}),
        ({"alpha_pattern": {"down_proj": 2}}, {QUERY: 2.0, DOWN: 0.5}),
        ({"alpha_pattern": {"own_proj": 2, r"layers\.0\..*q_proj": 3}}, {QUERY: 0.75, DOWN: 2.0}),
    ],
)
def test_the_weights_are_those_of_the_model_with_its_adapter_beside_it(
    base: Path, tmp_path: Path, settings: dict[str, Any], scales: dict[str, float]
) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64), (DOWN, 64, 96)), **settings)
    merged, plain = (transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32) for _ in range(2))
    weights, ids = reader(base, adapter), torch.tensor([IDS])
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(weights.read(name))
        found, expected = merged(ids).logits, model_with(base, adapter, scales)(ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        assert (found - plain(ids).logits).abs().max() > 0.1  # the adapter does something


def test_the_graph_is_the_model_with_its_adapter_beside_it(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64), (DOWN, 64, 96)), alpha_pattern={"down_proj": 2})
    export_bundle(resolve(str(base)), None, tmp_path / "bundle", precision="fp32", quality=False, adapter=adapter)
    with torch.no_grad():
        expected = model_with(base, adapter, {QUERY: 2.0, DOWN: 0.5})(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(graph_logits(tmp_path / "bundle", IDS), expected, rtol=0, atol=2e-3)


def test_a_bundle_says_which_adapter_it_has(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    report = export_bundle(
        resolve(str(base)), resolve(str(base)), tmp_path / "b", precision="int8", quality=False, draft_adapter=adapter
    )
    manifest = Bundle.open(tmp_path / "b").manifest
    assert manifest.target.source.adapter is None
    assert manifest.draft is not None
    assert manifest.draft.source.adapter is not None
    assert manifest.draft.source.adapter.name == "lora"
    assert manifest.draft.source.adapter.sha256 == file_sha256(adapter / "adapter_model.safetensors")
    assert report.models[1].notes == ("the adapter lora was merged into 1 weights",)
    assert check_bundle(Bundle.open(tmp_path / "b")).passed


def test_layers_that_were_trained_in_full_replace_the_bases(base: Path, tmp_path: Path) -> None:
    head, norm = torch.randn(272, 64), torch.randn(64)
    whole = {f"{PREFIX}lm_head.weight": head, f"{PREFIX}model.norm.modules_to_save.weight": norm}
    weights = reader(base, write(tmp_path / "lora", factors((QUERY, 64, 64)) | whole, modules_to_save=["lm_head"]))
    torch.testing.assert_close(weights.read("lm_head.weight"), head, rtol=0, atol=0)
    torch.testing.assert_close(weights.read("model.norm.weight"), norm, rtol=0, atol=0)
    original = load_file(base / "model.safetensors")
    torch.testing.assert_close(weights.read(f"{DOWN}.weight"), original[f"{DOWN}.weight"], rtol=0, atol=0)


def test_an_embedding_gets_its_own_factors(base: Path, tmp_path: Path) -> None:
    a, b = torch.randn(4, 272), torch.randn(64, 4)
    tensors = {f"{PREFIX}model.embed_tokens.lora_embedding_A": a, f"{PREFIX}model.embed_tokens.lora_embedding_B": b}
    weights = reader(base, write(tmp_path / "lora", tensors))
    original = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    for token_id in (0, 5, 271):  # a row at a time, as a lookup adds it
        expected = original[token_id] + 2.0 * (b @ a[:, token_id])
        torch.testing.assert_close(weights.read("model.embed_tokens.weight")[token_id], expected)


def test_factors_are_added_to_the_layer_that_came_with_them(base: Path, tmp_path: Path) -> None:
    """As peft saves embeddings that it adapts."""
    layer, tensors = torch.randn(272, 64), factors(("lm_head", 272, 64))
    weights = reader(base, write(tmp_path / "lora", tensors | {f"{PREFIX}lm_head.base_layer.weight": layer}))
    a, b = (tensors[f"{PREFIX}lm_head.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(weights.read("lm_head.weight"), layer + 2.0 * b @ a)


def test_layers_beside_experts_are_merged_and_factors_of_one_expert_are_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", transformers.MixtralConfig(**sizes(num_local_experts=4)))
    assert any(".experts.1." in name for name in load_file(base / "model.safetensors"))  # the model has them stacked
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    export_bundle(resolve(str(base)), None, tmp_path / "bundle", precision="fp32", quality=False, adapter=adapter)
    ids = [259, 5, 40, 7, 200, 31, 31, 2]
    with torch.no_grad():
        expected = model_with(base, adapter, {QUERY: 2.0})(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(graph_logits(tmp_path / "bundle", ids), expected, rtol=0, atol=2e-3)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.experts.1.gate_proj.weight', one expert's layer"):
        reader(base, write(tmp_path / "one", factors(("model.layers.0.mlp.experts.1.gate_proj", 96, 64))))


def test_a_draft_of_the_first_layers_has_the_targets_adapter(base: Path, tmp_path: Path) -> None:
    source, adapter = resolve(str(base)), write(tmp_path / "lora", factors((QUERY, 64, 64), (DOWN, 64, 96)))
    report = export_bundle(
        source, None, tmp_path / "bundle", precision="fp32", quality=False, adapter=adapter, draft_layers=1
    )
    stored = stored_weights(tmp_path / "bundle/draft/model.onnx")
    torch.testing.assert_close(stored[f"{QUERY}.weight"], reader(base, adapter).read(f"{QUERY}.weight"))
    assert f"{DOWN}.weight" not in stored
    merged = [f"the adapter lora was merged into {count} weights" for count in (2, 1)]
    assert [model.notes[-1] for model in report.models] == merged
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.source.adapter == bundle.manifest.target.source.adapter is not None
    with pytest.raises(InvalidInputError, match="one that is cut from the target has the target's adapter"):
        export_bundle(source, None, tmp_path / "other", draft_layers=1, draft_adapter=adapter)
    with pytest.raises(InvalidInputError, match="is a bundle already, whose weights are stored"):
        export_bundle(bundle, source, tmp_path / "other", adapter=adapter)


def test_one_half_of_a_tied_pair_is_changed_alone(tied: Path, tmp_path: Path) -> None:
    """Beside its base model, an adapter of the LM head leaves the embedding as it is."""
    adapter = write(tmp_path / "lora", factors(("lm_head", 272, 64)))
    report = export_bundle(
        resolve(str(tied)), None, tmp_path / "bundle", precision="fp32", quality=False, adapter=adapter
    )
    assert "are stored as two" in report.models[0].notes[-1]
    ids = [259, 5, 40, 7, 200]
    with torch.no_grad():
        expected = model_with(tied, adapter, {"lm_head": 2.0})(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(graph_logits(tmp_path / "bundle", ids), expected, rtol=0, atol=2e-3)
    assert check_bundle(Bundle.open(tmp_path / "bundle")).passed


def test_a_tied_head_that_no_adapter_changes_stays_tied(tied: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    assert Checkpoint.open(resolve(str(tied)), adapter).config.tie_word_embeddings
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    assert reader(tied, adapter).read(f"{QUERY}.weight").shape == (64, 64)


def test_dora_scales_rows_to_the_lengths_that_it_learned(base: Path, tmp_path: Path) -> None:
    magnitude = torch.rand(64) + 0.5
    tensors = factors((DOWN, 64, 96)) | {f"{PREFIX}{DOWN}.lora_magnitude_vector": magnitude}
    merged = reader(base, write(tmp_path / "dora", tensors, use_dora=True)).read(f"{DOWN}.weight")
    original = load_file(base / "model.safetensors")[f"{DOWN}.weight"]
    a, b = (tensors[f"{PREFIX}{DOWN}.lora_{part}.weight"] for part in "AB")
    for row in (0, 17, 63):
        direction = original[row] + 2.0 * sum(b[row, i] * a[i] for i in range(4))
        torch.testing.assert_close(merged[row], magnitude[row] * direction / direction.pow(2).sum().sqrt())


def test_layers_stored_by_columns_are_merged_by_columns(tmp_path: Path) -> None:
    """GPT-2's linear layers hold `[columns, rows]`, which an adapter has to know (fan_in_fan_out)."""
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=40, n_positions=16)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    name = "transformer.h.0.attn.c_attn"
    adapter = Adapter.open(write(tmp_path / "lora", factors((name, 96, 32)), fan_in_fan_out=True))

    class Base:
        def shape(self, name: str) -> tuple[int, ...]:
            return tuple(model.get_parameter(name).shape)

        def read(self, name: str) -> torch.Tensor:
            weight: torch.Tensor = model.get_parameter(name).detach()
            return weight

        def packed(self, name: str) -> None:
            return None

        def left_over(self) -> dict[str, str]:
            return {}

    weights = AdaptedReader(Base(), adapter, model)
    a, b = (load_file(adapter.file)[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
    x = torch.randn(3, 32)
    with torch.no_grad():
        expected = x @ model.get_parameter(f"{name}.weight") + 2.0 * (x @ a.T) @ b.T
    torch.testing.assert_close(x @ weights.read(f"{name}.weight"), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "adapter of the type 'IA3'; expected LORA"),
        ({"task_type": "SEQ_CLS"}, "trained for the task 'SEQ_CLS'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' takes something out"),
        ({"lora_bias": True}, r"\(lora_bias\), which is not supported; merge it with peft"),
        ({"target_parameters": ["experts.down_proj"]}, r"\(target_parameters\)"),
        ({"trainable_token_indices": [1, 2]}, r"\(trainable_token_indices\)"),
        ({"layer_replication": [[0, 2]]}, r"\(layer_replication\)"),
        ({"r": 0}, "r is 0; expected a positive number"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10{39}…; expected a positive number"),
        ({"alpha_pattern": ["x"]}, "alpha_pattern is"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern has 10{39}… for 'q_proj'; expected a number"),
        ({"alpha_pattern": {"q_proj(": 3}}, r"alpha_pattern names 'q_proj\(', which is no regular expression"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern has '4' for 'q_proj'; expected a number"),
        ({"r": 8}, r"the factors of '.*q_proj.weight' have rank 4, and adapter_config.json says 8"),
        ({"rank_pattern": {"q_proj": 2}}, "q_proj.weight' have rank 4, and adapter_config.json says 2"),
        ({"lora_alpha": 1e300}, r"lora_alpha of '.*q_proj.weight' is 1e\+300"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern has nan for 'q_proj'"),
        ({"use_dora": True}, "has no lora_magnitude_vector of '.*q_proj.weight', though"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)), **settings)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(resolve(str(base)), adapter)


def test_patterns_that_would_take_years_are_given_up(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_patterns, "_SECONDS", 0.5)
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)), rank_pattern={r"(([\w.])+)+!": 4})
    with pytest.raises(CheckpointError, match=r"rank_pattern names .* take longer than 0\.5 s as regular expressions"):
        Checkpoint.open(resolve(str(base)), adapter)


A, B = f"{PREFIX}{QUERY}.lora_A.weight", f"{PREFIX}{QUERY}.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A: None}, r"the factors of '.*q_proj.weight' have shapes \(64, 4\)"),
        ({A: torch.zeros(3, 64)}, r"the factors of '.*q_proj.weight' have shapes \(3, 64\), \(64, 4\)"),
        ({B: torch.zeros(32, 4)}, r"as if its shape were \(32, 64\); the checkpoint has \(64, 64\)"),
        ({f"{PREFIX}{QUERY}.weight": torch.zeros(64, 64)}, "in full and as low-rank factors"),
        ({f"{PREFIX}{QUERY}.lora_C.weight": torch.zeros(1)}, "of a kind that is not supported"),
        ({"model.norm.weight": torch.zeros(64)}, "expected names that begin with 'base_model.model.'"),
        (
            {f"{PREFIX}model.other.weight": torch.zeros(64)},
            "'model.other.weight', which LlamaForCausalLM does not have",
        ),
        ({f"{PREFIX}model.embed_tokens.weight": torch.zeros(280, 64)}, r"whose vocabulary was changed"),
        ({A: torch.zeros(4, 64, dtype=torch.int8)}, r"no plain floating-point ones: .*lora_A.weight \(I8\)"),
        ({A: torch.full((4, 64), math.nan)}, "holds values that are NaN or infinite"),
    ],
)
def test_tensors_that_fit_nothing_are_refused_by_name(
    base: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors: dict[str, torch.Tensor | None] = {**factors((QUERY, 64, 64)), **changes}
    adapter = write(tmp_path / "lora", {name: tensor for name, tensor in tensors.items() if tensor is not None})
    with pytest.raises(CheckpointError, match=message):
        reader(base, adapter).read(f"{QUERY}.weight")


@pytest.mark.parametrize(
    "damage",
    [
        {"dtype": "F31"},
        {"shape": [4, 32]},
        {"shape": [-4, -64]},
        {"data_offsets": [1, 1025]},
        {"data_offsets": [512, 1024]},
    ],
)
def test_a_damaged_header_of_the_right_size_is_refused(base: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[A] |= damage
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors cannot be read .*download it again"):
        Checkpoint.open(resolve(str(base)), adapter)


def test_what_is_no_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    source = resolve(str(base))
    with pytest.raises(CheckpointError, match=r"is not an adapter: it has no adapter_config.json"):
        Checkpoint.open(source, base)
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin, a pickle, which can run any code"):
        Checkpoint.open(source, adapter)
    (adapter / "adapter_model.bin").rename(adapter / "adapter_model.safetensors")
    with (adapter / "adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint.open(source, adapter)
    with pytest.raises(InvalidInputError, match="draft_adapter='lora' is for a draft model, and there is none"):
        export_bundle(source, None, tmp_path / "bundle", draft_adapter=Path("lora"))


def test_weights_of_the_bundle_are_the_merged_ones_where_they_are_few_bits(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "lora", factors((QUERY, 64, 64)))
    export_bundle(resolve(str(base)), None, tmp_path / "bundle", precision="int8", quality=False, adapter=adapter)
    merged = reader(base, adapter).read(f"{QUERY}.weight")
    stored = stored_weights(tmp_path / "bundle/target/model.onnx")[f"{QUERY}.weight"]
    torch.testing.assert_close(stored, merged, rtol=0, atol=float(merged.abs().max()) / 200)
