"""The GPU at hand, asked of its driver: TensorRT's builder ends the process where there is none. And free memory."""

from __future__ import annotations

import ctypes
import re
import resource
from pathlib import Path

from paceline.errors import InstallationError

__all__ = ["compute_capability", "free_bytes", "free_host_bytes"]

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and …_MINOR


def compute_capability() -> str:
    """Compute capability of the first GPU that CUDA shows, such as `8.9`.

    Raises:
        InstallationError: there is no driver, or it finds no GPU.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InstallationError(
            f"There is no NVIDIA driver on this machine ({error}), and so no GPU to build for. --backend tensorrt-rtx "
            "builds without one."
        ) from error
    count, device, major, minor = (ctypes.c_int(0) for _ in range(4))
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed or count.value < 1:
        raise InstallationError(
            f"The NVIDIA driver finds no GPU (error {failed}): see whether nvidia-smi lists one, and whether "
            "CUDA_VISIBLE_DEVICES hides it."
        )
    failed = driver.cuDeviceGet(ctypes.byref(device), 0)
    for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    if failed:
        raise InstallationError(f"The NVIDIA driver does not say what its first GPU is (error {failed}).")
    return f"{major.value}.{minor.value}"


def free_bytes() -> int | None:
    """Memory of the GPU that is free; None where the driver does not say, as before anything has used the GPU."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    except OSError:
        return None
    return None if failed else free.value


def free_host_bytes() -> int | None:
    """Memory that this process can still have without swapping, within its own limit (`ulimit -v`), too.

    None where the system does not say.
    """
    try:
        free = _kilobytes("MemAvailable", "/proc/meminfo")
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return free if limit == resource.RLIM_INFINITY else min(free, limit - _kilobytes("VmSize", "/proc/self/status"))
    except OSError:
        return None


def _kilobytes(name: str, file: str) -> int:
    """A line of one of the system's tables, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{file} has no {name}")
    return int(found[1]) * 1024
