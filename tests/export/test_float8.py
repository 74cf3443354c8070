"""fp8 in the flavour `trt`: weights and inputs as float8 numbers, against torch's own rounding to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from prequantized import gptq, quantized_checkpoint
from safetensors.torch import load_file
from tiny import sizes, tiny_checkpoint

import paceline_export.calibrate.run
from paceline.bundle import Bundle
from paceline.errors import CheckpointError, InvalidInputError
from paceline.tokenizer import Tokenizer
from paceline_export.calibrate.layers import NotLayerwiseError
from paceline_export.calibrate.texts import calibration_ids
from paceline_export.checkpoint import Checkpoint
from paceline_export.cpu import open_on_cpu
from paceline_export.export import export_bundle
from paceline_export.parity import check_bundle, reference_model, stored_weights
from paceline_export.quantize.blockwise import dequantize
from paceline_export.quantize.rows import quantize_rows, quantize_rows_to_float8
from paceline_export.source import resolve

END = 448.0  # the largest float8 number of the kind e4m3


def export(checkpoint: Path, name: str, **options: Any) -> Bundle:
    out = checkpoint.parent / name
    settings: dict[str, Any] = {"flavor": "trt", "precision": "fp8", "quality": False, "max_length": 256} | options
    export_bundle(resolve(str(checkpoint)), None, out, **settings)
    return Bundle.open(out, verify_hashes=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama") / "model", transformers.LlamaConfig(**sizes()))


@pytest.fixture(scope="module")
def bundle(llama: Path) -> Bundle:
    return export(llama, "fp8")


def scales_of(bundle: Bundle) -> dict[str, float]:
    """What inputs are divided by, by the weight that first reads them."""
    graph = onnx.load(bundle.root / "target/model.onnx").graph
    found = {value.name: value for value in graph.initializer if value.name.endswith(".input_scale")}
    return {
        name.removesuffix(".input_scale"): float(onnx.numpy_helper.to_array(value)) for name, value in found.items()
    }


def test_rows_are_rounded_to_the_nearest_float8_numbers() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6)[:, None]
    stored = quantize_rows_to_float8(weight, 896.0)
    assert (stored.bits, stored.input_scale, stored.block_size, stored.zero_points) == (8, 2.0, 40, None)
    scales = (weight.abs().amax(1, keepdim=True) / END).to(torch.float16).float()
    np.testing.assert_array_equal(stored.scales, scales.numpy())
    expected = (weight / scales).to(torch.float8_e4m3fn).float() * scales
    np.testing.assert_array_equal(dequantize(stored), expected.numpy())
    assert float(((expected - weight).abs() / weight.abs()).median()) < 2**-4  # three bits behind the point
    zeros = quantize_rows_to_float8(torch.zeros(2, 8), 0.0)
    assert not dequantize(zeros).any()
    assert zeros.input_scale is not None
    assert zeros.input_scale > 0
    with pytest.raises(InvalidInputError, match="NaN or infinity"):
        quantize_rows_to_float8(torch.tensor([[1.0, torch.inf]]), 1.0)


def test_projections_are_float8_and_share_their_inputs(bundle: Bundle) -> None:
    entry = bundle.manifest.target
    assert (entry.precision, entry.calibration, entry.mixed_bits, entry.block_size) == ("fp8", "ranges", None, None)
    model = onnx.load(bundle.root / "target/model.onnx")
    onnx.checker.check_model(str(bundle.root / "target/model.onnx"), full_check=True)
    initializers = {value.name: value for value in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    rounded = set()
    for node in (node for node in model.graph.node if node.op_type == "MatMul"):
        weight = producers[producers[node.input[1]].input[0]]
        levels, scales = (initializers[name] for name in weight.input)
        assert list(scales.dims) == [levels.dims[0]]
        source = producers[node.input[0]]
        if levels.name == "lm_head.weight.q":  # which is not among the layers that the text ran through
            assert (levels.data_type, source.op_type) == (onnx.TensorProto.INT8, "GatherND")
            continue
        assert levels.data_type == onnx.TensorProto.FLOAT8E4M3FN
        assert (source.op_type, producers[source.input[0]].op_type) == ("DequantizeLinear", "QuantizeLinear")
        rounded.add(source.name)
    assert len(rounded) == 2 * 4  # queries, keys and values read the same, and so do gate and up
    (table,) = (node for node in model.graph.node if node.op_type == "Gather" and "input_ids" in node.input)
    assert initializers[producers[table.input[0]].input[0]].data_type == onnx.TensorProto.INT8


@contextmanager
def noting(model: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Lets a function see, and exchange, what each linear layer reads."""

    def hook(name: str) -> Any:
        return lambda module, args: None if (x := change(name, args[0])) is None else (x,)

    hooks = [
        module.register_forward_pre_hook(hook(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    yield
    for each in hooks:
        each.remove()


@torch.no_grad()
def test_scales_are_those_of_the_largest_inputs_in_the_text(llama: Path, bundle: Bundle) -> None:
    checkpoint = Checkpoint.open(resolve(str(llama)))
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager").eval()
    largest: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))

    with noting(model, note):
        for ids in calibration_ids(checkpoint.tokenizer, checkpoint.config.vocab_size, 256):
            model(ids[None], use_cache=False)
    found = scales_of(bundle)
    assert len(found) == 8
    for name, scale in found.items():
        assert scale == pytest.approx(largest[name] / END, rel=2**-10)


@torch.no_grad()
def test_the_graph_is_torch_with_inputs_rounded_to_float8(tmp_path: Path) -> None:
    """One layer: a number that float16 puts on the other side of a step moves many of the next layer's."""
    bundle = export(tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes(num_hidden_layers=1))), "one")
    entry, model = bundle.manifest.target, reference_model(bundle, bundle.manifest.target)
    scales = scales_of(bundle)
    readers = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}

    def rounded(name: str, x: torch.Tensor, share: float) -> torch.Tensor | None:
        for reader, first in readers.items():
            name = name.replace(reader, first)
        if name not in scales:
            return None
        scale = share * scales[name]
        return (x / scale).clamp(-END, END).to(torch.float8_e4m3fn).to(torch.float32) * scale

    ids = Tokenizer.from_bundle(bundle).encode("One text, of some thirty bytes.", add_special_tokens=False)
    graph = open_on_cpu(bundle.path(entry.path), entry, 256)
    found = graph.forward(ids, graph.new_cache(256), len(ids)).copy()
    distances = []
    plain = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    for share in (1.0, 0.25):
        with noting(model, partial(rounded, share=share)):
            expected = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        distances.append(float(np.abs(expected - found).mean()))
    shipped = float(np.abs(plain - found).mean())
    assert distances[0] < 0.5 * shipped
    assert distances[1] > 2 * distances[0]


def test_the_check_compares_with_inputs_as_they_are_and_rounded(bundle: Bundle) -> None:
    report = check_bundle(bundle)
    assert report.passed, [model.reason for model in report.models]
    exact, shipped = report.models
    assert (exact.arithmetic, shipped.arithmetic) == ("fp16", "fp8")
    assert all(phase.max_logit_diff < 0.1 for phase in exact.phases)
    assert max(phase.kl for phase in exact.phases) < max(phase.kl for phase in shipped.phases)


def test_a_draft_is_looked_at_as_well(llama: Path) -> None:
    export_bundle(
        resolve(str(llama)), resolve(str(llama)), llama.parent / "pair", flavor="trt", precision="fp8", quality=False
    )
    draft = Bundle.open(llama.parent / "pair").manifest.draft
    assert draft is not None
    assert draft.calibration == "ranges"


def test_weights_are_those_of_the_checkpoint(llama: Path, bundle: Bundle) -> None:
    original, stored = load_file(llama / "model.safetensors"), stored_weights(bundle.root / "target/model.onnx")
    projections = [name for name in stored if name.endswith("_proj.weight")]
    assert len(projections) == 14
    for name in projections:
        expected = torch.from_numpy(dequantize(quantize_rows_to_float8(original[name], 1.0)))
        torch.testing.assert_close(stored[name], expected, rtol=0, atol=0)
    expected = torch.from_numpy(dequantize(quantize_rows(original["lm_head.weight"])))
    torch.testing.assert_close(stored["lm_head.weight"], expected, rtol=0, atol=0)


def test_layers_that_cannot_be_told_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise NotLayerwiseError("Its layers cannot be told.")

    monkeypatch.setattr(paceline_export.calibrate.run, "LayerwiseModel", fail)
    with pytest.raises(
        CheckpointError, match=r"cannot be told\. So the ranges of fp8 cannot be told; export it with i"
    ):
        export(llama, "none")


def test_what_makes_no_sense_is_refused(llama: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"calibration": "gptq"}, "calibration='gptq' is for int4 weights; fp8 is always calibrated, in a way of its"),
        ({"calibration": "none"}, "calibration='none' is for int4 weights; fp8 is always"),
        ({"flavor": "ort"}, "precision='fp8' is none that graphs of the flavour ort have: expected one of"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            export(llama, "none", **options)
    checkpoint = tiny_checkpoint(tmp_path / "model", transformers.LlamaConfig(**sizes(intermediate_size=128)))
    quantized_checkpoint(checkpoint, {"quant_method": "gptq", "bits": 8}, gptq, bits=8)
    with pytest.raises(InvalidInputError, match=r"Precision fp8 would quantise anew what .* holds in 8 bits"):
        export(checkpoint, "none")
