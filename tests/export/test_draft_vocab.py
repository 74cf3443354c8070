"""`--draft-vocab`: a draft with logits for some ids, from the export to the text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner
from tiny import sizes, tiny_checkpoint, tiny_tokenizer

import paceline
from paceline import SamplingParams, SpeculativeDecoder
from paceline.bundle import MANIFEST_NAME, Bundle, FileEntry, file_sha256
from paceline.errors import BundleError, CheckpointError, InvalidInputError
from paceline.ort import OrtModel
from paceline_export.draft_vocab import corpus, useful_ids
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, stored_weights
from paceline_export.passes.lm_head import cut_lm_head
from paceline_export.source import resolve
from paceline_tools.info import command as info
from paceline_tools.verify import command as verify

KEPT = 150
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("target"), transformers.LlamaConfig(**sizes()))


@pytest.fixture(scope="module")
def pair(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target drafts for itself: whatever it can propose is right."""
    out = tmp_path_factory.mktemp("bundles") / "pair"
    source = resolve(str(target))
    export_bundle(source, source, out, precision="fp32", draft_vocab=KEPT)
    return out


@pytest.fixture(scope="module")
def decoder(pair: Path) -> SpeculativeDecoder:
    return paceline.load(pair)


def text_of(decoder: SpeculativeDecoder, sampling: SamplingParams, **options: Any) -> tuple[int, ...]:
    generation = decoder.generate(PROMPT, sampling, max_new_tokens=60, **options)
    list(generation)
    return generation.token_ids


def test_the_manifest_says_which_ids_the_draft_has_logits_for(pair: Path, decoder: SpeculativeDecoder) -> None:
    manifest = Bundle.open(pair, verify_hashes=True).manifest
    assert manifest.draft is not None
    assert manifest.draft.logit_ids is not None
    assert (manifest.draft.vocab_size, manifest.draft.num_input_ids) == (KEPT, 272)
    assert (manifest.target.vocab_size, manifest.target.num_input_ids, manifest.target.logit_ids) == (272, 272, None)
    assert decoder.draft is not None
    assert decoder.draft.logit_ids is not None
    assert decoder.draft.logit_ids.tolist() == useful_ids(tiny_tokenizer(), (260,), KEPT).tolist()


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 4])
def test_the_greedy_text_is_the_targets(decoder: SpeculativeDecoder, num_draft_tokens: int) -> None:
    assert decoder.draft is not None
    assert decoder.draft.logit_ids is not None
    kept = set(decoder.draft.logit_ids.tolist())
    found: set[int] = set()
    for prompt in ([5, 6, 7], [99], [200, 8]):
        plain = decoder.generate(prompt, max_new_tokens=60, num_draft_tokens=0)
        generation = decoder.generate(prompt, max_new_tokens=60, num_draft_tokens=num_draft_tokens)
        list(plain), list(generation)
        assert generation.token_ids == plain.token_ids
        assert generation.stats.accepted > 0
        found |= set(plain.token_ids)
    assert found & kept
    assert found - kept  # what the draft cannot propose is written, and read by it, all the same


def test_a_draft_of_the_same_weights_proposes_the_best_id_that_it_has(decoder: SpeculativeDecoder) -> None:
    assert decoder.draft is not None
    assert decoder.draft.logit_ids is not None
    logits = [model.forward([9, 261, 3], model.new_cache(8), 3).copy() for model in (decoder.target, decoder.draft)]
    np.testing.assert_allclose(logits[1], logits[0][:, decoder.draft.logit_ids], atol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(1.0, seed=3),
        SamplingParams(0.7, top_p=0.9, top_k=60, seed=4),
        SamplingParams(frequency_penalty=0.5, logit_bias={5: 2.0}, min_new_tokens=10),
        SamplingParams(0.8, repetition_penalty=1.2, banned_token_ids=(7,), forced_token_ids=(3, 258, 9), seed=5),
    ],
)
def test_the_graphs_draft_as_numpy_does(pair: Path, decoder: SpeculativeDecoder, sampling: SamplingParams) -> None:
    graphs = paceline.load(pair, sampler="graph")
    for seed in (1, 2, 3):
        params = replace(sampling, seed=seed)
        ours, theirs = (text_of(each, params, num_draft_tokens=3) for each in (decoder, graphs))
        assert ours == theirs


def test_a_constraint_and_a_draft_that_knows_none_of_its_ids(decoder: SpeculativeDecoder) -> None:
    assert decoder.draft is not None
    assert decoder.draft.logit_ids is not None
    unknown = sorted(set(range(256)) - set(decoder.draft.logit_ids.tolist()))[:2]
    words = np.zeros(-(-decoder.vocab_size // 32), np.uint32)
    np.bitwise_or.at(words, np.array(unknown) // 32, np.uint32(1) << (np.array(unknown) % 32).astype(np.uint32))
    texts = [
        text_of(decoder, SamplingParams(), num_draft_tokens=k, constraint=lambda new_tokens: words) for k in (0, 3)
    ]
    assert texts[0] == texts[1]
    assert set(texts[0]) <= set(unknown)


def test_info_shows_it(pair: Path) -> None:
    lines = [line.split() for line in CliRunner().invoke(info, [str(pair)]).stdout.splitlines()]
    assert ["logits", "width", "272", "150", "of", "272", "ids"] in lines


def test_verify_finds_the_law_kept(pair: Path) -> None:
    result = CliRunner().invoke(verify, [str(pair), "--seed", "1", "--samples", "100"])
    assert result.exit_code == 0, result.output
    assert "PASSED" in result.stdout


CONFIGS = {
    "tied": transformers.LlamaConfig(**sizes(tie_word_embeddings=True)),
    "scaled": transformers.GraniteConfig(**sizes(logits_scaling=2.0)),
}


@pytest.mark.parametrize(("name", "precision"), [("tied", "fp16"), ("tied", "int4"), ("scaled", "int8")])
def test_the_kept_rows_are_those_of_torch(name: str, precision: str, tmp_path: Path) -> None:
    source = resolve(str(tiny_checkpoint(tmp_path / "model", CONFIGS[name])))
    for folder, kept in (("full", None), ("bundle", KEPT)):
        export_bundle(source, source, tmp_path / folder, precision=precision, block_size=32, draft_vocab=kept)
    bundle = Bundle.open(tmp_path / "bundle")
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]
    whole, cut = (stored_weights(tmp_path / folder / "draft/model.onnx") for folder in ("full", "bundle"))
    ids = torch.from_numpy(np.load(bundle.path("draft/logit_ids.npy")).astype(np.int64))
    head = whole.pop("lm_head.weight")
    torch.testing.assert_close(cut.pop("lm_head.weight"), head[ids], rtol=0, atol=0)
    if name == "tied" and precision == "int4":  # stored once where nothing is cut
        whole["model.embed_tokens.weight"] = head
    assert cut.keys() == whole.keys()
    assert all(torch.equal(cut[key], whole[key]) for key in whole)


def with_map(pair: Path, folder: Path, ids: Any) -> Path:
    """The bundle with another file of ids, and a manifest that lists it as it is."""
    shutil.copytree(pair, folder)
    path = folder / "draft/logit_ids.npy"
    if isinstance(ids, bytes):
        path.write_bytes(ids)
    else:
        np.save(path, ids)
    manifest = Bundle(folder, Bundle.open(pair).manifest).manifest
    files = {**manifest.files, "draft/logit_ids.npy": FileEntry(path.stat().st_size, file_sha256(path))}
    (folder / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json())
    return folder


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(KEPT), r"holds int64 \[150\]; expected int32 \[150\]"),
        (np.arange(KEPT - 1, dtype=np.int32), r"holds int32 \[149\]; expected int32 \[150\]"),
        (np.zeros((KEPT, 1), np.int32), r"holds int32 \[150, 1\]"),
        (np.zeros(KEPT, np.int32), "rising ids below 262, each at most once"),
        (np.arange(KEPT, dtype=np.int32)[::-1], "rising ids below 262"),
        (np.arange(-1, KEPT - 1, dtype=np.int32), "rising ids below 262"),
        (np.arange(262 - KEPT + 1, 263, dtype=np.int32), "rising ids below 262"),
        (np.array([{}] * KEPT), "is no numpy array"),
        (b"", "is no numpy array"),
        (b"\x93NUMPY\x01\x00", "is no numpy array"),
    ],
)
def test_bad_maps_are_refused(pair: Path, tmp_path: Path, ids: Any, message: str) -> None:
    folder = with_map(pair, tmp_path / "bundle", ids)
    with pytest.raises(BundleError, match=message):
        paceline.load(folder)


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        ("draft", {"path": "draft/none.npy", "num_input_ids": 272}, "'draft/none.npy' but does not list it"),
        ("draft", {"path": "draft/logit_ids.npy", "num_input_ids": 261}, "262 ids, of which the draft can read only"),
        ("draft", {"path": "draft/logit_ids.npy", "num_input_ids": 149}, "150 logits for 149 input ids"),
        ("draft", {"path": "draft/logit_ids.npy"}, "lacks num_input_ids"),
        ("target", {"path": "draft/logit_ids.npy", "num_input_ids": 272}, "target must have a logit for every id"),
    ],
)
def test_bad_manifests_are_refused(pair: Path, tmp_path: Path, which: str, value: Any, message: str) -> None:
    shutil.copytree(pair, tmp_path / "bundle")
    data = json.loads((pair / MANIFEST_NAME).read_text())
    data[which]["logit_ids"] = value
    (tmp_path / "bundle" / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "bundle")


def test_bundles_from_before_open(target: Path, tmp_path: Path) -> None:
    source = resolve(str(target))
    export_bundle(source, source, tmp_path / "bundle", precision="fp32")  # the default keeps all
    data = json.loads((tmp_path / "bundle" / MANIFEST_NAME).read_text())
    assert (data["target"].pop("logit_ids"), data["draft"].pop("logit_ids")) == (None, None)
    assert not (tmp_path / "bundle/draft/logit_ids.npy").exists()
    (tmp_path / "bundle" / MANIFEST_NAME).write_text(json.dumps(data))
    draft = OrtModel.open(Bundle.open(tmp_path / "bundle"), "draft")
    assert (draft.vocab_size, draft.logit_ids) == (272, None)


def test_useful_ids_are_special_tokens_then_those_of_the_corpus() -> None:
    tokenizer = tiny_tokenizer(("<x>", "<y>"))
    counts = np.bincount(np.concatenate([tokenizer.encode(text) for text in corpus()]), minlength=264)
    always = {259, 260, 261, 262, 263}
    for size in (6, 100, 200, 264):
        ids = useful_ids(tokenizer, (260,), size)
        assert ids.dtype == np.int32
        assert len(ids) == size
        assert (np.diff(ids) > 0).all()
        kept = set(ids.tolist())
        assert always <= kept
        others = [i for i in range(264) if i not in always]
        assert min(counts[list(kept - always)]) >= max(counts[[i for i in others if i not in kept]], default=0)
    for size in (5, 265):
        with pytest.raises(InvalidInputError, match="choose from 6 to 264"):
            useful_ids(tokenizer, (260,), size)


def test_every_script_keeps_the_same_share() -> None:
    """Hebrew ids stand behind all Latin ones, as if they had been added later; the corpus holds none of either."""
    rare = [f"{letter}{letter}{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    hebrew = [chr(0x5D0 + place) * 3 for place in range(26)]
    vocabulary = {text: token_id for token_id, text in enumerate([*rare, *hebrew, "?"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    assert useful_ids(tokenizer, (), 21).tolist() == [*range(10), *range(26, 36), 52]


@pytest.mark.parametrize(
    ("draft_vocab", "has_draft", "message"),
    [
        (3, True, "of 262 ids, 3 are special, added or end tokens"),
        (-1, True, "must be a number of ids, or 0 for all, got -1"),
        (100, False, "is for a draft model, and there is none"),
        (True, True, "draft_vocab must be of type int or None, got True"),
    ],
)
def test_bad_options_are_refused(target: Path, tmp_path: Path, draft_vocab: int, has_draft: bool, message: str) -> None:
    source = resolve(str(target))
    with pytest.raises(InvalidInputError, match=message):
        export_bundle(source, source if has_draft else None, tmp_path / "bundle", draft_vocab=draft_vocab)
    assert not list(tmp_path.iterdir())


def head_model(after: str | None, *, shared: bool = False) -> ir.Model:
    """`logits = x · head`, head `[4, 8]`, and what comes after it."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]> g (float[1, n, 4] x) => (float[1, n, 8] logits)
           <float[1, n, 8] raw> { raw = MatMul(x, head) logits = Identity(raw) }"""
    )
    matmul, last = list(model.graph)
    head = ir.Value(name="model.embed.weight.T", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, 8]))
    head.const_value = ir.tensor(np.arange(32, dtype=np.float32).reshape(4, 8), name=head.name)
    model.graph.initializers[str(head.name)] = head
    matmul.replace_input_with(1, head)
    if shared:
        model.graph.insert_before(matmul, ir.node("Identity", [head]))
    last.op_type = after or "Identity"
    return model


def test_a_table_that_is_the_embedding_too_keeps_its_rows() -> None:
    model = head_model("Tanh", shared=True)
    cut_lm_head(model, np.array([1, 6], np.int32), embedding="model.embed.weight")
    whole, kept = (model.graph.initializers[name].const_value for name in ("model.embed.weight.T", "lm_head.weight.T"))
    assert whole is not None
    assert kept is not None
    np.testing.assert_array_equal(kept.numpy(), whole.numpy()[:, [1, 6]])
    assert tuple(model.graph.outputs[0].shape)[2] == 2


def test_logits_that_no_cut_would_leave_right_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"come from 'Softmax' .* export with --draft-vocab full"):
        cut_lm_head(head_model("Softmax"), np.array([1, 6], np.int32), embedding="model.embed.weight")
