"""Pairs whose draft has a tokenizer of its own, or is cut from the target itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from tiny import sizes, tiny_checkpoint, tiny_tokenizer
from tokenizers import decoders, models, normalizers

import paceline
from paceline.bundle import MANIFEST_NAME, Bundle
from paceline.errors import BundleError, IncompatiblePairError, InvalidInputError
from paceline.translated import TranslatedModel
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle
from paceline_export.source import resolve

METHODS = ("intersection", "text")
TEXT = "Write the words: é, 😀 and the others."


def sentence_piece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2's: ▁ for spaces, bytes for what is no piece; 259 ids and some pieces."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aehnort", "th", "the", "▁the"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), transformers.LlamaConfig(**sizes(num_hidden_layers=3)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.LlamaConfig(**sizes(num_hidden_layers=1, vocab_size=280, bos_token_id=0, eos_token_id=1))
    return tiny_checkpoint(tmp_path_factory.mktemp("draft"), config, sentence_piece_tokenizer(), seed=1)


def export(target: Path, draft: Path | None, out: Path, **options: Any) -> Any:
    options = {"precision": "fp32", "quality": False, **options}
    return export_bundle(resolve(str(target)), resolve(str(draft)) if draft else None, out, **options)


@pytest.fixture(scope="module")
def bundles(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for method in METHODS:
        export(target, draft, folder / method, draft_method=method)
    return {method: folder / method for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_the_manifest_says_what_is_shared_and_how_it_drafts(bundles: dict[str, Path], method: str) -> None:
    bundle = Bundle.open(bundles[method], verify_hashes=True)
    own = bundle.manifest.draft_tokenizer
    assert own is not None
    assert own.method == method
    assert own.tokenizer.vocab_size == 270
    assert own.tokenizer.eos_token_ids == (1,)
    pairs = np.load(bundle.path(own.shared_ids))
    assert pairs.dtype == np.int32
    assert len(pairs) == 2
    # Bytes, pieces, and special tokens; not <unk>, and a piece that has letters goes before its byte.
    assert {0: 259, 1: 260}.items() <= dict(pairs.T.tolist()).items()
    assert bundle.manifest.draft is not None
    # By intersection the draft needs no logits for what it cannot propose.
    kept = bundle.manifest.draft.logit_ids
    assert (kept is not None) == (method == "intersection")
    if kept is not None:
        assert np.array_equal(np.load(bundle.path(kept.path)), pairs[0])
    assert bundle.manifest.sampler is not None
    assert "draft" not in bundle.manifest.sampler.graphs


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_decodings(bundles: dict[str, Path], method: str) -> None:
    decoder = paceline.load(bundles[method])
    assert isinstance(decoder.draft, TranslatedModel)
    for prompt in (TEXT, "the"):
        plain = decoder.generate(prompt, max_new_tokens=40, num_draft_tokens=0)
        list(plain)
        for k in (1, 3, 5, "auto"):
            generation = decoder.generate(prompt, max_new_tokens=40, num_draft_tokens=k)
            list(generation)
            assert generation.token_ids == plain.token_ids
            assert k == "auto" or generation.stats.proposed > 0


@pytest.mark.parametrize("method", METHODS)
def test_check_compares_the_draft_on_its_own_ids(bundles: dict[str, Path], method: str) -> None:
    report = check_bundle(Bundle.open(bundles[method]))
    assert report.passed
    assert [model.which for model in report.models] == ["target", "draft"]


def test_a_prefix_cache_serves_both_models(bundles: dict[str, Path]) -> None:
    decoder = paceline.load(bundles["intersection"], prefix_cache_bytes=1 << 24)
    texts = []
    for _ in range(2):
        generation = decoder.generate(TEXT, max_new_tokens=20, num_draft_tokens=3)
        list(generation)
        texts.append(generation.token_ids)
    assert generation.stats.cached_tokens > 16
    assert texts[0] == texts[1]


def test_the_samplers_graphs_are_refused(bundles: dict[str, Path]) -> None:
    with pytest.raises(InvalidInputError, match="a tokenizer of its own, whose ids the sampler's graphs do not know"):
        paceline.load(bundles["text"], sampler="graph")


def test_a_smaller_draft_vocabulary_is_cut_from_its_own_ids(target: Path, draft: Path, tmp_path: Path) -> None:
    report = export(target, draft, tmp_path / "bundle", draft_vocab=100, draft_method="text")
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.vocab_size == 100
    decoder = paceline.load(tmp_path / "bundle")
    assert decoder.draft is not None
    assert decoder.draft.vocab_size <= 100
    assert decoder.draft.logit_ids is not None
    assert 260 in decoder.draft.logit_ids
    plain, generation = (decoder.generate(TEXT, max_new_tokens=30, num_draft_tokens=k) for k in (0, 4))
    list(plain), list(generation)
    assert generation.token_ids == plain.token_ids
    (note,) = report.models[1].notes
    assert "a tokenizer of its own, which shares" in note
    assert "text" in note


def test_tokenizers_without_a_common_token_are_refused_before_any_work(target: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[x]": 0, "[y]": 1}, unk_token="[x]"))
    backend.add_special_tokens(["[x]", "[y]"])
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[x]")
    folder = tiny_checkpoint(tmp_path / "m", transformers.LlamaConfig(**sizes(eos_token_id=1)), other)
    with pytest.raises(IncompatiblePairError, match="share no token"):
        export(target, folder, tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


def test_a_method_is_for_another_tokenizer_alone(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="draft_method='text' is for a draft with another tokenizer"):
        export(target, target, tmp_path / "bundle", draft_method="text")
    with pytest.raises(InvalidInputError, match="Unknown draft_method 'words': expected one of intersection, text"):
        export(target, target, tmp_path / "bundle", draft_method="words")
    with pytest.raises(InvalidInputError, match="is for a draft model, and there is none"):
        export(target, None, tmp_path / "bundle", draft_method="text")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["draft_tokenizer"]["tokenizer"].update(vocab_size=281), "281 ids, the draft reads only 280"),
        (lambda data: data["draft_tokenizer"].update(path="draft/other.json"), "does not list it among its files"),
        (lambda data: data["draft_tokenizer"].update(method="guess"), "knows 'intersection', 'text'"),
        (lambda data: data.update(draft=None), "names a 'draft_tokenizer', but no draft"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    bundles: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    bundle = Path(shutil.copytree(bundles["text"], tmp_path / "bundle"))
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    change(data)
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle)


def test_the_first_layers_of_the_target_draft_for_it(target: Path, tmp_path: Path) -> None:
    report = export(target, None, tmp_path / "bundle", draft_layers=2)
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.num_layers == 2
    assert report.models[1].name == f"{report.models[0].name}, first 2 of 3 layers"
    assert bundle.manifest.draft_tokenizer is None
    assert check_bundle(bundle).passed
    decoder = paceline.load(tmp_path / "bundle")
    plain, generation = (decoder.generate(TEXT, max_new_tokens=30, num_draft_tokens=k) for k in (0, 4))
    list(plain), list(generation)
    assert generation.token_ids == plain.token_ids


def test_first_layers_are_fewer_than_all(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has 3 layers, so a draft of its first 3 is not possible"):
        export(target, None, tmp_path / "bundle", draft_layers=3)
    with pytest.raises(InvalidInputError, match="draft_layers must be at least 1, got 0"):
        export(target, None, tmp_path / "bundle", draft_layers=0)
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.slow
def test_windows_of_the_first_layers_are_cut_with_them(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        **sizes(num_hidden_layers=4, head_dim=16, sliding_window=8),
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )
    folder = tiny_checkpoint(tmp_path / "m", config, tiny_tokenizer())
    export(folder, None, tmp_path / "bundle", draft_layers=3)
    assert check_bundle(Bundle.open(tmp_path / "bundle")).passed


def test_a_changed_file_of_a_bundles_target_is_not_taken_over(
    bundles: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(bundles["text"], tmp_path / "damaged"))
    path = damaged / "target/model.onnx.data"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"damaged: target/model\.onnx\.data is damaged: its bytes are not those"):
        export_bundle(
            Bundle.open(damaged), resolve(str(target)), tmp_path / "b", draft_layers=1, precision="fp32", quality=False
        )
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_bundles_target_gets_another_draft(bundles: dict[str, Path], target: Path, tmp_path: Path) -> None:
    ready = Bundle.open(bundles["text"])
    options: dict[str, Any] = {"precision": "fp32", "quality": False}
    report = export_bundle(ready, resolve(str(target)), tmp_path / "self", draft_layers=1, **options)
    bundle = Bundle.open(tmp_path / "self", verify_hashes=True)
    assert bundle.manifest.target == ready.manifest.target
    assert bundle.manifest.tokenizer == ready.manifest.tokenizer
    assert bundle.manifest.graph_sha256(bundle.manifest.target) == ready.manifest.graph_sha256(ready.manifest.target)
    assert bundle.manifest.draft_tokenizer is None
    assert not bundle.has("draft/tokenizer.json")
    assert bundle.manifest.draft is not None
    assert bundle.manifest.draft.num_layers == 1
    assert [model.which for model in report.models] == ["draft"]
    assert check_bundle(bundle).passed
    texts = set()
    for root in (tmp_path / "self", bundles["text"]):
        generation = paceline.load(root).generate(TEXT, max_new_tokens=20, num_draft_tokens=2)
        list(generation)
        texts.add(generation.token_ids)
    assert len(texts) == 1


def test_what_a_ready_target_cannot_honour_is_refused(bundles: dict[str, Path], target: Path, tmp_path: Path) -> None:
    ready, source = Bundle.open(bundles["text"]), resolve(str(target))
    for draft, options, message in (
        (None, {}, "is a bundle, so its target is exported already: name a draft for it"),
        (source, {"flavor": "trt", "precision": "fp16"}, "has the flavour 'ort', and 'trt' is asked for"),
        (source, {"calibration": "none"}, "calibration='none' is for a target that is exported"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            export_bundle(ready, draft, tmp_path / "bundle", **options)  # type: ignore[arg-type]
