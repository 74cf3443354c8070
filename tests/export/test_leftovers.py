"""Tensors that no parameter is made of: left out in silence, named, or refused; and those that lie in two shards."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import sizes, tiny_checkpoint

from paceline.errors import CheckpointError
from paceline_export.causal_lm import check_architecture
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import export_bundle
from paceline_export.leftovers import check_left_over
from paceline_export.source import resolve

LAYER = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**sizes(tie_word_embeddings=True))
    return tiny_checkpoint(tmp_path_factory.mktemp("tied") / "model", config)


def with_more(folder: Path, place: Path, more: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, place)
    save_file(load_file(folder / "model.safetensors") | more, place / "model.safetensors", metadata={"format": "pt"})
    return place


def notes(folder: Path, layers: int | None = None) -> tuple[str, ...]:
    checkpoint = Checkpoint.open(resolve(str(folder)))
    if layers is not None:
        checkpoint = checkpoint.first_layers(layers)
    model = check_architecture(checkpoint.config)
    return check_left_over("it", checkpoint.weights(model).left_over(), model, cut=checkpoint.cut)


def further_layer(folder: Path) -> dict[str, torch.Tensor]:
    """The last layer once more, behind it."""
    tensors = load_file(folder / "model.safetensors")
    return {name.replace(".1.", ".2."): tensor.clone() for name, tensor in tensors.items() if "layers.1." in name}


def test_what_a_model_makes_by_itself_is_left_out_in_silence(tied: Path, tmp_path: Path) -> None:
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    more = {
        f"{LAYER}.rotary_emb.inv_freq": torch.ones(8),
        f"{LAYER}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        f"{LAYER}.masked_bias": torch.tensor(-1e9),
        f"{LAYER}.k_scale": torch.ones(1),
        f"{LAYER}.q_proj.input_scale": torch.ones(1),
        f"{LAYER}.q_proj.bias": torch.zeros(64),
        "lm_head.weight": embedding.clone(),
    }
    assert notes(with_more(tied, tmp_path / "more", more)) == ()


def test_parts_of_a_larger_model_are_named(tied: Path, tmp_path: Path) -> None:
    more = {
        "visual.blocks.0.attn.qkv.weight": torch.ones(4, 4),
        "visual.blocks.1.attn.qkv.weight": torch.ones(4, 4),
        "mtp.fc.weight": torch.ones(4, 4),
        "model.layers.2.eh_proj.weight": torch.ones(4, 4),  # a layer that predicts a further token
    }
    found = notes(with_more(tied, tmp_path / "more", more | further_layer(tied)))
    assert found == (
        "13 tensors of the checkpoint are left out, since LlamaForCausalLM has no such parts: model.layers.2 (10), "
        "mtp.fc (1), visual.blocks (2)",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{LAYER}.q_proj.bias", r"no such parameter: .*of a bias, look at attention_bias"),
        (f"{LAYER}.q_norm.weight", "without it, the model would be another one"),
        ("model.norm.bias", "without it, the model would be another one"),
        ("lm_head.weight", "Set tie_word_embeddings to false in config.json"),
    ],
)
def test_what_would_make_another_model_is_refused(name: str, message: str, tied: Path, tmp_path: Path) -> None:
    shape = (272, 64) if name == "lm_head.weight" else (64,)
    folder = with_more(tied, tmp_path / "more", {name: torch.ones(shape)})
    with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}'.*{message}"):
        export_bundle(resolve(str(folder)), None, tmp_path / "bundle", quality=False)
    assert not (tmp_path / "bundle").exists()


def test_a_layer_more_than_the_configuration_says_is_refused_unless_it_is_cut(tied: Path, tmp_path: Path) -> None:
    folder = with_more(tied, tmp_path / "more", further_layer(tied))
    with pytest.raises(CheckpointError, match=r"holds a layer model\.layers\.2 .* says that there are 2\."):
        notes(folder)
    assert notes(tied, layers=1) == ()


def test_a_tensor_in_two_shards_is_the_one_that_the_index_names(tied: Path, tmp_path: Path) -> None:
    folder, name = Path(shutil.copytree(tied, tmp_path / "shards")), "model.norm.weight"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors")
    save_file({name: torch.full((64,), 3.0)}, folder / "b.safetensors")
    index = dict.fromkeys(tensors, "a.safetensors")

    def read() -> torch.Tensor:
        checkpoint = Checkpoint.open(resolve(str(folder)))
        return checkpoint.weights(check_architecture(checkpoint.config)).read(name)

    def say(weight_map: dict[str, str]) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    say(index | {name: "b.safetensors"})
    assert read().eq(3).all()
    say(index | {"other": "b.safetensors"})
    torch.testing.assert_close(read(), tensors[name], rtol=0, atol=0)
    del index[name]
    say(index | {"other": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' lies in .*a\.safetensors and in b\.safetensors"):
        read()
