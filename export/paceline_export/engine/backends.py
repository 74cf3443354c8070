"""What builds engines, and which GPUs and precisions each can build for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import InstallationError, InvalidInputError

__all__ = ["BACKENDS", "Backend", "find_backend"]

_ALWAYS = ("fp16", "int8")
_AMPERE = (*_ALWAYS, "bf16", "int4")
_ADA = (*_AMPERE, "fp8")


@dataclass(frozen=True, slots=True)
class Backend:
    """A Python package that builds engines.

    Attributes:
        name: as `--backend` and the manifest say it.
        module: what is imported.
        mend: how to install it.
        targets: precisions that a GPU's engine can have, by its compute capability.
        together: compute capabilities that one engine may serve together; any other's is its own.
        times_kernels: whether a build times kernels: then it needs the GPU that it builds for, and a cache of timings
            serves the next one.
    """

    name: str
    module: str
    mend: str
    targets: Mapping[str, tuple[str, ...]]
    times_kernels: bool
    together: tuple[str, ...] = ()

    def load(self) -> Any:
        """Import the package.

        Raises:
            InstallationError: it is not installed, or only a part of it.
        """
        try:
            module = importlib.import_module(self.module)
        except (ImportError, OSError) as error:  # OSError: a library that it links to
            raise InstallationError(f"{self.name} cannot be imported ({error}). Install it: {self.mend}") from error
        if not hasattr(module, "Builder"):
            raise InstallationError(
                f"{self.module} {getattr(module, '__version__', '')} has no builder: only a part of it is installed. "
                f"Install the whole: {self.mend}"
            )
        return module

    def check_target(self, sm: str, precision: str) -> None:
        """Check that a GPU's engine can have a precision.

        Raises:
            InvalidInputError: it cannot, with the table of what can.
        """
        if precision not in self.targets.get(sm, ()):
            what = f"cannot hold {precision}" if sm in self.targets else "is none that it builds for"
            raise InvalidInputError(
                f"{self.name}: compute capability {sm!r:.20} {what}. It builds:\n{self.table()}\nChoose another "
                "--sm, or export with another --precision."
            )

    def groups(self, sms: Sequence[str]) -> list[tuple[str, ...]]:
        """The compute capabilities, those together that one engine serves, in the order in which they are given."""
        shared = tuple(sm for sm in sms if sm in self.together)
        alone: list[tuple[str, ...]] = [(sm,) for sm in sms if sm not in self.together]
        return [shared, *alone] if shared else alone

    def table(self) -> str:
        """Compute capabilities and their precisions, one line each."""
        return "\n".join(f"  {sm:>4}: {', '.join(precisions)}" for sm, precisions in self.targets.items())


# Capabilities 9.0 and 10.x (H100, H200, B200) are not among what TensorRT-RTX builds for. What each precision needs is
# NVIDIA's: bfloat16 and few-bit weights Ampere, float8 Ada; models/engines.md says where that was read.
_NVIDIA = "https://pypi.nvidia.com"  # on PyPI, these packages are stubs, or parts without a builder
BACKENDS = {
    "tensorrt-rtx": Backend(
        name="tensorrt-rtx",
        module="tensorrt_rtx",
        mend="pip install 'paceline[trt]', or tensorrt-rtx from PyPI",
        targets={"7.5": ("fp16",), "8.0": _AMPERE, "8.6": _AMPERE, "8.9": _ADA, "12.0": _ADA, "12.1": _ADA},
        times_kernels=False,
        together=("8.0", "8.6", "8.9", "12.0", "12.1"),
    ),
    "tensorrt": Backend(
        name="tensorrt",
        module="tensorrt",
        mend=f"pip install tensorrt-cu13 --extra-index-url {_NVIDIA}, on the machine with the GPU",
        targets={
            "7.5": _ALWAYS,
            **dict.fromkeys(("8.0", "8.6", "8.7"), _AMPERE),
            **dict.fromkeys(("8.9", "9.0", "10.0", "10.3", "12.0", "12.1"), _ADA),
        },
        times_kernels=True,
    ),
}


def find_backend(name: str) -> Backend:
    """The backend of this name.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in BACKENDS:
        raise InvalidInputError(f"Unknown backend {name!r}: expected one of {', '.join(BACKENDS)}.")
    return BACKENDS[name]
