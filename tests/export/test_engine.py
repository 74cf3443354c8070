"""Builds in TensorRT-RTX, ahead of time: what a strict build passes and what it refuses, and `paceline build`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from google.protobuf.message import EncodeError
from small_trt import LAYERS, small_profiles, write_small_graph

from paceline.bundle import Bundle, EngineProfile
from paceline.engines import find_engine, read_index, shared_log
from paceline.errors import BuildError, InstallationError, InvalidInputError
from paceline_export.engine.backends import BACKENDS
from paceline_export.engine.build import Plan, build_plan
from paceline_export.engine.bundle import build_engines
from paceline_export.engine.messages import Messages
from paceline_export.engine.profiles import ProfileRows

pytest.importorskip("tensorrt_rtx", reason="pip install 'paceline[trt]'")

RTX = BACKENDS["tensorrt-rtx"]
Profiles = tuple[EngineProfile, ...]


def build(graph: Path, profiles: Profiles | None = None, *, sms: Sequence[str] = ("8.9",), **options: Any) -> Plan:
    return build_plan(graph, profiles or small_profiles(), backend=RTX, sms=sms, **options)


@pytest.mark.parametrize("sms", [*((sm,) for sm in RTX.targets), RTX.together], ids=", ".join)
def test_a_sound_graph_builds_for_every_gpu(sms: tuple[str, ...], tmp_path: Path) -> None:
    """Each alone, and for all that one engine can serve."""
    shares: list[float] = []
    plan = build(write_small_graph(tmp_path), sms=sms, on_progress=shares.append)
    assert plan.findings == ()
    assert len(memoryview(plan.content)) > 50_000
    assert plan.attention == LAYERS
    assert [(profile.name, profile.fused_attention) for profile in plan.profiles] == [
        ("verify", LAYERS),
        ("prefill", LAYERS),
    ]
    assert all(profile.activation_bytes for profile in plan.profiles)
    assert plan.weight_bytes is not None
    assert plan.weight_bytes > 200_000  # six projections of 128 x 128 in float16
    assert shares[-1] == 1.0
    assert max(shares) <= 1.0
    assert len(shares) > 5


def changed(profile: EngineProfile, **shapes: Any) -> EngineProfile:
    return dataclasses.replace(profile, shapes={**profile.shapes, **shapes})


def _unknown(first: EngineProfile, second: EngineProfile) -> Profiles:
    return changed(first, nothing=((1,), (1,), (1,))), second


def _missing(first: EngineProfile, second: EngineProfile) -> Profiles:
    shapes = {name: shape for name, shape in first.shapes.items() if name != "write_indices"}
    return dataclasses.replace(first, shapes=shapes), second


def _inconsistent(first: EngineProfile, second: EngineProfile) -> Profiles:
    return changed(first, write_indices=((1,), (2,), (3,))), second


def _with_forgotten(first: EngineProfile, second: EngineProfile) -> Profiles:
    shapes = {"forgotten": ((1, 4), (2, 4), (2, 4))}
    return changed(first, **shapes), changed(second, **shapes)


def _same(first: EngineProfile, second: EngineProfile) -> Profiles:
    return first, second


TRAPS: dict[str, tuple[dict[str, bool], Callable[[EngineProfile, EngineProfile], Profiles], str]] = {
    "an unused input": ({"unused": True}, _with_forgotten, "no layer reads the input 'forgotten'"),
    "valid lengths that are dropped": ({"nonpad": True}, _same, "TensorRT ignores nonpad_kv_seqlen, which 'n_a0'"),
    "attention that is not fused": ({"unfused": True}, _same, "in the profile 'verify' 0 of 2 layers attend in one"),
    "a mask that breaks fusion": ({"mask_behind": True}, _same, "in the profile 'prefill' 0 of 2 layers attend in one"),
    "an unknown tensor": ({}, _unknown, "the profile 'verify' names 'nothing', which is no input"),
    "largest shapes that do not go together": (
        {},
        _inconsistent,
        "the profile 'verify' gives the dimension 'batch' sizes that clash in its largest shapes: 2 (input_ids), 3 (",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_strict_build_refuses_what_tensorrt_lets_pass(name: str, tmp_path: Path) -> None:
    faults, change, message = TRAPS[name]
    graph, profiles = write_small_graph(tmp_path, **faults), change(*small_profiles())
    with pytest.raises(BuildError, match=re.escape(message)):
        build(graph, profiles)
    plan = build(graph, profiles, strict=False)
    assert any(message in finding for finding in plan.findings)
    assert len(memoryview(plan.content)) > 0


def test_attention_without_a_kernel_of_its_own_does_not_build(tmp_path: Path) -> None:
    """TensorRT-RTX refuses an `Attention` that it cannot fuse; only one that is written out can be slow unseen."""
    graph, profiles = write_small_graph(tmp_path, size=512), small_profiles(size=512)
    for strict in (True, False):
        with pytest.raises(BuildError, match=r"cannot build .* compute capability 8\.9: .*Attention operation was not"):
            build(graph, profiles, strict=strict)


def test_a_profile_without_an_input_is_refused(tmp_path: Path) -> None:
    graph, profiles = write_small_graph(tmp_path), _missing(*small_profiles())
    with pytest.raises(BuildError, match="the profile 'verify' gives no shape for the input 'write_indices'"):
        build(graph, profiles)
    with pytest.raises(BuildError):
        build(graph, profiles, strict=False)


def test_a_graph_that_cannot_be_parsed_says_why(tmp_path: Path) -> None:
    path = write_small_graph(tmp_path)
    model = onnx.load(path)
    next(node for node in model.graph.node if node.op_type == "Attention").op_type = "NoSuchOperator"
    onnx.save(model, path)
    with pytest.raises(BuildError, match=r"cannot parse .*NoSuchOperator"):
        build(path)


def test_tensorrt_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = RTX.load()

    def builder(log: Any) -> None:
        log.log(trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")  # as the bindings do

    monkeypatch.setattr(trt, "Builder", builder)
    graph = write_small_graph(tmp_path)
    with pytest.raises(
        InstallationError, match=r"rtx 1\.\d.* does not start: CUDA initialization failure with error: 35"
    ):
        build(graph)
    proper = dataclasses.replace(BACKENDS["tensorrt"], module=RTX.module)
    with pytest.raises(InstallationError, match=r"whether the NVIDIA driver is new enough for it .*pypi\.nvidia\.com"):
        build_plan(graph, small_profiles(), backend=proper, sms=["8.9"])


def test_a_build_that_memory_does_not_suffice_for_says_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TensorRT, and in Python on the way to it."""
    trt, graph = RTX.load(), write_small_graph(tmp_path)
    message = (
        r"cannot build .*: out of memory.*\. Memory ran out: the weights alone take \d+ bytes, .* \d+ of the machine's"
    )

    def build_serialized_network(builder: Any, network: Any, config: Any) -> None:
        shared_log(trt).log(trt.ILogger.ERROR, "[virtualMemoryBuffer.cpp] CUDA error 2: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(trt.Builder, "build_serialized_network", build_serialized_network)
        with pytest.raises(BuildError, match=message):
            build(graph)
    for error in (MemoryError(), EncodeError("Failed to serialize proto")):
        with monkeypatch.context() as patch:
            patch.setattr(trt.OnnxParser, "parse", Mock(side_effect=error))
            with pytest.raises(BuildError, match=message):
                build(graph)


EXHAUST = """
import resource, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from small_trt import small_profiles, write_small_graph
from paceline_export.engine.backends import BACKENDS
from paceline_export.engine.build import build_plan
from paceline_export.engine.device import free_host_bytes
folder = Path(sys.argv[1])
def build(graph):
    return build_plan(graph, small_profiles(), backend=BACKENDS["tensorrt-rtx"], sms=["8.9"])
build(write_small_graph(folder))
graph = write_small_graph(folder, vocab=100_000)
used = next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmSize"))
for room in (20, 90):
    resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + (room << 20), resource.RLIM_INFINITY))
    try:
        build(graph)
    except Exception as error:
        print(type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(memoryview(build(graph).content)))
"""


@pytest.mark.slow
def test_memory_that_really_runs_out_is_told_and_the_next_build_has_it(tmp_path: Path) -> None:
    """In Python where 20 MB are left, in TensorRT where 90 are; figures of an x86 machine."""
    command = [sys.executable, "-c", EXHAUST, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python, tensorrt, size = done.stdout.splitlines()
    for said, reason in ((python, "out of memory"), (tensorrt, "bad_alloc")):
        found = re.fullmatch(
            rf"BuildError .*{reason}.* take 2\d{{7}} bytes, .* and (\d+) of the machine's are free.*", said
        )
        assert found, said
        assert int(found[1]) < 91 << 20
    assert int(size) > 25_000_000


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143), OSError("stderr is gone")])
def test_what_a_progress_callback_raises_ends_the_build(error: Any, tmp_path: Path) -> None:
    graph, calls = write_small_graph(tmp_path), []

    def report(share: float) -> None:
        calls.append(share)
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        build(graph, on_progress=report)
    whole: list[float] = []
    build(graph, on_progress=whole.append)  # the next build is not cancelled
    assert len(calls) < len(whole)


def build_often(graph: Path) -> None:
    for _ in range(100):
        build(graph)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_signals_handler_raises_ends_the_build(number: int, tmp_path: Path) -> None:
    """Also where the signal waits when a callback begins, so that it is raised before the callback's first line."""
    graph = write_small_graph(tmp_path)
    before = signal.signal(number, lambda *_: sys.exit(7))
    handler = signal.getsignal(number)
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
        timer.start()
        with pytest.raises(SystemExit):
            build_often(graph)
        timer.join()
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_what_the_logger_raises_ends_the_build(tmp_path: Path) -> None:
    graph = write_small_graph(tmp_path)

    class Broken(list[str]):
        def append(self, text: str) -> None:
            raise KeyboardInterrupt

    def start(self: Any) -> None:
        self.errors, self.warnings, self.infos = [], [], Broken()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Messages, "start", start)
        with pytest.raises(KeyboardInterrupt):
            build(graph)
    assert build(graph).findings == ()


@pytest.fixture(scope="module")
def pair(tiny_few_bits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that engines may be put into."""
    return Path(shutil.copytree(tiny_few_bits, tmp_path_factory.mktemp("pair") / "bundle"))


def test_a_bundle_gets_its_engines(pair: Path) -> None:
    stages: list[str] = []
    bundle = Bundle.open(pair)
    report = build_engines(
        bundle,
        ["8.9", "12.0"],
        profile_rows=[ProfileRows("target", "long", (64, 128, 128))],
        max_length=128,
        max_draft_tokens=4,
        max_batch=3,
        workspace=1 << 28,
        on_progress=lambda stage, done: stages.append(stage),
    )
    again = Bundle.open(pair, verify_hashes=True).manifest
    assert [(entry.model, entry.sm, entry.precision) for entry in again.engines] == [
        ("target", "8.9", "int4"),
        ("target", "12.0", "int4"),
        ("draft", "8.9", "fp8"),
        ("draft", "12.0", "fp8"),
    ]
    assert [(engine.entry.model, engine.sms) for engine in report.engines] == [
        ("target", ("8.9", "12.0")),
        ("draft", ("8.9", "12.0")),
    ]
    assert len(list((pair / "engines").iterdir())) == 2
    for engine in report.engines:
        assert engine.entry in again.engines
        assert engine.findings == ()
        names = ["verify", "prefill", "long"] if engine.entry.model == "target" else ["step", "prefill"]
        assert [(profile.name, profile.fused_attention) for profile in engine.profiles] == [(name, 2) for name in names]
        assert engine.attention == 2
        assert engine.bytes == again.files[engine.entry.path].size
        model = again.target if engine.entry.model == "target" else again.draft
        assert model is not None
        assert engine.entry.graph_sha256 == bundle.manifest.graph_sha256(model)
        assert engine.entry.profiles[0].shapes["past_key_values.0.key"][2] == (3, 2, 128, 64)
        assert engine.entry.weight_bytes
        assert engine.entry.activation_bytes
        version = engine.entry.backend_version
        for sm in engine.sms:
            path, entry = find_engine(
                Bundle.open(pair), engine.entry.model, backend=RTX.name, backend_version=version, sm=sm
            )
            assert (path, entry) == (pair / engine.entry.path, dataclasses.replace(engine.entry, sm=sm))
    assert stages[0] == "target, compute capability 8.9, 12.0"
    assert stages[-1] == "list the engines"


def test_a_gpu_that_cannot_hold_one_of_the_models_is_refused_before_any_build(pair: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"compute capability '7\.5' cannot hold int4"):
        build_engines(Bundle.open(pair), ["8.9", "7.5"])
    with pytest.raises(InvalidInputError, match=r"compute capability '8\.6' cannot hold fp8"):
        build_engines(Bundle.open(pair), ["8.9", "8.6"])


def test_the_other_precisions_build(tiny_bf16: Path, tiny_int8: Path, tmp_path: Path) -> None:
    for path, precision in ((tiny_bf16, "bf16"), (tiny_int8, "int8")):
        out = tmp_path / precision
        (found,) = build_engines(Bundle.open(path), ["8.6", "8.9"], max_length=128, out=out).engines
        assert (found.entry.precision, found.sms, found.findings) == (precision, ("8.6", "8.9"), ())
        listed = read_index(out).engines
        assert [(entry.model, entry.sm, entry.path) for entry in listed] == [
            ("target", sm, found.entry.path) for sm in found.sms
        ]
    out = tmp_path / "alone"
    alone = build_engines(Bundle.open(tiny_int8), ["8.6", "8.9"], max_length=128, engine_per_gpu=True, out=out)
    assert [engine.sms for engine in alone.engines] == [("8.6",), ("8.9",)]


def test_when_a_build_fails_nothing_is_kept(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline_export.engine.bundle as module

    def fail_second(*args: Any, **options: Any) -> Plan:
        if options["sms"] == ("12.0",):
            raise BuildError("no")
        return build_plan(*args, **options)

    monkeypatch.setattr(module, "build_plan", fail_second)
    with pytest.raises(BuildError, match="no"):
        build_engines(Bundle.open(pair), ["8.9", "12.0"], max_length=128, engine_per_gpu=True, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_ends_the_command_and_adds_nothing(number: int, code: int, pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sms = ",".join(sm for sm in RTX.targets if "fp8" in RTX.targets[sm])
    command = [
        sys.executable,
        "-m",
        "paceline_tools",
        "build",
        str(pair),
        "--sm",
        sms,
        "--engine-per-gpu",
        "-o",
        str(out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "target" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == code, said
    assert "Exception" not in said
    assert not out.exists()


SMOL = """
import dataclasses, json, sys, time
from pathlib import Path
from paceline.bundle import Bundle
from paceline_export.engine.bundle import build_engines
from paceline_export.engine.messages import Messages
bundle = Bundle.open(sys.argv[1])
own_draft = Bundle(bundle.root, dataclasses.replace(bundle.manifest, draft=bundle.manifest.target))
report = build_engines(own_draft, sys.argv[2].split(","), out=Path(sys.argv[3]))
processor = {"processor_s": time.process_time(), "torch": "torch" in sys.modules}
print(json.dumps({**dataclasses.asdict(report), **processor}, default=str))
"""


@pytest.mark.parametrize("precision", ["fp16", "int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_smollm2_builds_strictly_for_every_gpu(precision: str, smol_trt: Callable[[str], Path], tmp_path: Path) -> None:
    """As target and as its own draft, with their profiles, in the memory of a small machine. `-rP` shows figures."""
    sms = [sm for sm in ("8.0", "8.6", "8.9", "12.0") if precision in RTX.targets[sm]]
    command = [sys.executable, "-c", SMOL, str(smol_trt(precision)), ",".join(sms), str(tmp_path / "engines")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(
        f"{precision}: {len(report['engines'])} engines in {report['seconds']:.1f} s, {report['processor_s']:.1f} s of "
        f"processor time with imports; peak memory {report['peak_memory'] / 1e9:.2f} GB"
    )
    assert [(engine["entry"]["model"], engine["sms"]) for engine in report["engines"]] == [
        ("target", sms),
        ("draft", sms),
    ]
    for engine in report["engines"]:
        names = ["verify", "prefill"] if engine["entry"]["model"] == "target" else ["step", "prefill"]
        assert [(one["name"], one["fused_attention"]) for one in engine["profiles"]] == [(name, 30) for name in names]
        assert engine["findings"] == []
        # Few-bit weights are multiplied as they are: written out as floats, the LM head alone takes 57 MB.
        assert 0 < engine["entry"]["activation_bytes"] < 50e6
    assert {entry.sm for entry in read_index(tmp_path / "engines").engines} == set(sms)
    assert report["peak_memory"] < 4e9
    assert not report["torch"]  # whose import takes longer than that of all else
