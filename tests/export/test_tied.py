"""A table that is the embedding and the LM head is stored once, and read by both."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import transformers
from tiny import sizes, tiny_checkpoint

from paceline.bundle import Bundle
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle
from paceline_export.source import resolve


def graph(bundle: Bundle, which: str) -> onnx.GraphProto:
    model: onnx.ModelProto = onnx.load(bundle.root / which / "model.onnx", load_external_data=False)
    return model.graph


def node(found: onnx.GraphProto, kind: str, weight: str) -> onnx.NodeProto:
    """The node of this kind one of whose inputs begins like `weight`."""
    one: onnx.NodeProto
    (one,) = (n for n in found.node if n.op_type == kind and any(name.startswith(weight) for name in n.input))
    return one


def attribute(of: onnx.NodeProto, name: str) -> int:
    return int(next(a.i for a in of.attribute if a.name == name))


@pytest.mark.parametrize(("precision", "bits"), [("int8", (8, 8)), ("int4", (8, 4))])
def test_the_table_and_the_head_are_the_same_bytes(precision: str, bits: tuple[int, int], tmp_path: Path) -> None:
    """Of 72 columns in blocks of 32, so that the last block is padded."""
    config = transformers.Qwen2Config(**sizes(hidden_size=72, head_dim=16, tie_word_embeddings=True))
    source = resolve(str(tiny_checkpoint(tmp_path / "model", config)))
    export_bundle(source, source, tmp_path / "bundle", precision=precision, block_size=32)
    bundle = Bundle.open(tmp_path / "bundle", verify_hashes=True)
    for which, expected in zip(("target", "draft"), bits, strict=True):
        found = graph(bundle, which)
        head, table = node(found, "MatMulNBits", "lm_head"), node(found, "GatherBlockQuantized", "lm_head")
        assert attribute(head, "bits") == attribute(table, "bits") == expected
        places = {
            i.name: sorted((entry.key, entry.value) for entry in i.external_data if entry.key in ("offset", "length"))
            for i in found.initializer
        }
        assert table.input[0] != head.input[1]  # so that the original of the repacked head need not stay in memory
        assert places[table.input[0]] == places[head.input[1]] != []
        assert not any("embed" in name for name in places)
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]


def test_a_head_of_its_own_stays_apart(tmp_path: Path) -> None:
    source = resolve(str(tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes()))))
    export_bundle(source, None, tmp_path / "bundle", precision="int4", block_size=32)
    found = graph(Bundle.open(tmp_path / "bundle"), "target")
    assert attribute(node(found, "MatMulNBits", "lm_head"), "bits") == 8
    assert attribute(node(found, "GatherBlockQuantized", "model.embed_tokens"), "bits") == 8
    assert attribute(node(found, "GatherBlockQuantized", "model.embed_tokens"), "bits") == 8
