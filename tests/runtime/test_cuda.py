"""What is said where CUDA cannot be used."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from paceline import cuda
from paceline.errors import InstallationError


class Runtime:
    """CUDA's runtime where it finds no driver, or one that is too old: it says the same of both."""

    _name = "libcudart.so.13"

    def __init__(self) -> None:
        self.cudaGetErrorString = lambda status: b"CUDA driver version is insufficient for CUDA runtime version"

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        return 35


def libraries(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let these libraries be the ones that the system finds."""

    def load(name: str) -> Any:
        if name not in found:
            raise OSError(f"{name}: cannot open shared object file")
        return Runtime() if "cudart" in name else object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cuda, "_runtime", cuda._runtime.__wrapped__)


@pytest.mark.parametrize("found", [(), ("libcudart.so.13",)])
def test_without_a_driver_that_is_what_is_said(found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, *found)
    with pytest.raises(InstallationError) as caught:
        cuda.check_device()
    assert str(caught.value) == (
        "CUDA cannot be used: this machine has no NVIDIA driver (libcuda.so.1: cannot open shared object file). On a "
        "machine with an NVIDIA GPU, install its driver, until nvidia-smi lists the GPU; without one, choose another "
        "provider, such as cpu."
    )


def test_a_driver_that_is_too_old_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, "libcuda.so.1", "libcudart.so.13")
    with pytest.raises(
        InstallationError, match=r"insufficient .* error 35.* a driver at least as new as CUDA's runtime"
    ):
        cuda.check_device()


def test_a_driver_without_cudas_runtime_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, "libcuda.so.1")
    with pytest.raises(InstallationError, match=r"CUDA's runtime \(libcudart\.so\.13\) is not found.*pip install"):
        cuda.check_device()
