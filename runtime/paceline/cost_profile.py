"""Profiles: what runs of a bundle's models take on this machine, measured once by `paceline tune` and kept in a file.

They lie in the user's cache folder, outside the bundle: `$XDG_CACHE_HOME/paceline/profiles` or
`~/.cache/paceline/profiles`, one file for each setup, written whole or not at all. A profile of another setup is never
used; nothing in the file is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .bundle import MANIFEST_NAME, Bundle, build_dataclass
from .costs import Costs, CostsByLength
from .engines import INDEX_NAME
from .errors import BundleError, InvalidInputError, ProfileError, shown
from .files import write_whole

__all__ = [
    "PROFILE_FORMAT",
    "CostProfile",
    "Setup",
    "check_profile",
    "cpu_name",
    "default_folder",
    "find_costs",
    "setup_of",
]

PROFILE_FORMAT = 1
# Seconds that a run may take: beyond, a file was not measured.
_LEAST_S, _MOST_S = 1e-9, 1e5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a profile's times depend on.

    Attributes:
        bundle: SHA-256 of the bundle's manifest, which holds the hashes of all its files.
        provider: key of `paceline.providers.PROVIDERS`.
        device: name of the processor, or of the GPU.
        cores: that the process may use.
        threads: of the pool that runs the models; 0 is one per physical core.
        onnxruntime: its version; of what runs engines, that of their backend.
    """

    bundle: str
    provider: str
    device: str
    cores: int
    threads: int
    onnxruntime: str

    @property
    def file_name(self) -> str:
        """Name of the profile's file: of the bundle, then of all of the setup."""
        whole = json.dumps(dataclasses.astuple(self)).encode()
        return f"{self.bundle[:16]}-{hashlib.sha256(whole).hexdigest()[:16]}.json"

    def differences(self, other: Setup) -> str:
        """What is not the same in another setup, for a message."""
        return ", ".join(
            f"{field.name} {getattr(other, field.name)!r:.60} where {getattr(self, field.name)!r:.60} is expected"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        )


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Medians of measured runs, and their spread: half the distance between the quartiles. All times in seconds.

    Attributes:
        format_version: `PROFILE_FORMAT`.
        setup: what they were measured on.
        measured_at: date and time, UTC.
        repeats: runs of each kind.
        lengths: positions in the cache before the run, ascending.
        target_pass: `[lengths][rows - 1]`, of the target's passes.
        target_spread: as `target_pass`.
        draft_step: `[lengths]`, of a step of the draft model; None where the bundle has none.
        draft_spread: as `draft_step`.

    Raises:
        ProfileError: another format, or numbers that are none of these.
    """

    format_version: int
    setup: Setup
    measured_at: str
    repeats: int
    lengths: tuple[int, ...]
    target_pass: tuple[tuple[float, ...], ...]
    target_spread: tuple[tuple[float, ...], ...]
    draft_step: tuple[float, ...] | None
    draft_spread: tuple[float, ...] | None

    def __post_init__(self) -> None:
        if self.format_version != PROFILE_FORMAT:
            raise ProfileError(f"it has format {self.format_version}, this paceline reads format {PROFILE_FORMAT}")
        for time_s in (*(self.draft_step or ()), *(time_s for times in self.target_pass for time_s in times)):
            if not _LEAST_S <= time_s <= _MOST_S:
                raise ProfileError(f"its times must be from {_LEAST_S:g} to {_MOST_S:g} seconds, got {time_s!r}")
        try:
            self._by_length("")
        except (InvalidInputError, ValueError) as error:
            raise ProfileError(f"its times cannot be: {error}") from error

    def costs(self) -> CostsByLength:
        """The costs for plans, with a pass of more rows never cheaper than one of fewer."""
        return self._by_length(f"profile {self.setup.file_name}, measured {self.measured_at}")

    def _by_length(self, origin: str) -> CostsByLength:
        steps = (0.0,) * len(self.lengths) if self.draft_step is None else self.draft_step
        costs = tuple(Costs(step, _not_falling(times)) for step, times in zip(steps, self.target_pass, strict=True))
        return CostsByLength(self.lengths, costs, origin)

    def to_json(self) -> str:
        """Serialise to the file's text."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> CostProfile:
        """Read a profile's file.

        Raises:
            ProfileError: it cannot be read, or is damaged.
        """
        try:
            if path.exists() and not path.is_file():
                raise ProfileError("it is no file")
            return build_dataclass(cls, json.loads(path.read_text(encoding="utf-8")), "the profile")
        except OSError as error:
            raise ProfileError(f"The profile {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError, BundleError, ProfileError) as error:
            reason = str(error).rstrip(".")
            raise ProfileError(f"The profile {path} is damaged ({reason}); run `paceline tune` again.") from error


def default_folder() -> Path:
    """Where profiles are kept: the user's cache folder for paceline.

    Raises:
        ProfileError: nothing says where the user's home is.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has relative paths ignored (XDG Base Directory Specification).
    cache = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise ProfileError("There is no home folder to keep profiles in; set XDG_CACHE_HOME, or name the profile.")
    return Path(cache, "paceline", "profiles")


def setup_of(bundle: Bundle, provider: str = "cpu", engines: Path | None = None) -> Setup:
    """The setup that a bundle's models run in, once they are loaded: only then the number of threads is settled.

    With engines from a folder of their own, that folder's list counts as part of the manifest.
    """
    import importlib

    from .cuda import device_name
    from .ort_session import pool_threads
    from .providers import find_provider

    row = find_provider(provider)
    listed = [bundle.root / MANIFEST_NAME, *([] if engines is None else [engines / INDEX_NAME])]
    return Setup(
        bundle=hashlib.sha256(b"".join(path.read_bytes() for path in listed)).hexdigest(),
        provider=provider,
        device=device_name() if row.device == "cuda" else cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=pool_threads(),
        onnxruntime=importlib.import_module(row.engine or "onnxruntime").__version__,
    )


def cpu_name() -> str:
    """Name of the processor, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:  # only Linux has it
        name = ""
    return name or platform.processor() or platform.machine()


def find_costs(setup: Setup, profile: str | Path) -> CostsByLength | None:
    """Costs of the profile for a setup.

    Args:
        setup: what the models run in.
        profile: "auto" looks into the user's cache folder and returns None where no profile fits; one that is damaged,
            or only of another setup of the same bundle, is passed over with a warning. A path names the file.

    Raises:
        ProfileError: the named file is missing, damaged, or of another setup.
    """
    try:
        path = default_folder() / setup.file_name if profile == "auto" else Path(profile)
    except ProfileError:  # a service without a home has no profiles
        return None
    if profile == "auto" and not os.path.exists(path):
        _warn_of_others(setup, path)
        return None
    try:
        found = CostProfile.read(path)
        if found.setup != setup:
            raise ProfileError(
                f"The profile {path} was measured in another setup ({setup.differences(found.setup)}); run "
                "`paceline tune` here, with the same number of threads."
            )
    except ProfileError as error:
        if profile != "auto":
            raise
        _log.warning("%s It is not used.", error)
        return None
    return found.costs()


def check_profile(profile: object) -> str | Path | None:
    """The argument of `paceline.load`, checked.

    Raises:
        InvalidInputError: neither "auto", a path, nor None.
    """
    if profile is None or isinstance(profile, Path) or (isinstance(profile, str) and profile):
        return profile
    raise InvalidInputError(f"profile must be 'auto', the path of a profile, or None, got {shown(profile)}.")


def _warn_of_others(setup: Setup, path: Path) -> None:
    """Say that there is a profile of the same bundle which does not fit, and why."""
    for other in sorted(path.parent.glob(f"{setup.bundle[:16]}-*.json")):
        try:
            differences = setup.differences(CostProfile.read(other).setup)
        except ProfileError:
            continue
        _log.warning("The profile %s does not fit (%s) and is not used; `paceline tune` makes one.", other, differences)
        return


def _not_falling(times: Sequence[float]) -> tuple[float, ...]:
    """The nearest times, by least squares, that do not fall (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean and number
    for time in times:
        if not math.isfinite(time):
            raise ValueError(f"{time!r} is no time")
        mean, count = time, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))
