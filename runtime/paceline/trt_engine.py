"""A TensorRT engine of a bundle, deserialised: what it was built for, and its passes on a stream."""

from __future__ import annotations

import collections
import functools
import importlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import cuda
from .bundle import Bundle, EngineEntry, EngineProfile, ModelEntry
from .cuda_array import CudaArray
from .cuda_graph import CudaGraph
from .device_array import DeviceArray
from .engines import Interruption, build_command, find_engine, shared_log
from .errors import BundleError, InstallationError, InvalidInputError, PacelineError
from .providers import Provider

__all__ = ["Engine", "start"]

# Dtypes as TensorRT names them.
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64"}
_log = logging.getLogger(__name__)

_Shape = tuple[int, int]  # rows of a pass, and those whose logits are wanted


def start(row: Provider) -> Any:
    """See that there is a GPU, and import the TensorRT that runs engines of this row; in this order.

    Without a device, TensorRT 11's runtime is an object around a null pointer, which ends the process when it is asked.

    Raises:
        InstallationError: there is no GPU or no driver, or TensorRT is missing, or only a stub or a part of it.
    """
    cuda.check_device()
    try:
        module = importlib.import_module(row.engine or "")
    except (ImportError, OSError) as error:  # OSError: a library that it links to
        raise InstallationError(f"{row.name} cannot be imported ({error}). {row.install}") from error
    if not hasattr(module, "Runtime"):
        raise InstallationError(
            f"The module {row.engine} that is installed has no runtime: it is a stub, or a part of TensorRT. "
            f"{row.install}"
        )
    return module


class Engine:
    """An engine, its execution contexts, and the scratch memory that they take turns in.

    All passes go to one stream, so that no two of them run at once: any number of sequences and threads may share it.

    Attributes:
        entry: what it was built for.
    """

    def __init__(
        self, trt: Any, runtime: Any, engine: Any, which: str, entry: EngineEntry, model: ModelEntry, device: str
    ) -> None:
        """Check that `engine`, which `runtime` of the module `trt` has deserialised, is what `entry` says of it.

        Raises:
            BundleError: it is not, or does not update its KV caches in place.
            InvalidInputError: the GPU has no room for its scratch memory.
        """
        self.entry = entry
        self._trt, self._runtime, self._engine, self._which = trt, runtime, engine, which
        self._check_tensors(model)
        num_bytes = engine.device_memory_size_v2
        self._scratch = CudaArray.empty(device, (max(num_bytes, 1),), "uint8")
        self._lock = threading.Lock()
        # A graph keeps what its context was told, so every shape that is recorded has a context of its own; the others
        # share one for each profile.
        self._contexts: dict[tuple[int, _Shape | None], Any] = {}
        self._warm: set[_Shape] = set()
        self._records = True
        # The narrowest profile that fits is taken, since it is tuned for the fewest rows.
        order = sorted(range(len(entry.profiles)), key=lambda i: _most(entry.profiles[i], "input_ids"))
        self._profiles = {i: entry.profiles[i] for i in order}

    @classmethod
    def open(cls, bundle: Bundle, which: str, row: Provider, folder: Path | None = None) -> Engine:
        """Deserialise the engine of one of a bundle's models that fits this machine, from the bundle or a folder.

        Raises:
            InstallationError: there is no GPU, or its TensorRT is not installed, or does not start.
            BundleError: there is none that fits, with both sides of what does not; or it is damaged.
            InvalidInputError: the GPU has no room for it.
        """
        trt = start(row)
        version, sm = str(trt.__version__), cuda.compute_capability()
        path, entry = find_engine(bundle, which, backend=row.name, backend_version=version, sm=sm, folder=folder)
        model: ModelEntry = getattr(bundle.manifest, which)
        content = path.read_bytes()
        needed = (entry.weight_bytes or len(content)) + (entry.activation_bytes or 0)
        if needed > (free := cuda.free_bytes()):
            raise InvalidInputError(
                f"The {which}'s engine needs {needed} bytes of the GPU's memory, {free} are free: end what else uses "
                "the GPU, or export the model with fewer bits."
            )
        errors = _errors(trt)
        errors.clear()
        try:
            runtime = trt.Runtime(shared_log(trt))
        except TypeError as error:  # from the bindings, where TensorRT makes none; it says nothing of why
            reasons = "; ".join(errors) or "it gives no reason"
            raise InstallationError(
                f"{row.name} {version} does not start: {reasons}. See whether the NVIDIA driver is new enough for it "
                f"(nvidia-smi). {row.install}"
            ) from error
        with Interruption().kept():
            engine = runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise BundleError(
                f"{row.name} {version} cannot deserialise {path}: {_diagnosis(trt, runtime, content)}"
                f"{'; '.join(errors) or 'no reason was given'}. Build it again: "
                f"{build_command(bundle, row.name, sm, folder)}."
            )
        return cls(trt, runtime, engine, which, entry, model, row.device or "cpu")

    @property
    def max_rows(self) -> int:
        """Largest number of rows of a pass."""
        return max(_most(profile, "input_ids") for profile in self._profiles.values())

    @property
    def max_logits(self) -> int:
        """Largest number of rows of a pass whose logits can be had."""
        return max(_most(profile, "logits_indices") for profile in self._profiles.values())

    def passes(self, count: int, num_logits: int) -> list[_Shape]:
        """Split `count` rows, whose last `num_logits` are to have logits, into passes that a profile is for.

        Returns:
            Rows and wanted logits of each pass; a pass that none are wanted of has 0, and computes one all the same.
        """
        found, position, silent = [], 0, count - num_logits
        while position < count:
            rows = min(count - position, self.max_rows)
            wanted = min(max(position + rows - silent, 0), rows)
            if wanted > self.max_logits:
                rows -= wanted - self.max_logits
                wanted = self.max_logits
            found.append((rows, wanted))
            position += rows
        return found

    def profile_for(self, shape: _Shape) -> int:
        """Index of the profile that a pass of this shape runs in.

        Raises:
            InvalidInputError: the engine has none.
        """
        for index, profile in self._profiles.items():
            if all(
                profile.shapes[name][0][-1] <= size <= _most(profile, name)
                for name, size in zip(("input_ids", "logits_indices"), shape, strict=True)
            ):
                return index
        rows = ", ".join(f"{profile.name} up to {_most(profile, 'input_ids')}" for profile in self._profiles.values())
        raise InvalidInputError(
            f"The {self._which}'s engine has no profile for a pass of {shape[0]} rows with logits of {shape[1]}; its "
            f"profiles: {rows}. Build it with `--profile`, or with a larger --max-draft-tokens."
        )

    def records(self, shape: _Shape) -> bool:
        """Whether passes of this shape come in every round, and so are worth a CUDA graph, and can be recorded."""
        return self._records and shape[0] <= (2 if self._which == "draft" else self.entry.max_draft_tokens + 1)

    def is_warm(self, shape: _Shape) -> bool:
        """Whether a pass of this shape has run, as TensorRT wants it before one is recorded."""
        return shape in self._warm

    def run(self, shape: _Shape, arrays: Mapping[str, DeviceArray]) -> None:
        """Put a pass onto the shared stream.

        Args:
            shape: rows, and logits.
            arrays: every input and output by its name. KV caches are written where they lie.

        Raises:
            BundleError: TensorRT refuses.
        """
        with self._lock:
            self._enqueue(shape, arrays, cuda.shared_stream())
            self._warm.add(shape)

    def record(self, shape: _Shape, arrays: Mapping[str, DeviceArray]) -> CudaGraph | None:
        """Record a pass as a CUDA graph; None where that cannot be done, which is logged once."""
        with self._lock:
            try:
                return CudaGraph(lambda stream: self._enqueue(shape, arrays, stream))
            except PacelineError as error:
                self._records = False
                _log.warning("The %s's engine runs without CUDA graphs, which costs speed: %s", self._which, str(error))
                return None

    def _enqueue(self, shape: _Shape, arrays: Mapping[str, DeviceArray], stream: int) -> None:
        context = self._context(shape)
        _errors(self._trt).clear()
        for name, array in arrays.items():
            is_output = name == "logits" or name.startswith("present.")
            if not (is_output or context.set_input_shape(name, array.shape)):
                raise self._refusal(f"the shape {array.shape} of {name}")
            if not context.set_tensor_address(name, array.pointer):
                raise self._refusal(f"the address of {name}")
        if not context.execute_async_v3(stream):
            raise self._refusal(f"a pass of {shape[0]} rows")

    def _context(self, shape: _Shape) -> Any:
        """The context for a shape, made when it is first asked for."""
        trt, engine = self._trt, self._engine
        profile, recorded = self.profile_for(shape), self.records(shape)
        key = (profile, shape if recorded else None)
        if key not in self._contexts:
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if recorded and hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
                # A kernel that TensorRT-RTX compiles in the background would replace one that was recorded.
                config.dynamic_shapes_kernel_specialization_strategy = (
                    trt.DynamicShapesKernelSpecializationStrategy.EAGER
                )
            with Interruption().kept():  # TensorRT-RTX compiles here
                context = engine.create_execution_context(config)
            if context is None:
                raise self._refusal("an execution context")
            context.set_device_memory(self._scratch.pointer, self._scratch.nbytes)
            if not context.set_optimization_profile_async(profile, cuda.shared_stream()):
                raise self._refusal(f"its profile {profile}")
            self._contexts[key] = context
            if recorded and hasattr(context, "is_stream_capturable"):
                self._check_recording(context)
        return self._contexts[key]

    def _check_recording(self, context: Any) -> None:
        if not context.is_stream_capturable(cuda.shared_stream()):
            self._records = False
            _log.warning("The %s's engine cannot be recorded; it runs without CUDA graphs, slower.", self._which)

    def _refusal(self, what: str) -> BundleError:
        reasons = "; ".join(_errors(self._trt)) or "it gives no reason"
        return BundleError(f"{self.entry.backend} refuses {what} for the {self._which}'s engine: {reasons}.")

    def _check_tensors(self, model: ModelEntry) -> None:
        """See that inputs, outputs, profiles and in-place caches are those of the manifest."""
        engine, trt = self._engine, self._trt
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        found = {
            (engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT, name, engine.get_tensor_dtype(name).name)
            for name in names
        }
        listed = {
            (specs is model.inputs, spec.name, _TYPES.get(spec.dtype))
            for specs in (model.inputs, model.outputs)
            for spec in specs
        }
        mend = "build it again with `paceline build`."
        if found != listed:
            wrong = sorted({name for _, name, _ in found ^ listed})
            raise BundleError(
                f"The {self._which}'s engine has other inputs and outputs than the manifest says: "
                f"{', '.join(wrong[:4])}; {mend}"
            )
        profiles = [
            {
                spec.name: tuple(tuple(dims) for dims in engine.get_tensor_profile_shape(spec.name, index))
                for spec in model.inputs
            }
            for index in range(engine.num_optimization_profiles)
        ]
        if profiles != [dict(profile.shapes) for profile in self.entry.profiles]:
            raise BundleError(f"The {self._which}'s engine has other profiles than the manifest says; {mend}")
        for spec in model.outputs:
            past = spec.name.replace("present.", "past_key_values.")
            if past != spec.name and engine.get_aliased_input_tensor(spec.name) != past:
                raise BundleError(f"The {self._which}'s engine does not update {past} in place; {mend}")


def _most(profile: EngineProfile, name: str) -> int:
    """Largest size of an input's last axis."""
    return profile.shapes[name][2][-1]


def _diagnosis(trt: Any, runtime: Any, content: bytes) -> str:
    """What TensorRT-RTX says of an engine that it does not take."""
    if not hasattr(runtime, "get_engine_validity"):
        return ""
    _, diagnostics = runtime.get_engine_validity(content)
    flags = trt.EngineInvalidityDiagnostics.__members__
    return "".join(f"{name}: " for name, flag in flags.items() if int(diagnostics) & int(flag))


@functools.cache
def _errors(trt: Any) -> collections.deque[str]:
    """The last errors that TensorRT told."""
    errors: collections.deque[str] = collections.deque(maxlen=8)

    def listen(severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            errors.append(" ".join(message.split()).rstrip("."))

    shared_log(trt).listeners.append(listen)
    return errors
