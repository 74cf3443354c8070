"""The runtime of engines over a simulated GPU: no GPU has run any of this."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_gpu import PROVIDER, SM, VERSION, SimulatedCuda, SimulatedEngine, add_engines, simulated_gpu

import paceline
from paceline import SamplingParams, SpeculativeDecoder, cuda
from paceline.bundle import MANIFEST_NAME, Bundle, FileEntry, Manifest, file_sha256
from paceline.cuda_array import CudaArray
from paceline.device_array import DeviceArray
from paceline.errors import BundleError, InstallationError, InvalidInputError, PacelineError
from paceline.ort import OrtModel
from paceline.ort_session import open_session
from paceline.trt import TrtKVCache, TrtModel
from paceline.trt_memory import bfloat16_bits
from paceline_export.export import export_bundle
from paceline_export.source import resolve

PROMPT = "hello the"
LENGTH, K = 128, 4  # of the engines of `tiny_engines`
SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(1.0, seed=3),
    "penalties": SamplingParams(0.8, top_p=0.9, repetition_penalty=1.2, seed=4),
}


@pytest.fixture
def bundle(tiny_engines: Path) -> Path:
    return tiny_engines


@pytest.fixture
def gpu() -> Iterator[SimulatedCuda]:
    with simulated_gpu() as made:
        yield made
        gc.collect()
        assert not made.live  # whatever was allocated is given back


@pytest.fixture
def damaged(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def text_of(decoder: SpeculativeDecoder, sampling: SamplingParams, **options: Any) -> tuple[Any, ...]:
    generation = decoder.generate(PROMPT, sampling, max_new_tokens=40, **options)
    return [(step.num_proposed, step.num_accepted) for step in generation], generation.token_ids


def model_of(bundle: Path, which: str = "target") -> TrtModel:
    return TrtModel.open(Bundle.open(bundle), which, provider=PROVIDER)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-2)


# The text.


@pytest.mark.parametrize("sampler", ["numpy", "graph"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_that_of_the_graphs(bundle: Path, gpu: SimulatedCuda, name: str, sampler: str) -> None:
    engines = paceline.load(bundle, provider=PROVIDER, sampler=sampler)
    graphs = paceline.load(bundle, sampler=sampler)
    for num_draft_tokens in (0, 1, K):
        found, wanted = (
            text_of(decoder, SAMPLINGS[name], num_draft_tokens=num_draft_tokens) for decoder in (engines, graphs)
        )
        assert found == wanted
        assert len(found[1]) > 5
    assert {kind for kind, _, _ in gpu.passes} == {"run", "record", "launch"}


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt"])
def test_nothing_is_read_before_it_is_done(damaged: Path, module: str) -> None:
    """On a stream that does nothing until the host waits for it; and in a TensorRT without RTX's own names."""
    provider = {"tensorrt_rtx": PROVIDER, "tensorrt": "tensorrt-engine"}[module]
    if module == "tensorrt":
        add_engines(damaged, backend="tensorrt", max_draft_tokens=K)
    wanted = text_of(paceline.load(damaged), SAMPLINGS["temperature"], num_draft_tokens=3)
    with simulated_gpu(module=module, lazy=True) as gpu:
        decoder = paceline.load(damaged, provider=provider)
        assert text_of(decoder, SAMPLINGS["temperature"], num_draft_tokens=3) == wanted
        assert ("launch", 4, 4) in gpu.passes
        del decoder
        gc.collect()


def test_planned_drafts_stay_within_the_engine(bundle: Path, gpu: SimulatedCuda) -> None:
    decoder = paceline.load(bundle, provider=PROVIDER)
    greedy = text_of(paceline.load(bundle), SamplingParams(), num_draft_tokens=0)[1]
    steps, text = text_of(decoder, SamplingParams())
    assert text == greedy
    assert max(proposed for proposed, _ in steps) <= K
    with pytest.raises(InvalidInputError, match=r"num_draft_tokens=5, .* built for at most 4.* --max-draft-tokens"):
        decoder.generate(PROMPT, num_draft_tokens=K + 1)


@pytest.mark.slow
def test_smollm2_says_what_its_other_flavour_says(smol_bundle: Path, tmp_path: Path) -> None:
    """Against the flavour `ort` in fp32: greedily, up to the first token whose two best logits are nearly equal."""
    cache = smol_bundle.parents[1]
    source = resolve("smollm2-135m", cache_dir=cache)
    options: dict[str, Any] = {"flavor": "trt", "precision": "fp16", "max_length": 64, "quality": False}
    export_bundle(source, source, tmp_path / "bundle", **options)
    add_engines(tmp_path / "bundle", max_draft_tokens=K)
    prompt = "The capital of France is"
    plain = paceline.load(smol_bundle).generate(prompt, max_new_tokens=24, num_draft_tokens=0, drafter=None)
    list(plain)
    with simulated_gpu() as gpu:
        for sampler in ("numpy", "graph"):
            decoder = paceline.load(tmp_path / "bundle", provider=PROVIDER, sampler=sampler)
            generation = decoder.generate(prompt, max_new_tokens=24, num_draft_tokens=3)
            list(generation)
            assert generation.token_ids == plain.token_ids
            assert (generation.stats.acceptance_rate or 0) > 0.9  # it drafts for itself
        assert ("launch", 4, 4) in gpu.passes
        del decoder, generation
        gc.collect()


# Passes, profiles and graphs.


def test_rows_are_split_into_passes_that_profiles_are_for(bundle: Path, gpu: SimulatedCuda) -> None:
    target, draft = model_of(bundle).engine, model_of(bundle, "draft").engine
    assert (target.max_rows, target.max_logits, draft.max_rows, draft.max_logits) == (LENGTH, K + 1, LENGTH, 2)
    assert target.passes(K + 1, K + 1) == [(5, 5)]
    assert target.passes(60, 1) == [(60, 1)]
    assert target.passes(60, K + 1) == [(60, 5)]
    assert target.passes(12, 12) == [(5, 5), (5, 5), (2, 2)]
    assert target.passes(20, 7) == [(18, 5), (2, 2)]
    assert target.passes(2 * LENGTH + 3, 1) == [(LENGTH, 0), (LENGTH, 0), (3, 1)]
    assert draft.passes(4, 3) == [(3, 2), (1, 1)]
    names = [profile.name for profile in target.entry.profiles]
    assert [names[target.profile_for(shape)] for shape in ((1, 1), (5, 5), (6, 5), (6, 1), (LENGTH, 1))] == [
        "verify",
        "verify",
        *["prefill"] * 3,
    ]
    with pytest.raises(
        InvalidInputError, match=r"no profile for a pass of 129 rows .*verify up to 5, prefill up to 128"
    ):
        target.profile_for((LENGTH + 1, 1))
    assert [target.records((rows, 1)) for rows in (1, 5, 6)] == [True, True, False]
    assert [draft.records((rows, 1)) for rows in (1, 2, 3)] == [True, True, False]


def test_a_pass_runs_once_is_then_recorded_and_launched_ever_after(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    cache = model.new_cache(LENGTH)
    for _ in range(3):
        model.forward(range(8), cache, 1)  # a prompt's pass is not worth a graph
        for _ in range(2):
            model.forward([1, 2, 3], cache, 3)
            model.forward([4], cache, 1)
    assert gpu.passes[:5] == [("run", 8, 1), ("run", 3, 3), ("run", 1, 1), ("record", 3, 3), ("launch", 3, 3)]
    kinds = {shape: [kind for kind, *passed in gpu.passes if tuple(passed) == shape] for shape in ((8, 1), (3, 3))}
    assert kinds == {(8, 1): ["run"] * 3, (3, 3): ["run", "record", *["launch"] * 5]}


def test_each_sequence_has_its_own_memory_and_graphs_until_it_ends(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    first, second = model.new_cache(32), model.new_cache(LENGTH)
    pointers = {buffer.pointer for cache in (first, second) for buffer in cache.memory.buffers}
    assert len(pointers) == 2 * 2 * 2  # sequences, layers, keys and values
    rows = [5, 6, 7], [9, 8, 7]
    wanted = [model.forward(tokens, model.new_cache(8), 3) for tokens in rows]
    for _ in range(3):
        for cache, tokens, logits in zip((first, second), rows, wanted, strict=True):
            same(model.forward(tokens, cache, 3), logits)
            cache.rollback(0)
    assert [kind for kind, *_ in gpu.passes].count("record") == 3  # one more in the memory of `wanted`'s second text
    memory = first.memory
    del first, cache
    third = model.new_cache(LENGTH)
    assert third.memory is memory
    launched = len(gpu.passes)
    same(model.forward(rows[1], third, 3), wanted[1])
    assert gpu.passes[launched:] == [("launch", 3, 3)]


def test_a_graph_whose_addresses_have_changed_is_recorded_anew(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    cache = model.new_cache(LENGTH)
    for _ in range(3):
        wanted = model.forward([5, 6], cache, 2)
        cache.rollback(0)
    old = cache.memory._logits
    cache.memory._logits = CudaArray.empty("cpu", old.shape, old.dtype)
    del old, gpu.passes[:]
    same(model.forward([5, 6], cache, 2), wanted)
    assert gpu.passes == [("record", 2, 2), ("launch", 2, 2)]


@pytest.mark.parametrize("reason", ["not capturable", "fails"])
def test_where_nothing_can_be_recorded_passes_run_one_by_one(
    damaged: Path, gpu: SimulatedCuda, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = text_of(paceline.load(damaged), SamplingParams(), num_draft_tokens=2)
    if reason == "fails":
        gpu.fails["cudaGraphInstantiate"] = 801
    else:
        add_engines(damaged, max_draft_tokens=K, capturable=False)
    with caplog.at_level(logging.WARNING):
        decoder = paceline.load(damaged, provider=PROVIDER)
        assert text_of(decoder, SamplingParams(), num_draft_tokens=2) == wanted
    assert "launch" not in {kind for kind, *_ in gpu.passes}
    assert len(caplog.records) == 2  # of both models, once
    assert "without CUDA graphs" in caplog.text


# Caches and logits.


def test_a_rollback_is_a_length_and_caches_stay_where_they_are(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    cache = model.new_cache(16)
    assert isinstance(cache, TrtKVCache)
    addresses = [buffer.pointer for buffer in cache.memory.buffers]
    allocated = len(gpu.live)
    model.forward([5, 6, 7, 9, 9], cache, 1)
    before = cache.memory.buffers[0].numpy()
    cache.rollback(3)
    live = model.forward([8, 10], cache, 2)
    after = cache.memory.buffers[0].numpy()
    np.testing.assert_array_equal(before[:, :, :3], after[:, :, :3])
    assert (before[:, :, 3:5] != after[:, :, 3:5]).any()
    np.testing.assert_array_equal(after[:, :, 5:], 0)
    assert [buffer.pointer for buffer in cache.memory.buffers] == addresses
    assert len(gpu.live) == allocated
    same(live, model.forward([5, 6, 7, 8, 10], model.new_cache(16), 2))


def test_logits_of_more_rows_than_a_pass_has_are_gathered(bundle: Path, gpu: SimulatedCuda) -> None:
    """As those of forced tokens are, when their logprobs are wanted."""
    model = model_of(bundle)
    graphs = OrtModel.open(Bundle.open(bundle), "target")
    tokens = list(range(3, 23))
    for num_logits in (1, K + 1, 7, 20):
        wanted = graphs.forward(tokens, graphs.new_cache(LENGTH), num_logits)
        assert wanted.shape == (num_logits, 272)
        same(model.forward(tokens, model.new_cache(LENGTH), num_logits), wanted)
        resident = model.forward_resident(tokens, model.new_cache(LENGTH), num_logits)
        assert isinstance(resident, DeviceArray)
        same(resident.numpy(), wanted)


def test_ids_that_lie_on_the_device_are_read_there(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    ids = DeviceArray.empty("cpu", (12,), np.int64)  # as ONNX Runtime allocates what its graphs write
    ids.write(np.arange(12))
    wanted = model.forward(range(2, 12), model.new_cache(LENGTH), 7)
    same(model.forward_in_place(ids[2:], model.new_cache(LENGTH), 7).numpy(), wanted)  # type: ignore[union-attr]


def test_a_round_of_graphs_brings_no_logits_to_the_host(
    bundle: Path, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def noting(numpy: Any) -> Any:
        def noted(self: DeviceArray) -> Any:
            copied.append(self.nbytes)
            return numpy(self)

        return noted

    for kind in (DeviceArray, CudaArray):
        monkeypatch.setattr(kind, "numpy", noting(kind.numpy))
    decoder = paceline.load(bundle, provider=PROVIDER, sampler="graph")
    rounds = list(decoder.generate(PROMPT, SamplingParams(1.0, seed=1), max_new_tokens=20, num_draft_tokens=3))
    assert len(copied) == len(rounds)
    assert max(copied) <= 8 * (3 + 1)  # ids of a round; a row of logits has a thousand bytes


def test_caches_are_saved_and_begin_anew(bundle: Path, gpu: SimulatedCuda) -> None:
    model = model_of(bundle)
    fresh = model.new_cache(32)
    wanted = model.forward([5, 6, 7, 8, 10], fresh, 2)
    saved = fresh.save()
    assert saved.num_bytes == 5 * model.entry.kv_bytes_per_position
    again = model.new_cache(24)
    again.restore(saved, 4)
    same(model.forward([10], again, 1), wanted[1:])
    with pytest.raises(InvalidInputError, match="Only an empty KV cache"):
        again.restore(saved, 4)
    again.pretend(7, np.random.default_rng(0))
    assert again.length == 7
    assert np.isfinite(model.forward([1], again, 1)).all()
    decoder = paceline.load(bundle, provider=PROVIDER, prefix_cache_bytes=1 << 20)
    long = "hello the hello the hello the"
    for _ in range(2):
        generation = decoder.generate(long, max_new_tokens=4)
        list(generation)
    assert generation.stats.cached_tokens > 10


def test_numbers_as_bfloat16() -> None:
    bits = bfloat16_bits(np.array([1.0, -2.5, 0.0], np.float32))
    assert bits.tolist() == [0x3F80, 0xC020, 0]


def test_arguments_of_a_forward(bundle: Path, gpu: SimulatedCuda) -> None:
    model, other = model_of(bundle), model_of(bundle, "draft")
    cache = model.new_cache(6)
    for tokens, num_logits, message in (
        ([], 1, "at least 1 is needed"),
        ([1] * 7, 1, "has room for 6"),
        ([1], 2, "num_logits must be between 1 and the 1"),
        ([272], 1, "Token id 272 is outside the model's 272 ids"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            model.forward(tokens, cache, num_logits)
    with pytest.raises(InvalidInputError, match="made by another model"):
        other.forward([1], cache, 1)
    with pytest.raises(InvalidInputError, match="has room for 6"):
        model.forward_in_place(np.arange(7), cache, 1)
    with pytest.raises(InvalidInputError, match=rf"A cache of 129 positions exceeds the {LENGTH} .* --max-length"):
        model.new_cache(LENGTH + 1)
    with pytest.raises(paceline.PacelineError, match="context holds 128"):
        paceline.load(bundle, provider=PROVIDER).generate([1] * LENGTH)


# What may be wrong with a machine, or with an engine.


def no_gpu() -> bool:
    try:
        return cuda.device_count() == 0
    except InstallationError:
        return True


@pytest.mark.skipif(not no_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize("provider", [PROVIDER, "tensorrt-engine"])
def test_without_a_gpu_it_says_so_before_tensorrt_is_touched(
    bundle: Path, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(InstallationError, match=r"CUDA cannot be used|CUDA's runtime .* is not found"):
        paceline.load(bundle, provider=provider)


def test_a_driver_without_a_device(bundle: Path, gpu: SimulatedCuda) -> None:
    gpu.devices = 0
    with pytest.raises(InstallationError, match="CUDA finds no device: see whether nvidia-smi lists a GPU"):
        paceline.load(bundle, provider=PROVIDER)
    gpu.fails["cudaGetDeviceCount"] = 35
    with pytest.raises(InstallationError, match=r"simulated error 35 .* a driver at least as new as CUDA's runtime"):
        paceline.load(bundle, provider=PROVIDER)


@pytest.mark.parametrize(
    ("provider", "module", "mend"),
    [(PROVIDER, "tensorrt_rtx", r"paceline\[trt\]"), ("tensorrt-engine", "tensorrt", r"https://pypi\.nvidia\.com")],
)
def test_tensorrt_that_is_absent_or_a_stub_says_where_it_comes_from(
    bundle: Path, gpu: SimulatedCuda, provider: str, module: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InstallationError, match=rf"cannot be imported .* pip install .*{mend}"):
        paceline.load(bundle, provider=provider)
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises(InstallationError, match=rf"{module} that is installed has no runtime: it is a stub.*{mend}"):
        paceline.load(bundle, provider=provider)


def test_tensorrt_that_does_not_start_says_why(
    bundle: Path, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As real bindings behind a library that makes no runtime; see `tests/export/test_bindings.py`."""
    trt: Any = sys.modules["tensorrt_rtx"]

    def runtime(log: Any) -> None:
        log.log(trt.ILogger.ERROR, "Simulated: the driver is older than 13.0.")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Runtime", runtime)
    message = rf"tensorrt-rtx {VERSION} does not start: Simulated: the driver is older than 13\.0\. .*nvidia-smi"
    with pytest.raises(InstallationError, match=message):
        paceline.load(bundle, provider=PROVIDER)


@pytest.mark.parametrize("name", ["deserialize_cuda_engine", "create_execution_context"])
def test_ctrl_c_while_tensorrt_works_is_not_lost(
    bundle: Path, gpu: SimulatedCuda, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT drops what its logger raises, as the handler of a signal does that runs there."""
    kind = SimulatedEngine if name == "create_execution_context" else sys.modules["tensorrt_rtx"].Runtime
    real = getattr(kind, name)

    def interrupted(*arguments: Any) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(kind, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(paceline.load(bundle, provider=PROVIDER).generate(PROMPT, max_new_tokens=4))


def test_what_an_engine_was_built_for_and_what_is_here(
    bundle: Path, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.sm = "12.0"
    with pytest.raises(BundleError, match=rf"built for compute capability {SM}, and this GPU has 12\.0\. Build it: "):
        paceline.load(bundle, provider=PROVIDER)
    gpu.sm = SM
    monkeypatch.setattr(sys.modules["tensorrt_rtx"], "__version__", "1.8.0")
    with pytest.raises(BundleError, match=rf"by tensorrt-rtx {VERSION}, and what is installed is 1\.8\.0\. Build it: "):
        paceline.load(bundle, provider=PROVIDER)
    monkeypatch.setitem(sys.modules, "tensorrt", sys.modules["tensorrt_rtx"])
    with pytest.raises(BundleError, match=r"built for tensorrt-rtx, and what runs it is tensorrt\. Build it: "):
        paceline.load(bundle, provider="tensorrt-engine")


def test_a_bundle_without_engines(tiny_bundle: Path, gpu: SimulatedCuda) -> None:
    with pytest.raises(BundleError, match=r"has no engine of the target\. Build it: `paceline build .* --sm 8\.9`"):
        paceline.load(tiny_bundle, provider=PROVIDER)
    with pytest.raises(InvalidInputError, match="tensorrt-rtx-engine runs a bundle's engines, and no graphs"):
        open_session(b"", provider=PROVIDER)


def test_engines_in_a_folder_of_their_own(damaged: Path, gpu: SimulatedCuda, tmp_path: Path) -> None:
    wanted = text_of(paceline.load(damaged, provider=PROVIDER), SAMPLINGS["temperature"], num_draft_tokens=3)
    shutil.rmtree(damaged / "engines")
    with pytest.raises(BundleError, match=r"is missing\. Build it: `paceline build .* --sm 8\.9`\."):
        paceline.load(damaged, provider=PROVIDER)
    folder = tmp_path / "elsewhere"
    with pytest.raises(
        BundleError, match=rf"{folder} has no engines\.json: `paceline build DIR -o {folder}` makes one"
    ):
        paceline.load(damaged, provider=PROVIDER, engines=folder)
    add_engines(damaged, max_draft_tokens=K, out=folder)
    decoder = paceline.load(damaged, provider=PROVIDER, engines=str(folder))
    assert text_of(decoder, SAMPLINGS["temperature"], num_draft_tokens=3) == wanted
    gpu.sm = "12.0"
    with pytest.raises(BundleError, match=rf"{folder}: .* this GPU has 12\.0\. Build it: .* --sm 12\.0 -o {folder}`\."):
        paceline.load(damaged, provider=PROVIDER, engines=folder)


@pytest.mark.parametrize(
    ("engines", "provider", "message"),
    [
        ("x", "cpu", r"engines='x' is of no use: cpu runs the bundle's graphs; .* tensorrt-rtx-engine or tensorrt-eng"),
        ("", PROVIDER, r"engines must be the folder of `paceline build -o`, or None, got ''"),
        (7, PROVIDER, r"engines must be the folder of `paceline build -o`, or None, got 7"),
    ],
)
def test_engines_that_cannot_be_honoured(bundle: Path, engines: Any, provider: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        paceline.load(bundle, provider=provider, engines=engines)


def test_costs_are_of_the_engines_that_were_measured(bundle: Path, gpu: SimulatedCuda, tmp_path: Path) -> None:
    from paceline.cost_profile import setup_of

    add_engines(bundle, max_draft_tokens=K, out=tmp_path)
    opened = Bundle.open(bundle)
    assert setup_of(opened, PROVIDER) != setup_of(opened, PROVIDER, tmp_path)


def engine_file(bundle: Path, which: str = "target") -> Path:
    return next((bundle / "engines").glob(f"{which}-*"))


def relist(bundle: Path, path: Path) -> None:
    """Let the manifest say what the engine's file is now."""
    manifest = Manifest.from_json((bundle / MANIFEST_NAME).read_text())
    listed = FileEntry(path.stat().st_size, file_sha256(path))
    files = {**manifest.files, str(path.relative_to(bundle)): listed}
    (bundle / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json())


def test_a_truncated_engine(damaged: Path, gpu: SimulatedCuda) -> None:
    path = engine_file(damaged)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        BundleError, match=r"'engines/target-.*' has \d+ bytes, expected \d+\. Build it: `paceline build"
    ):
        paceline.load(damaged, provider=PROVIDER)
    relist(damaged, path)
    message = r"cannot deserialise .*: OLD_CUDA_DRIVER: MALFORMED_ENGINE: .*magic tag does not match\. Build it again"
    with pytest.raises(BundleError, match=message):
        paceline.load(damaged, provider=PROVIDER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_place": False}, r"does not update past_key_values\.\d\.(key|value) in place"),
        ({"profiles": []}, "has other profiles than the manifest says"),
        ({"graph": "draft/model.onnx"}, r"other inputs and outputs .*: past_key_values\.1\.key, past_key_values\.1\.v"),
    ],
)
def test_an_engine_that_is_not_what_the_manifest_says(
    damaged: Path, gpu: SimulatedCuda, change: dict[str, Any], message: str
) -> None:
    path = engine_file(damaged)
    if "graph" in change:
        change = {"graph": str(damaged / change["graph"])}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    relist(damaged, path)
    with pytest.raises(BundleError, match=message):
        paceline.load(damaged, provider=PROVIDER)


def test_memory_that_is_not_there_is_said_in_bytes(bundle: Path, gpu: SimulatedCuda) -> None:
    gpu.room = 1000
    with pytest.raises(InvalidInputError, match=r"The target's engine needs 1064 bytes .*, 1000 are free"):
        paceline.load(bundle, provider=PROVIDER)
    gpu.room = 1 << 20
    model = model_of(bundle)
    first = model.new_cache(8)
    num_bytes = first.memory.buffers[0].nbytes
    gpu.room = sum(map(len, gpu.live.values())) + 2 * num_bytes + 10  # for two of a sequence's four buffers
    with pytest.raises(InvalidInputError, match=rf"no room for {num_bytes} bytes of float16 .*, 10 are free"):
        model.new_cache(8)
    model.forward([1, 2], first, 1)  # the sequence that is there goes on


def test_what_tensorrt_refuses_is_told_with_its_reason(
    bundle: Path, gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(bundle)
    cache = model.new_cache(8)
    memory = cache.memory
    present = memory._caches["present.0.key"]
    memory._caches["present.0.key"] = CudaArray.empty("cpu", present.shape, present.dtype)
    with pytest.raises(BundleError, match=r"refuses a pass of 1 rows .* present\.0\.key does not lie where past_key"):
        model.forward([1], cache, 1)
    memory._caches["present.0.key"] = present
    gpu.fails["cudaStreamSynchronize"] = 700
    with pytest.raises(PacelineError, match=r"The GPU failed: simulated error 700 \(cudaStreamSynchronize"):
        model.forward([1], cache, 1)


def test_threads_are_of_no_use(bundle: Path, gpu: SimulatedCuda) -> None:
    with pytest.raises(InvalidInputError, match="threads=2 is of no use: tensorrt-rtx-engine runs on the GPU"):
        paceline.load(bundle, provider=PROVIDER, threads=2)


def test_costs_are_those_of_this_provider_and_its_version(bundle: Path, gpu: SimulatedCuda) -> None:
    from paceline.cost_profile import setup_of

    setup = asdict(setup_of(Bundle.open(bundle), PROVIDER))
    assert (setup["provider"], setup["onnxruntime"]) == (PROVIDER, VERSION)
