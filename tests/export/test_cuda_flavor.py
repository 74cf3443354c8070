"""The flavour `cuda`: its graphs are torch on the same weights in ONNX Runtime's CPU provider. No GPU has run them."""

from __future__ import annotations

import onnx
import pytest
from tiny import tiny_pair
from transformers import BloomConfig

import paceline
from paceline import SamplingParams
from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline_export.causal_lm import trace
from paceline_export.flavors import FLAVORS, find_flavor
from paceline_export.parity import check_bundle

CUDA = FLAVORS["cuda"]


@pytest.fixture(scope="module", params=["int4", "int8"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("pair")
    options = {"calibration": "none"} if request.param == "int4" else {}
    return Bundle.open(tiny_pair(folder, request.param, flavor="cuda", block_size=32, **options))


def test_few_bits_are_multiplied_with_float16(bundle: Bundle) -> None:
    """As CUDA's provider has kernels for: caches and activations of float16, products without rounded activations."""
    target = bundle.manifest.target
    assert (target.flavor, target.kv_dtype, target.block_size) == ("cuda", "float16", 32)
    model = onnx.load(bundle.path(target.path))
    types = {value.name: value.data_type for value in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * 7 + 1  # of each layer, and the head
    for node in products:
        found = {attribute.name: attribute.i for attribute in node.attribute}
        assert found["accuracy_level"] == 0
        assert types[node.input[2]] == onnx.TensorProto.FLOAT16
    ops = {node.op_type for node in model.graph.node}
    assert "GroupQueryAttention" in ops
    assert not ops & {"Attention", "DequantizeLinear"}
    (table,) = (node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    assert types[table.input[2]] == onnx.TensorProto.FLOAT16


def test_it_is_torch_on_its_own_weights(bundle: Bundle) -> None:
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]
    assert {model.arithmetic for model in report.models} == {"fp16"}
    assert all(phase.max_logit_diff < 0.1 for model in report.models for phase in model.phases)


def test_the_runtime_runs_it_and_drafting_changes_nothing(bundle: Bundle) -> None:
    texts = []
    for sampler in ("numpy", "graph"):
        decoder = paceline.load(bundle.root, sampler=sampler)
        for drafted in (0, 3):
            generation = decoder.generate("hello the", SamplingParams(), max_new_tokens=24, num_draft_tokens=drafted)
            list(generation)
            texts.append(generation.token_ids)
    assert texts == [texts[0]] * 4
    assert len(texts[0]) > 5


def test_a_bias_by_position_is_refused() -> None:
    config = BloomConfig(vocab_size=272, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(CheckpointError, match=r"BloomAttention adds a bias by position .* --flavor ort or trt"):
        trace(config, max_length=64, dtype="float16", flavor=CUDA)


def test_its_precisions() -> None:
    assert {name: stored.dtype for name, stored in CUDA.precisions.items()} == dict.fromkeys(
        ("fp16", "int8", "int4"), "float16"
    )
    assert CUDA.precisions["fp16"] == FLAVORS["ort"].precisions["fp16"]
    with pytest.raises(InvalidInputError, match="the flavour cuda have: expected one of fp16, int8, int4"):
        find_flavor("cuda").weight_format("fp32")
