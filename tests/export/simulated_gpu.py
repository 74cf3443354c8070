"""A GPU that is none: CUDA's library and TensorRT's module as the runtime calls them, over host memory.

It computes: an engine is the bundle's graph of the flavour `trt`, run by ONNX Runtime's CPU provider on the addresses
that it was given. It stands where the two libraries do, so that all of the runtime's own code runs, down to the
arguments of each call. What it refuses is what CUDA and TensorRT are documented to refuse. It proves nothing about
them.
"""

# ruff: noqa: N802, N815 - the names are CUDA's

from __future__ import annotations

import ctypes
import enum
import functools
import json
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import cuda, cuda_graph
from paceline.bundle import Bundle, EngineEntry
from paceline.ort_session import open_session
from paceline.providers import PROVIDERS, Provider
from paceline_export.engine.profiles import make_profiles
from paceline_export.engine.store import EngineStore

PROVIDER = "tensorrt-rtx-engine"
VERSION, SM = "1.7.1.116", "8.9"
ALIGNMENT = 256
SHARED, RECORDING = 0x51, 0x52  # addresses of streams
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
NAMES = {np.float32: "FLOAT", np.float16: "HALF", np.int64: "INT64"}
OUT_OF_MEMORY, CAPTURE_FORBIDS = 2, 900


@dataclass
class SimulatedCuda:
    """CUDA's runtime library.

    Attributes:
        lazy: whether work waits for the host to wait for it, as far as may be; else it is done at once.
        room: bytes that can be allocated.
        passes: what became of passes: `run`, `record` and `launch`, with their rows and logits.
    """

    lazy: bool = False
    devices: int = 1
    room: int = 1 << 40
    sm: str = SM
    passes: list[tuple[str, int, int]] = field(default_factory=list)
    live: dict[int, np.ndarray] = field(default_factory=dict)
    queue: list[Callable[[], object]] = field(default_factory=list)
    recorded: list[Any] | None = None
    graphs: dict[int, list[Any]] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)
    _name: str = "simulated libcudart"

    def __post_init__(self) -> None:
        # Functions, not methods: ctypes lets attributes of functions be set.
        self.cudaGetErrorString = lambda status: f"simulated error {status}".encode()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and name in object.__getattribute__(self, "fails"):
            return lambda *arguments: self.fails[name]
        return object.__getattribute__(self, name)

    def span(self, address: int, num_bytes: int) -> np.ndarray:
        """The bytes of memory that is allocated."""
        for start, memory in self.live.items():
            if start <= address and address + num_bytes <= start + len(memory):
                return memory[address - start : address - start + num_bytes]
        raise AssertionError(f"{num_bytes} bytes at {address:#x} are not all allocated")

    def put(self, stream: int, work: Callable[[], object]) -> None:
        if self.recorded is not None and stream == RECORDING:
            self.recorded.append(work)
        elif self.lazy:
            self.queue.append(work)
        else:
            work()

    def drain(self) -> None:
        waiting, self.queue = self.queue, []
        for work in waiting:
            work()

    def cudaGetDeviceCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = int(self.sm.split(".")[{75: 0, 76: 1}[attribute]])
        return 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:
        free._obj.value = self.room - sum(map(len, self.live.values()))
        total._obj.value = self.room
        return 0

    def cudaStreamCreate(self, stream: Any) -> int:
        stream._obj.value = SHARED
        return 0

    def cudaStreamCreateWithFlags(self, stream: Any, flags: int) -> int:
        assert flags == 1  # a stream that records must not make the default stream wait
        stream._obj.value = RECORDING
        return 0

    def cudaStreamSynchronize(self, stream: Any) -> int:
        if self.recorded is not None:
            return CAPTURE_FORBIDS
        self.drain()
        return 0

    def cudaMalloc(self, pointer: Any, size: Any) -> int:
        if size.value > self.room - sum(map(len, self.live.values())):
            return OUT_OF_MEMORY
        whole = np.full(size.value + ALIGNMENT, 0xFF, np.uint8)  # NaN, whatever it is read as
        first = -whole.ctypes.data % ALIGNMENT
        memory = whole[first : first + size.value]
        self.live[memory.ctypes.data] = memory
        pointer._obj.value = memory.ctypes.data
        return 0

    def cudaFree(self, pointer: Any) -> int:
        self.drain()
        del self.live[pointer.value]
        return 0

    def cudaMemsetAsync(self, pointer: Any, value: int, size: Any, stream: Any) -> int:
        memory = self.span(pointer.value, size.value)
        self.put(stream.value, lambda: memory.fill(value))
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: int, stream: Any) -> int:
        assert stream.value == SHARED
        to, num_bytes = target.value, size.value
        if kind == 1:
            staged = ctypes.string_at(source.value, num_bytes)  # CUDA copies pageable memory before it returns
            self.put(
                stream.value, lambda: self.span(to, num_bytes).__setitem__(slice(None), np.frombuffer(staged, "u1"))
            )
        else:
            # What the sampler's graphs have written lies in memory that ONNX Runtime has allocated.
            start = source.value
            self.put(stream.value, functools.partial(ctypes.memmove, to, start, num_bytes))
        return 0

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> int:
        assert (stream.value, mode, self.recorded) == (RECORDING, 2, None)
        self.recorded = []
        return 0

    def cudaStreamEndCapture(self, stream: Any, graph: Any) -> int:
        assert self.recorded is not None
        graph._obj.value = max(self.graphs, default=0x100) + 1
        self.graphs[graph._obj.value], self.recorded = self.recorded, None
        return 0

    def cudaGraphInstantiate(self, executable: Any, graph: Any, flags: Any) -> int:
        executable._obj.value = max(self.graphs) + 1
        self.graphs[executable._obj.value] = self.graphs[graph.value]
        return 0

    def cudaGraphLaunch(self, executable: Any, stream: Any) -> int:
        assert stream.value == SHARED
        for work in self.graphs[executable.value]:
            self.passes.append(("launch", *work.shape))
            self.put(SHARED, work)
        return 0

    def cudaGraphDestroy(self, graph: Any) -> int:
        del self.graphs[graph.value]
        return 0

    cudaGraphExecDestroy = cudaGraphDestroy


class _Pass:
    """A pass with the addresses and shapes that it was enqueued with."""

    def __init__(self, gpu: SimulatedCuda, session: Any, places: dict[str, tuple[tuple[int, ...], int]]) -> None:
        self._gpu, self._session, self._places = gpu, session, places
        self.shape = (places["input_ids"][0][1], places["logits_indices"][0][1])

    def __call__(self) -> None:
        binding = self._session.io_binding()
        for values, bind in (
            (self._session.get_inputs(), binding.bind_input),
            (self._session.get_outputs(), binding.bind_output),
        ):
            for value in values:
                shape, address = self._places[value.name]
                dtype = DTYPES[value.type]
                assert address % ALIGNMENT == 0
                self._gpu.span(address, math.prod(shape) * np.dtype(dtype).itemsize)
                bind(value.name, "cpu", 0, dtype, shape, address)
        positions = self._places["past_key_values.0.key"][0][2]
        (start,) = self._gpu.span(self._places["write_indices"][1], 8).view(np.int64)
        assert 0 <= start <= positions - self.shape[0], "a pass writes behind its caches"
        self._session.run_with_iobinding(binding)


class _Context:
    def __init__(self, engine: SimulatedEngine, config: Any) -> None:
        self._engine, self._config = engine, config
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)
        self._settled: dict[str, tuple[int, ...]] = {}  # the shapes of the last pass that was not recorded

    def set_device_memory(self, memory: int, size: int) -> None:
        self._engine.gpu.span(memory, size)
        self._scratch = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == SHARED
        self._profile, self._shapes = profile_index, {}
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = shape
        return len(shape) == len(most) and all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return name in self._engine.values

    def execute_async_v3(self, stream_handle: int) -> bool:
        gpu, engine = self._engine.gpu, self._engine
        strategy = self._config.strategy
        if strategy != engine.trt.ExecutionContextAllocationStrategy.USER_MANAGED or self._scratch[1] < 64:
            return engine.refuse("it has no memory")
        if missing := [name for name in engine.values if name not in self._addresses]:
            return engine.refuse(f"no address of {missing}")
        if missing := [name for name in engine.inputs if name not in self._shapes]:
            return engine.refuse(f"no shape of {missing}")
        rows, logits = self._shapes["input_ids"][1], self._shapes["logits_indices"][1]
        places = {}
        for name in engine.values:
            past = name.replace("present.", "past_key_values.")
            if self._addresses[name] != self._addresses[past]:
                return engine.refuse(f"{name} does not lie where {past} does")
            shape = (1, logits, engine.vocab_size) if name == "logits" else self._shapes[past]
            places[name] = (shape, self._addresses[name])
        if gpu.recorded is not None and stream_handle == RECORDING:
            lazy = getattr(self._config, "dynamic_shapes_kernel_specialization_strategy", "EAGER") != "EAGER"
            if lazy or self._settled != self._shapes:
                return engine.refuse("nothing has run with these shapes yet")
            gpu.passes.append(("record", rows, logits))
        else:
            assert stream_handle == SHARED
            gpu.passes.append(("run", rows, logits))
            self._settled = dict(self._shapes)
        gpu.put(stream_handle, _Pass(gpu, engine.session, places))
        return True


class _RtxContext(_Context):
    def is_stream_capturable(self, stream: int) -> bool:
        return bool(self._engine.plan.get("capturable", True))


class SimulatedEngine:
    """An engine, whose plan is JSON that names a graph."""

    device_memory_size_v2 = 64

    def __init__(self, trt: Any, log: Any, plan: Mapping[str, Any]) -> None:
        self.trt, self.gpu, self._log, self.plan = trt, trt.gpu, log, plan
        self.session = open_session(Path(plan["graph"]))
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.values = {value.name: value for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.vocab_size = self.values["logits"].shape[-1]
        self.num_io_tensors = len(self.values)
        self.num_optimization_profiles = len(plan["profiles"])

    def refuse(self, why: str) -> bool:
        self._log.log(self.trt.ILogger.ERROR, f"Simulated: {why}.\n")
        return False

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.values)[index])

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self.inputs else self.trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return types.SimpleNamespace(name=NAMES[DTYPES[self.values[name].type]])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        shapes: list[list[int]] = self.plan["profiles"][profile_index][name]
        return shapes

    def get_aliased_input_tensor(self, name: str) -> str | None:
        is_cache = name.startswith("present.") and self.plan.get("in_place", True)
        return name.replace("present.", "past_key_values.") if is_cache else None

    def create_runtime_config(self) -> Any:
        config = types.SimpleNamespace(strategy=None)
        if hasattr(self.trt, "DynamicShapesKernelSpecializationStrategy"):
            config.dynamic_shapes_kernel_specialization_strategy = "LAZY"
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        return config

    def create_execution_context(self, runtime_config: Any) -> _Context:
        return (_RtxContext if self.trt.__name__ == "tensorrt_rtx" else _Context)(self, runtime_config)


_TensorIOMode = enum.Enum("_TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
_AllocationStrategy = enum.Enum("_AllocationStrategy", ["STATIC", "USER_MANAGED"])


class _Diagnostics(enum.IntFlag):
    VERSION_MISMATCH = 1
    OLD_CUDA_DRIVER = 4
    MALFORMED_ENGINE = 32


def simulated_tensorrt(gpu: SimulatedCuda, name: str = "tensorrt_rtx") -> Any:
    """A module as `tensorrt_rtx` is, or as `tensorrt` is, whose names are fewer."""
    trt: Any = types.ModuleType(name)
    trt.gpu, trt.__version__ = gpu, VERSION

    class ILogger:
        """The base of loggers."""

        ERROR, WARNING = 1, 2

    class Runtime:
        """Reads plans: JSON that names a graph."""

        def __init__(self, log: Any) -> None:
            assert gpu.devices, "TensorRT 11 would end the process"
            self._log = log

        def deserialize_cuda_engine(self, content: bytes) -> SimulatedEngine | None:
            try:
                return SimulatedEngine(trt, self._log, json.loads(content))
            except ValueError:
                self._log.log(ILogger.ERROR, "Simulated: magic tag\ndoes not match.")
                return None

    trt.ILogger, trt.Runtime = ILogger, Runtime
    trt.TensorIOMode, trt.ExecutionContextAllocationStrategy = _TensorIOMode, _AllocationStrategy
    if name == "tensorrt_rtx":
        trt.DynamicShapesKernelSpecializationStrategy = types.SimpleNamespace(LAZY="LAZY", EAGER="EAGER")
        trt.EngineInvalidityDiagnostics = _Diagnostics
        Runtime.get_engine_validity = lambda self, buffer: (2, 36)  # type: ignore[attr-defined]
    return trt


@contextmanager
def simulated_gpu(*, module: str = "tensorrt_rtx", lazy: bool = False) -> Iterator[SimulatedCuda]:
    """Let there be a GPU, for the runtime of engines alone."""
    gpu = SimulatedCuda(lazy=lazy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_runtime", lambda: gpu)
        patch.setattr(cuda, "_check_driver", lambda: None)
        patch.setattr(cuda, "_new_stream", functools.cache(cuda._new_stream.__wrapped__))
        patch.setattr(cuda_graph, "_recording_stream", functools.cache(cuda_graph._recording_stream.__wrapped__))
        patch.setitem(sys.modules, module, simulated_tensorrt(gpu, module))
        patch.setitem(PROVIDERS, "resident", Provider("CPUExecutionProvider", device="cpu", sampler="resident"))
        for name in (PROVIDER, "tensorrt-engine"):
            patch.setitem(PROVIDERS, name, replace(PROVIDERS[name], device="cpu", sampler="resident"))
        yield gpu


def add_engines(
    root: Path, *, backend: str = "tensorrt-rtx", max_draft_tokens: int = 4, out: Path | None = None, **plan: Any
) -> None:
    """Put engines for the simulated GPU into a bundle, or a folder of their own, as `paceline build` does."""
    bundle = Bundle.open(root)
    with EngineStore(bundle, out) as store:
        for which in ("target", "draft"):
            model = getattr(bundle.manifest, which)
            if model is None:
                continue
            profiles = make_profiles(
                model, which, max_length=model.max_length, max_draft_tokens=max_draft_tokens, max_batch=1
            )
            content = {
                "graph": str(bundle.path(model.path)),
                "profiles": [dict(one.shapes) for one in profiles],
                **plan,
            }
            entry = EngineEntry(
                path="",
                model=which,
                backend=backend,  # type: ignore[arg-type]
                backend_version=VERSION,
                sm=SM,
                precision=model.precision,
                graph_sha256=bundle.manifest.graph_sha256(model),
                max_length=model.max_length,
                max_draft_tokens=max_draft_tokens,
                max_batch=1,
                profiles=profiles,
                weight_bytes=1000,
                activation_bytes=64,
            )
            store.write([entry], json.dumps(content).encode())
        store.commit()
