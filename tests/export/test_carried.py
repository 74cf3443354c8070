"""What a bundle carries beside weights: every chat template, every special token, the settings of generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import sizes, tiny_checkpoint, tiny_tokenizer

from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline.tokenizer import Tokenizer
from paceline_export.checkpoint import Checkpoint
from paceline_export.export import ExportReport, export_bundle
from paceline_export.parity import check_bundle
from paceline_export.source import resolve

MESSAGES = [{"role": "user", "content": "the"}]
DEFAULT = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"


def checkpoint(folder: Path, template: Any = None, **tokens: Any) -> Path:
    tokenizer = tiny_tokenizer(["<|im_end|>", "<sep>"])
    tokenizer.chat_template = template
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return tiny_checkpoint(folder, transformers.LlamaConfig(**sizes(num_hidden_layers=1)), tokenizer)


def export(folder: Path) -> tuple[ExportReport, Bundle]:
    out = folder.parent / "bundle"
    report = export_bundle(resolve(str(folder)), None, out, precision="int8", quality=False)
    return report, Bundle.open(out, verify_hashes=True)


def test_named_templates_are_carried_beside_the_usual_one(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"default": DEFAULT, "tool_use": "tools: {{ tools }}", "rag": "rag"})
    assert (folder / "additional_chat_templates/tool_use.jinja").is_file()  # as transformers writes them
    report, bundle = export(folder)
    assert report.models[0].notes == ()
    assert Tokenizer.from_bundle(bundle).chat_prompt(MESSAGES) == "<s>the</s>"
    carried = {path.name: path.read_text() for path in (bundle.root / "additional_chat_templates").iterdir()}
    assert carried == {"tool_use.jinja": "tools: {{ tools }}", "rag.jinja": "rag"}
    assert "additional_chat_templates/rag.jinja" in bundle.manifest.files


def test_templates_without_a_usual_one_are_told(tmp_path: Path) -> None:
    report, bundle = export(checkpoint(tmp_path / "m", {"rag": "rag", "tool_use": "tools"}))
    assert report.models[0].notes[0].startswith("none of its chat templates (rag, tool_use) is named 'default'")
    with pytest.raises(InvalidInputError, match="no chat template"):
        Tokenizer.from_bundle(bundle).chat_prompt(MESSAGES)


@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_a_template_that_cannot_be_parsed_is_refused_before_the_trace(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", {"default": DEFAULT, name: "a\n{% for m in messages %}{{ m.content }"})
    with pytest.raises(CheckpointError, match=rf"its chat template '{name}' cannot be parsed \(.*, line 2\); mend or"):
        export(folder)
    assert not (tmp_path / "bundle").exists()


def test_a_template_that_asks_for_another_sort_of_chat_is_taken(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", "{{ raise_exception('a system message comes first') }}")
    assert export(folder)[0].models[0].notes == ()


def test_added_tokens_with_impossible_ids_are_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", DEFAULT)
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text())
    (sep,) = [token for token in stated["added_tokens"] if token["content"] == "<sep>"]
    had, sep["id"] = sep["id"], 5
    path.write_text(json.dumps(stated))
    report, bundle = export(folder)
    assert Tokenizer.from_bundle(bundle).added_tokens["<sep>"] == had
    (note,) = report.models[0].notes
    assert note.startswith("1 added tokens have other ids")
    assert f"'<sep>' 5 → {had}" in note


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_a_template_is_found_wherever_it_stands(where: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    if where == "chat_template.jinja":
        (folder / where).write_text(DEFAULT)
    else:
        path = folder / "tokenizer_config.json"
        template = DEFAULT if where != "list" else [{"name": "default", "template": DEFAULT}]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    assert Tokenizer.from_bundle(export(folder)[1]).chat_prompt(MESSAGES) == "<s>the</s>"


def test_a_template_whose_name_is_no_file_name_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    path = folder / "tokenizer_config.json"
    templates = [{"name": "../../up", "template": "x"}, {"name": "default", "template": DEFAULT}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    with pytest.raises(CheckpointError, match=r"is named '../../up'; expected letters"):
        Checkpoint.open(resolve(str(folder)))


def test_special_tokens_have_the_names_that_templates_use(tmp_path: Path) -> None:
    """Of several ids that end a text, `eos_token` is the tokenizer's own, whatever their order."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ sep_token }}|{{ unk_token }}"
    folder = checkpoint(tmp_path / "m", template, eos_token="<|im_end|>", sep_token="<sep>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 262], "top_k": 20}))
    _, bundle = export(folder)
    tokenizer = Tokenizer.from_bundle(bundle)
    assert tokenizer.eos_token_ids == (260, 262)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id == 262
    expected = "<s>|<|im_end|>|<pad>|<sep>|"
    assert tokenizer.chat_prompt(MESSAGES) == expected
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == expected
    assert json.loads((bundle.root / "generation_config.json").read_text())["top_k"] == 20


def test_a_bundle_from_before_special_tokens_were_kept_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", DEFAULT)
    _, bundle = export(folder)
    path = bundle.root / "paceline.json"
    manifest = json.loads(path.read_text())
    assert manifest["tokenizer"].pop("special_tokens")["eos_token"] == "</s>"
    assert "adapter" in manifest["target"]["source"]
    del manifest["target"]["source"]["adapter"]
    path.write_text(json.dumps(manifest))
    assert Tokenizer.from_bundle(Bundle.open(bundle.root)).chat_prompt(MESSAGES) == "<s>the</s>"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_read_from_any_float(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from paceline_export.parity import stored_weights

    folder = checkpoint(tmp_path / "m")
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    export_bundle(resolve(str(folder)), None, tmp_path / "bundle", precision="fp32", quality=False)
    for name, tensor in stored_weights(tmp_path / "bundle/target/model.onnx").items():
        torch.testing.assert_close(tensor, weights[name].to(torch.float32), rtol=0, atol=0)
    assert check_bundle(Bundle.open(tmp_path / "bundle")).passed
