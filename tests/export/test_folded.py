"""Attention whose query heads are folded into rows: the same numbers, in place, and undone for several texts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny import sizes, tiny_checkpoint, tiny_pair
from transformers import LlamaConfig

import paceline
from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline.ort import OrtModel
from paceline.ort_session import open_session
from paceline_export.export import export_bundle
from paceline_export.lanes import add_lanes
from paceline_export.passes import folded
from paceline_export.passes.folded import fold_query_heads, unfold_query_heads
from paceline_export.source import Source, resolve

LEAST, MOST = 12, 3


def operators(model: ir.Model) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in model.graph)


@pytest.fixture
def graph(tiny_bundle: Path) -> ir.Model:
    return ir.load(tiny_bundle / "target/model.onnx")


def test_the_same_numbers_on_either_way(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "LEAST_LENGTH", LEAST)
    monkeypatch.setattr(folded, "MOST_ROWS", MOST)
    bundle = Bundle.open(damaged)
    graph = ir.load(damaged / "target/model.onnx")
    assert fold_query_heads(graph) == 2
    beside = damaged / "target/folded.onnx"  # its weights stay where they are
    beside.write_bytes(ir.to_proto(graph).SerializeToString())
    plain = OrtModel.open(bundle, "target")
    other = OrtModel(open_session(beside), bundle.manifest.target)
    caches = [model.new_cache(64) for model in (plain, other)]
    rng = np.random.default_rng(0)
    # Both ways, their borders, and blocks after a rollback.
    for rows, back in ((1, 0), (7, 0), (3, 2), (1, 0), (1, 0), (1, 0), (3, 3), (4, 2), (2, 1), (16, 9), (1, 1), (3, 0)):
        ids = rng.integers(0, 255, rows).tolist()
        logits = [model.forward(ids, cache, rows).copy() for model, cache in zip((plain, other), caches, strict=True)]
        np.testing.assert_allclose(logits[1], logits[0], atol=2e-4, rtol=1e-4)
        for mine, theirs in zip(*(cache.buffers for cache in caches), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=1e-4)
        for cache in caches:
            cache.rollback(cache.length - back)
    assert caches[0].length > LEAST + 6


def test_a_layer_that_asks_for_more_is_left(graph: ir.Model) -> None:
    first = next(node for node in graph.graph if node.op_type == "GroupQueryAttention")
    first.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 8)
    assert fold_query_heads(graph) == 1
    found = operators(graph)
    assert (found["com.microsoft", "GroupQueryAttention"], found["", "If"]) == (1, 1)


def test_unfolded_it_is_what_it_was(graph: ir.Model) -> None:
    before = ir.to_proto(graph)
    names = {value.name for value in graph.graph.initializers.values()}
    fold_query_heads(graph)
    assert operators(graph)["", "If"] == 2
    unfold_query_heads(graph)
    after = ir.to_proto(graph)
    assert operators(ir.from_proto(after)) == operators(ir.from_proto(before))
    assert after.graph.input == before.graph.input
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    assert {value.name for value in graph.graph.initializers.values()} == names


@pytest.mark.slow
def test_an_export_for_long_texts(tmp_path: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of a bundle without, and several texts in one pass are as before."""
    monkeypatch.setattr(folded, "LEAST_LENGTH", LEAST)
    root = tiny_pair(tmp_path, long_context=True)
    for which in ("target", "draft"):
        assert operators(ir.load(root / which / "model.onnx"))["", "If"] == Bundle.open(
            root
        ).manifest.target.num_layers - (which == "draft")
    for path, told in ((root, True), (tiny_bundle, False)):
        manifest = Bundle.open(path).manifest
        assert manifest.target.long_context is told
        assert manifest.draft is not None
        assert manifest.draft.long_context is told
    prompt = list(range(20, 40))
    texts = []
    for path in (root, tiny_bundle):
        with paceline.load(path).generate(prompt, max_new_tokens=24, num_draft_tokens=3) as generation:
            texts.append([token for step in generation for token in step.token_ids])
    assert texts[0] == texts[1]
    add_lanes(Bundle.open(root), 2)
    assert not operators(ir.load(root / "target/lanes-2.onnx"))["", "If"]


@pytest.mark.slow
def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    source = resolve(str(tiny_checkpoint(tmp_path / "model", LlamaConfig(**sizes(num_key_value_heads=4)))))
    with pytest.raises(CheckpointError, match="long_context asks for heads that share keys and values"):
        export_bundle(source, None, tmp_path / "bundle", precision="fp32", quality=False, long_context=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_target_that_is_exported_stays_as_it_is(tmp_path: Path, tiny_bundle: Path) -> None:
    draft = Source("draft", "folder", tmp_path, None, (tmp_path / "model.safetensors",))
    with pytest.raises(InvalidInputError, match="long_context is for a target that is exported"):
        export_bundle(Bundle.open(tiny_bundle), draft, tmp_path / "bundle", precision="fp32", long_context=True)
