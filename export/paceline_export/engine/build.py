"""One engine from one graph: parse, profiles, build, and what the build said about itself."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from google.protobuf.message import EncodeError

from paceline.bundle import EngineProfile
from paceline.engines import shared_log
from paceline.errors import BuildError, InstallationError, InvalidInputError
from paceline_export.passes.static_length import IN_PIECES, POSITIONS, set_static_length

from .backends import Backend
from .device import free_bytes, free_host_bytes
from .messages import listeners
from .traps import (
    fused_attention,
    ignored_arguments,
    lost_inputs,
    profile_faults,
    suspicious_warnings,
    unfused_attention,
)

__all__ = ["Plan", "ProfileReport", "build_plan"]

_NO_MEMORY = re.compile(r"out ?of ?memory|bad_alloc|cannot allocate|insufficient memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What a build says of one profile: bytes for activations, and the layers that attend in one kernel."""

    name: str
    activation_bytes: int | None
    fused_attention: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine as it is written to disk, and what its build said.

    Attributes:
        content: the engine, a buffer of bytes.
        backend_version: that built it.
        seconds: for parsing and building.
        weight_bytes: device memory for weights; None where the build did not say.
        attention: number of layers that attend by an operator of their own.
        profiles: in the order in which they were given.
        findings: what a strict build would not have let pass.
    """

    content: Any
    backend_version: str
    seconds: float
    weight_bytes: int | None
    attention: int
    profiles: tuple[ProfileReport, ...]
    findings: tuple[str, ...]


def build_plan(
    graph: Path,
    profiles: Sequence[EngineProfile],
    *,
    backend: Backend,
    sms: Sequence[str],
    max_length: int | None = None,
    workspace: int | None = None,
    timing_cache: Path | None = None,
    strict: bool = True,
    on_progress: Callable[[float], None] | None = None,
) -> Plan:
    """Build an engine of a graph, for GPUs that need not be there where the backend times no kernels.

    Args:
        graph: an ONNX file of the flavour `trt`, its weights beside it.
        profiles: the shapes to build for.
        backend: what builds.
        sms: compute capabilities that the engine shall serve, such as `8.9`: some of the backend's, which it builds for
            together.
        max_length: positions of the caches, at most the graph's; None leaves the graph as it is.
        workspace: bytes of scratch memory that a kernel may take; None leaves it to the backend.
        timing_cache: file of kernels' timings to read, if it is there, and to write.
        strict: refuse an engine in which something is dropped, unused, inconsistent or not fused.
        on_progress: called with the share of the build that is behind, 0 to 1.

    Raises:
        InstallationError: the backend is not installed, or does not start, as behind a driver that is too old for it.
        InvalidInputError: more positions than the graph has.
        BuildError: the graph cannot be parsed or built, or a strict build refuses it, with every reason.
        BaseException: what `on_progress` or the handler of a signal raised; it cancels the build.
    """
    trt = backend.load()
    log, monitor, interruption = listeners(trt)
    log.start()
    monitor.start(on_progress or (lambda share: None))
    started = time.perf_counter()
    model = _graph(graph, max_length)
    inputs = {str(value.name): _shape(value) for value in model.graph.inputs}
    layers = sum(name.startswith("past_key_values.") and name.endswith(".key") for name in inputs)
    attention = layers - int(model.metadata_props.get(IN_PIECES, "0"))
    what = f"{graph} for compute capability {', '.join(sms)}"

    with _memory_told(what, graph, backend), interruption.kept():
        builder = _builder(trt, log, backend)
        # TensorRT 10 takes types as hints unless it is told; later ones know nothing else.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, shared_log(trt))
        parsed = parser.parse(ir.to_proto(model).SerializeToString(), str(graph))
    if not parsed:
        reasons = [str(parser.get_error(i)).strip() for i in range(parser.num_errors)]
        raise BuildError(f"{backend.name} cannot parse {what}: {'; '.join(reasons) or 'no reason was given'}")
    findings = lost_inputs(inputs, network) + profile_faults(profiles, inputs) + ignored_arguments(model)
    findings += suspicious_warnings(log.warnings)
    if strict:
        _refuse(what, findings)

    config = builder.create_builder_config()
    if not backend.times_kernels:
        config.num_compute_capabilities = len(sms)
        for place, sm in enumerate(sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm.replace('.', '')}"), place)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # TensorRT-RTX allocates no memory of its own in a pass then, which a CUDA graph could not record.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the build does not name its kernels
    config.progress_monitor = monitor
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if timing_cache is not None:
        _use_timings(config, timing_cache)
    with _memory_told(what, graph, backend), interruption.kept():
        for profile in profiles:
            _add_profile(builder, network, config, profile, what)
        before = len(log.warnings)
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        said = "; ".join(log.errors) or "no reason was given"
        raise BuildError(f"{backend.name} cannot build {what}: {said}{_lack_of_memory(said, graph, backend)}")
    if timing_cache is not None:
        cache = config.get_timing_cache()
        timing_cache.write_bytes(memoryview(cache.serialize()))
    findings += suspicious_warnings(log.warnings[before:])
    fused = fused_attention(log.details, len(profiles))
    findings += unfused_attention(fused, attention, profiles)
    if strict:
        _refuse(what, findings)
    activations = _figures("Total Activation Memory", log.infos)
    weights = _figures("Total Weights Memory", log.infos)
    return Plan(
        content=plan,
        backend_version=str(trt.__version__),
        seconds=time.perf_counter() - started,
        weight_bytes=weights[-1] if weights else None,
        attention=attention,
        profiles=tuple(
            ProfileReport(profile.name, activations[i] if len(activations) == len(profiles) else None, fused[i])
            for i, profile in enumerate(profiles)
        ),
        findings=tuple(findings),
    )


def _builder(trt: Any, log: Any, backend: Backend) -> Any:
    """A builder. Where TensorRT makes none, its bindings raise a TypeError that says nothing of why."""
    try:
        return trt.Builder(shared_log(trt))
    except TypeError as error:
        driver = (
            ", and see whether the NVIDIA driver is new enough for it (nvidia-smi)" if backend.times_kernels else ""
        )
        reasons = "; ".join(log.errors) or "it gives no reason"
        raise InstallationError(
            f"{backend.name} {trt.__version__} does not start: {reasons}. Install it anew{driver}: {backend.mend}"
        ) from error


def _graph(path: Path, max_length: int | None) -> ir.Model:
    """The graph with caches of this length; weights stay in their file."""
    model = ir.load(path)
    if max_length is not None:
        if POSITIONS not in model.graph.initializers:
            raise InvalidInputError(f"{path} has no caches of a static length; export it with --flavor trt.")
        set_static_length(model, max_length)
    return model


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)


def _add_profile(builder: Any, network: Any, config: Any, profile: EngineProfile, what: str) -> None:
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    shapes = builder.create_optimization_profile()
    try:
        for name, (least, usual, most) in profile.shapes.items():
            if name in inputs:
                shapes.set_shape(name, least, usual, most)
        accepted = config.add_optimization_profile(shapes) != -1
    except Exception as error:  # the bindings raise whatever comes to hand
        raise BuildError(f"The profile {profile.name!r} does not fit {what}: {error}") from error
    if not accepted:
        raise BuildError(f"The profile {profile.name!r} does not fit {what}: {dict(profile.shapes)!r:.500}")


def _use_timings(config: Any, path: Path) -> None:
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not config.set_timing_cache(cache, False):
        raise BuildError(
            f"The timings in {path} are of another GPU or another version of TensorRT; name a new file, or none."
        )


def _refuse(what: str, findings: Sequence[str]) -> None:
    if findings:
        raise BuildError(
            f"A strict build of {what} found: {'; '.join(findings)}. Export the bundle again with this paceline; with "
            "--no-strict the engine is built all the same."
        )


@contextlib.contextmanager
def _memory_told(what: str, graph: Path, backend: Backend) -> Iterator[None]:
    """Turn Python's own lack of memory, which protobuf tells in its own way, into what is to be said of it."""
    try:
        yield
    except (MemoryError, EncodeError) as error:
        said = " ".join(("out of memory", *str(error).split()))
        raise BuildError(
            f"{backend.name} cannot build {what}: {said}{_lack_of_memory(said, graph, backend)}"
        ) from error


def _lack_of_memory(reasons: str, graph: Path, backend: Backend) -> str:
    """What is to be said behind the reasons of a failed build, if memory ran out: what is needed, and what is free."""
    if not _NO_MEMORY.search(reasons):
        return ""
    weights = list(graph.parent.glob(f"{graph.name}.data*"))  # several files where an export limited their size
    size = sum(path.stat().st_size for path in weights or [graph])
    where, free = ("the GPU's", free_bytes()) if backend.times_kernels else ("the machine's", free_host_bytes())
    return (
        f". Memory ran out: the weights alone take {size} bytes, a build several times as much, and "
        f"{'an unknown number' if free is None else free} of {where} are free. End what else takes memory, allow less "
        "scratch memory with --workspace, or export with fewer bits."
    )


def _figures(label: str, messages: Sequence[str]) -> list[int]:
    pattern = re.compile(rf"^{label}: (\d+) bytes")
    return [int(found[1]) for text in messages if (found := pattern.match(text))]
