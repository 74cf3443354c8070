"""Execution providers: those that do not start say why, and arrays on a device make the text of arrays on the host.

No GPU is needed: a row of the table that lets ONNX Runtime allocate in the CPU's memory takes every path of a GPU's row
but the copies between two memories.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import paceline
from paceline import SamplingParams, SpeculativeDecoder, cuda, ort, ort_session
from paceline.bundle import Bundle
from paceline.device_array import DeviceArray, bind_input, bind_output
from paceline.errors import BundleError, InstallationError, InvalidInputError
from paceline.ort import OrtModel
from paceline.ort_session import open_session, start
from paceline.providers import PROVIDERS, Provider

PROMPT = "hello the"
# Where onnxruntime-gpu was installed: pip install --target FOLDER --no-deps onnxruntime-gpu
GPU_PACKAGE = os.environ.get("PACELINE_TEST_ONNXRUNTIME_GPU")
RESIDENT = Provider("CPUExecutionProvider", device="cpu", sampler="resident")


def gpus() -> int:
    try:
        return cuda.device_count()
    except InstallationError:
        return 0


no_gpu = pytest.mark.skipif(gpus() > 0, reason="this machine has a GPU")


@pytest.fixture(scope="module", autouse=True)
def _resident() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROVIDERS, "resident", RESIDENT)
        yield


@pytest.fixture(params=["numpy", "graph"])
def decoders(request: pytest.FixtureRequest, tiny_bundle: Path) -> tuple[SpeculativeDecoder, SpeculativeDecoder]:
    host, device = (paceline.load(tiny_bundle, provider=name, sampler=request.param) for name in ("cpu", "resident"))
    return host, device


def model_of(bundle: Path, which: str = "target") -> OrtModel:
    return OrtModel.open(Bundle.open(bundle), which, provider="resident")


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(1.0, seed=3),
        SamplingParams(0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=4),
        SamplingParams(1.0, min_new_tokens=20, forced_token_ids=(10, 11), logit_bias={5: 2.0}, seed=5),
    ],
    ids=["greedy", "temperature", "penalties", "biases"],
)
def test_the_text_does_not_depend_on_where_arrays_lie(
    decoders: tuple[SpeculativeDecoder, SpeculativeDecoder], sampling: SamplingParams, num_draft_tokens: int
) -> None:
    texts = []
    for decoder in decoders:
        generation = decoder.generate(PROMPT, sampling, max_new_tokens=40, num_draft_tokens=num_draft_tokens)
        texts.append(([(step.num_proposed, step.num_accepted) for step in generation], generation.token_ids))
    assert texts[0] == texts[1]
    assert len(texts[0][1]) > 5


def test_a_round_of_graphs_brings_ids_to_the_host_and_no_logits(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = paceline.load(tiny_bundle, provider="resident", sampler="graph")
    copied: list[int] = []
    numpy = DeviceArray.numpy
    monkeypatch.setattr(DeviceArray, "numpy", lambda self: copied.append(self.nbytes) or numpy(self))  # type: ignore[func-returns-value]
    runs = list(decoder.generate(PROMPT, SamplingParams(1.0, seed=1), max_new_tokens=20, num_draft_tokens=3))
    assert len(copied) == len(runs)
    assert max(copied) <= 8 * (3 + 1)  # ids of a round; a row of logits has a thousand bytes


def test_logits_stay_where_the_graph_writes_them(tiny_bundle: Path) -> None:
    model = model_of(tiny_bundle)
    first, second = model.new_cache(32), model.new_cache(32)
    stayed, copied = model.forward_resident([5, 6, 7], first, 2), model.forward([5, 6, 7], second, 2)
    assert isinstance(stayed, DeviceArray)
    np.testing.assert_array_equal(stayed.numpy(), copied)
    np.testing.assert_array_equal(model.forward([8], first, 1), model.forward_resident([8], second, 1).numpy())  # type: ignore[union-attr]


def test_caches_on_a_device_roll_back_are_saved_and_begin_anew(tiny_bundle: Path) -> None:
    model = model_of(tiny_bundle)
    cache = model.new_cache(16)
    addresses = [buffer.pointer for buffer in cache.buffers]
    assert all(isinstance(buffer, DeviceArray) for buffer in cache.buffers)
    model.forward([5, 6, 7, 9, 9], cache, 1)
    cache.rollback(3)
    live = model.forward([8, 10], cache, 2).copy()
    assert [buffer.pointer for buffer in cache.buffers] == addresses
    fresh = model.new_cache(32)
    np.testing.assert_allclose(model.forward([5, 6, 7, 8, 10], fresh, 2), live, atol=1e-4)
    again = model.new_cache(24)
    again.restore(fresh.save(), 4)
    np.testing.assert_allclose(model.forward([10], again, 1), live[1:], atol=1e-4)
    again.pretend(7, np.random.default_rng(0))
    assert again.length == 7
    assert np.isfinite(model.forward([1], again, 1)).all()


def test_caches_in_float16_as_a_gpu_wants_them(tmp_path: Path) -> None:
    from tiny import tiny_pair

    bundle = tiny_pair(tmp_path, precision="fp16")
    texts = []
    for provider in ("cpu", "resident"):
        decoder = paceline.load(bundle, provider=provider, sampler="graph")
        generation = decoder.generate(PROMPT, SamplingParams(1.0, seed=2), max_new_tokens=12, num_draft_tokens=2)
        list(generation)
        texts.append(generation.token_ids)
    assert texts[0] == texts[1]
    assert model_of(bundle).new_cache(8).buffers[0].dtype == np.float16


def test_inputs_are_bound_anew_where_binding_copies_them(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding an input of the host to a graph on a GPU copies it; what it holds later would not be seen."""
    model = model_of(tiny_bundle)
    cache = model.new_cache(16)
    bound: list[str] = []

    def noted(binding: Any, name: str, array: Any) -> None:
        bound.append(name)
        bind_input(binding, name, array)

    monkeypatch.setattr(ort, "bind_input", noted)
    for token in (5, 6, 7):
        model.forward([token], cache, 1)
    assert sorted(bound) == sorted(3 * ["input_ids", "logits_indices", "seqlens_k", "total_sequence_length"])


def test_a_provider_that_writes_elsewhere_is_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere: list[Any] = []

    def bind(binding: Any, name: str, array: Any) -> None:
        if name.startswith("present."):
            elsewhere.append(DeviceArray.empty("cpu", array.shape, array.dtype))
            array = elsewhere[-1]
        bind_output(binding, name, array)

    monkeypatch.setattr(ort, "bind_output", bind)
    with pytest.raises(BundleError, match=r"does not update the KV caches of target/model\.onnx where they lie"):
        model_of(tiny_bundle)


def test_attention_that_is_left_to_the_cpu_is_refused_on_a_gpu(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    path = bundle.path("target/model.onnx")
    session = open_session(path, session_config=(("session.record_ep_graph_assignment_info", "1"),))
    model = OrtModel(session, bundle.manifest.target, None, PROVIDERS["cuda"])
    with pytest.raises(BundleError, match=r"leaves the attention of .* float32 KV caches .*--precision fp16"):
        model._check_attention(bundle.root)
    OrtModel(session, bundle.manifest.target)._check_attention(bundle.root)


# What may be wrong with a machine.


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
@no_gpu
def test_without_a_gpu_the_providers_for_one_raise(tiny_bundle: Path, provider: str) -> None:
    with pytest.raises(InstallationError, match=r"CUDA cannot be used|CUDA's runtime .* is not found"):
        paceline.load(tiny_bundle, provider=provider)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a device, as far as the first check goes."""
    monkeypatch.setattr(cuda, "check_device", lambda: None)
    monkeypatch.setattr(cuda, "shared_stream", lambda: 0)


@pytest.mark.usefixtures("device")
@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="the GPU package is here")
def test_the_cpu_package_has_no_cuda(tiny_bundle: Path) -> None:
    with pytest.raises(InstallationError, match=r"has no CUDAExecutionProvider: it offers .*paceline\[gpu\]"):
        paceline.load(tiny_bundle, provider="cuda")


@pytest.mark.parametrize(("provider", "install"), [("openvino", "paceline[openvino]"), ("tensorrt-rtx", "nv-tensorrt")])
@pytest.mark.usefixtures("device")
def test_a_missing_plugin_says_what_to_install(
    tiny_bundle: Path, provider: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PROVIDERS[provider].plugin or "", None)
    with pytest.raises(InstallationError, match=r"plugin for \w+ cannot be imported") as caught:
        paceline.load(tiny_bundle, provider=provider)
    assert install in str(caught.value)


@pytest.mark.usefixtures("device")
def test_a_plugin_whose_library_cannot_be_loaded_does_not_start(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "plugin.so"
    library.write_bytes(b"no library")
    plugin = types.ModuleType("broken")
    plugin.get_library_path = lambda: str(library)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime_ep_nv_tensorrt_rtx", plugin)
    with pytest.raises(InstallationError, match=r"NvTensorRTRTX\w+ does not start: .*plugin\.so.* It needs an RTX GPU"):
        paceline.load(tiny_bundle, provider="tensorrt-rtx")


def test_starting_computes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    start("cpu")
    monkeypatch.setattr(ort_session, "_started", set())
    session = types.SimpleNamespace(
        run=lambda names, feeds: [np.zeros(2)], get_providers=lambda: ["CPUExecutionProvider"]
    )
    monkeypatch.setattr(ort_session, "_new_session", lambda *arguments: session)
    with pytest.raises(InstallationError, match=r"does not start: 1 \+ 1 and 2 \+ 2 gave \[0\.0, 0\.0\]"):
        start("cpu")
    with pytest.raises(InvalidInputError, match="Unknown provider 'tpu': expected one of cpu, cuda, "):
        start("tpu")


GPU_PROGRAM = """
    import importlib.metadata, sys
    import paceline
    from paceline import cuda
    # The CPU package lies behind it on the path.
    importlib.metadata.packages_distributions = lambda: {"onnxruntime": ["onnxruntime-gpu"]}
    cuda.check_device, cuda.shared_stream = lambda: None, lambda: 1
    for provider in ("cuda", "tensorrt"):
        try:
            paceline.load(sys.argv[1], provider=provider)
        except paceline.PacelineError as error:
            print(type(error).__name__, error)
"""


@no_gpu
@pytest.mark.skipif(GPU_PACKAGE is None, reason="PACELINE_TEST_ONNXRUNTIME_GPU names no folder with onnxruntime-gpu")
def test_the_gpu_package_without_cuda_does_not_fall_back(tiny_bundle: Path) -> None:
    path = os.pathsep.join([GPU_PACKAGE or "", *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GPU_PROGRAM), str(tiny_bundle)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    cuda_error, tensorrt_error = done.stdout.splitlines()
    assert cuda_error.startswith(
        "InstallationError CUDAExecutionProvider does not start: ONNX Runtime fell back to CPUExecutionProvider. It "
    )
    assert tensorrt_error.startswith("InstallationError TensorrtExecutionProvider does not start: ")
    assert "Please install TensorRT libraries" in tensorrt_error
    assert "libnvinfer.so.10" in tensorrt_error
