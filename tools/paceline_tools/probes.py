"""Checks that `paceline doctor` runs in processes of their own, since a library may end its process.

`python -m paceline_tools.probes NAME [ARGUMENT]` prints a finding as one line of JSON, its last line.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline import cuda
from paceline.errors import PacelineError
from paceline.ort_session import import_onnxruntime, start
from paceline.providers import find_provider
from paceline.trt_engine import start as start_engines

from .tables import size

__all__ = ["Finding", "probe"]

SECONDS = 120
_STUB = "PyPI has only a stub of it; pip install {name} --extra-index-url https://pypi.nvidia.com brings it."


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        name: what was looked at.
        status: `ok`; `missing`, not there at all; or `broken`, there but unusable.
        found: in words.
        mend: what to do about it; empty where nothing is to be done.
        facts: figures for other checks, and for `--json`.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    found: str
    mend: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def probe(title: str, *arguments: str) -> Finding:
    """Run a probe in a process of its own; whatever becomes of it is a finding, named `title`."""
    command = [sys.executable, "-m", __name__, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(title, "broken", f"gave no answer in {SECONDS} s")
    except OSError as error:
        return Finding(title, "broken", f"cannot be looked at: {error.strerror or error}")
    if done.returncode < 0:
        try:
            cause = signal.Signals(-done.returncode).name
        except ValueError:
            cause = f"signal {-done.returncode}"
        return Finding(title, "broken", f"ended its process by {cause}")
    try:
        return Finding(**{**json.loads(done.stdout.splitlines()[-1]), "name": title})
    except (ValueError, TypeError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return Finding(title, "broken", f"ended with exit code {done.returncode}: {last}")


def _provider(name: str) -> Finding:
    row = find_provider(name)
    if row.engine is not None:
        return Finding(name, "ok", f"there is a GPU, and {row.engine} {start_engines(row).__version__}")
    start(name)
    return Finding(name, "ok", f"starts, and computes with ONNX Runtime {import_onnxruntime().__version__}")


def _gpus() -> Finding:
    """By NVML, the library under nvidia-smi."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Finding(
            "GPUs",
            "missing",
            "the driver of NVIDIA's GPUs is not installed (no libnvidia-ml.so.1)",
            "For providers cuda, tensorrt and tensorrt-rtx only: install the driver, on a machine with such a GPU.",
        )
    if status := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        reason = nvml.nvmlErrorString(status).decode(errors="replace")
        return Finding("GPUs", "broken", f"the driver answers: {reason}", "See what nvidia-smi says.")
    count, text = ctypes.c_uint(0), ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlSystemGetDriverVersion(text, len(text))
    driver = text.value.decode(errors="replace")
    gpus: list[dict[str, Any]] = []
    for index in range(count.value):
        device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        nvml.nvmlDeviceGetName(device, text, len(text))
        nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        gpus.append(
            {
                "name": text.value.decode(errors="replace"),
                "compute_capability": f"{major.value}.{minor.value}",
                "total_bytes": memory[0],
                "free_bytes": memory[1],
            }
        )
    if not gpus:
        return Finding("GPUs", "missing", f"driver {driver} finds none", "See what nvidia-smi says.")
    words = "; ".join(
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, {size(gpu['free_bytes'])} of "
        f"{size(gpu['total_bytes'])} free"
        for gpu in gpus
    )
    return Finding("GPUs", "ok", f"{words}; driver {driver}", facts={"gpus": gpus, "driver": driver})


def _cuda() -> Finding:
    count = cuda.device_count()
    if count == 0:
        cuda.check_device()
    return Finding("CUDA", "ok", f"{count} device{'s' * (count > 1)}, the first is {cuda.device_name()}")


def _cudnn() -> Finding:
    packaged = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/cudnn/lib/libcudnn.so.9")]
    for library in ("libcudnn.so.9", *packaged):
        try:
            version = ctypes.CDLL(library).cudnnGetVersion()
        except OSError:
            continue
        return Finding("cuDNN", "ok", f"{version // 10000}.{version // 100 % 100}.{version % 100} ({library})")
    return Finding(
        "cuDNN", "missing", "libcudnn.so.9 is not found", "For provider cuda only: pip install nvidia-cudnn-cu13"
    )


def _tensorrt(module: str) -> Finding:
    """Import a module of TensorRT, and no more: its runtime ends the process where there is no GPU."""
    package = module.replace("_", "-")
    if importlib.util.find_spec(module) is None:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            mend = "pip install 'paceline[trt]'" if module == "tensorrt_rtx" else _STUB.format(name="tensorrt-cu13")
            return Finding(module, "missing", "not installed", f"For engines only: {mend}")
        return Finding(
            module, "broken", f"{package} {version} is installed without its module", _STUB.format(name=package)
        )
    try:
        found = importlib.import_module(module).__version__
    except Exception as error:  # a library that is missing, or no fit for another
        reason = " ".join(str(error).split())
        return Finding(module, "broken", f"cannot be imported: {reason}", f"pip install --force-reinstall {package}")
    return Finding(module, "ok", f"{found}, imported; engines were not tried", facts={"version": found})


PROBES: Mapping[str, Callable[..., Finding]] = {
    "provider": _provider,
    "gpus": _gpus,
    "cuda": _cuda,
    "cudnn": _cudnn,
    "tensorrt": _tensorrt,
}


def main(arguments: list[str]) -> None:
    """Print the finding of a probe."""
    name, *rest = arguments
    try:
        finding = PROBES[name](*rest)
    except PacelineError as error:
        finding = Finding(name, "missing", str(error))
    print("\n" + json.dumps(dataclasses.asdict(finding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
