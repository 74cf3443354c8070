"""CUDA's runtime through ctypes: is there a device, which one is it, and one stream that all work goes to."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from .errors import InstallationError

__all__ = [
    "call",
    "check_device",
    "compute_capability",
    "device_count",
    "device_name",
    "free_bytes",
    "reason",
    "shared_stream",
    "status_of",
]

_MAJORS = (13, 12)
_NAME_LENGTH = 256
_CAPABILITY = (75, 76)  # cudaDevAttrComputeCapabilityMajor and …Minor
_DRIVER = "libcuda.so.1"
_lock = threading.Lock()


def device_count() -> int:
    """How many devices CUDA finds.

    Raises:
        InstallationError: CUDA's runtime is missing, or cannot reach a device: no driver, one that is too old, no GPU.
    """
    count = ctypes.c_int(0)
    call("cudaGetDeviceCount", ctypes.byref(count))
    return count.value


def check_device() -> None:
    """See that there is a device.

    Raises:
        InstallationError: there is none.
    """
    if device_count() == 0:
        raise InstallationError("CUDA finds no device: see whether nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES.")


def device_name() -> str:
    """Name of the first device, as its driver gives it.

    Raises:
        InstallationError: there is none.
    """
    check_device()
    driver, buffer = ctypes.CDLL(_DRIVER), ctypes.create_string_buffer(_NAME_LENGTH)
    if driver.cuInit(0) or driver.cuDeviceGetName(buffer, _NAME_LENGTH, 0):
        raise InstallationError("The NVIDIA driver does not say what its first device is; see whether nvidia-smi does.")
    return buffer.value.decode(errors="replace")


def compute_capability() -> str:
    """Compute capability of the first device, such as `8.9`.

    Raises:
        InstallationError: there is no device.
    """
    check_device()
    parts = []
    for attribute in _CAPABILITY:
        value = ctypes.c_int(0)
        call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, 0)
        parts.append(str(value.value))
    return ".".join(parts)


def free_bytes() -> int:
    """Memory of the first device that is free.

    Raises:
        InstallationError: there is no device.
    """
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def shared_stream() -> int:
    """Address of the process's one stream, made at the first call and kept until the process ends.

    It waits for the default stream and the default stream for it, so that plain copies see what it has written.

    Raises:
        InstallationError: there is no device.
    """
    with _lock:
        return _new_stream()


@functools.cache
def _new_stream() -> int:
    stream = ctypes.c_void_p()
    call("cudaStreamCreate", ctypes.byref(stream))
    return int(stream.value or 0)


def call(name: str, *arguments: object) -> None:
    """Call a function of CUDA's runtime.

    Raises:
        InstallationError: CUDA's runtime or the driver is missing, or the function fails.
    """
    if status := status_of(name, *arguments):
        _check_driver()
        raise InstallationError(
            f"CUDA cannot be used: {reason(status)} ({name}: error {status}). An NVIDIA GPU is needed, and a driver at "
            f"least as new as CUDA's runtime ({_runtime()._name}); nvidia-smi shows both."
        )


def status_of(name: str, *arguments: object) -> int:
    """Call a function of CUDA's runtime; the error that it returns, 0 for none.

    Raises:
        InstallationError: CUDA's runtime is missing.
    """
    return int(getattr(_runtime(), name)(*arguments))


def reason(status: int) -> str:
    """What an error means, in CUDA's words."""
    runtime = _runtime()
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return str(runtime.cudaGetErrorString(status).decode(errors="replace"))


def _check_driver() -> None:
    """See that there is a driver. Where there is none, CUDA's runtime says that the driver is too old."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise InstallationError(
            f"CUDA cannot be used: this machine has no NVIDIA driver ({error}). On a machine with an NVIDIA GPU, "
            "install its driver, until nvidia-smi lists the GPU; without one, choose another provider, such as cpu."
        ) from error


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The first of CUDA's runtimes that can be loaded: the system's, or a package's."""
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    _check_driver()
    raise InstallationError(
        f"CUDA's runtime (libcudart.so.{_MAJORS[0]}) is not found, neither by the system nor among the packages: "
        "pip install 'onnxruntime-gpu[cuda,cudnn]' brings it, on a machine with an NVIDIA GPU."
    )


def _candidates() -> Iterator[str]:
    for major in _MAJORS:
        yield f"libcudart.so.{major}"
        for folder in sys.path:  # as NVIDIA's packages lay it out, since CUDA 13 and before
            for library in sorted(Path(folder).glob(f"nvidia/*/lib/libcudart.so.{major}*")):
                yield str(library)
