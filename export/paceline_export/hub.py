"""The route through the model hub: huggingface_hub's own cache, settings and resuming."""

from __future__ import annotations

import errno
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from paceline.bundle import file_sha256
from paceline.errors import CheckpointError, FetchError

from .pypi import Report
from .recipe import HubRoute
from .weights import missing_weights, safetensors_files

_T = TypeVar("_T")

__all__ = ["fetch_from_hub", "snapshot_on_disk", "verify_snapshot"]

_PROBE_SECONDS = 5.0  # for a connection, and for each piece of the answer
_PROBE_DEADLINE = 10.0  # for all of it: looking up a name obeys no timeout
# What an export reads, from the top folder only: no pickles, no code, no copies in other formats.
_ALLOW = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_IGNORE = ["*/*", "consolidated*"]


def snapshot_on_disk(route: HubRoute) -> Path | None:
    """The folder of a repository that is in huggingface_hub's cache in full, else None. Asks no server."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            route.id, revision=route.revision, local_files_only=True, allow_patterns=_ALLOW, ignore_patterns=_IGNORE
        )
        safetensors_files(Path(folder))
    except (LocalEntryNotFoundError, CheckpointError):
        return None
    return Path(folder)


def fetch_from_hub(route: HubRoute, report: Report | None) -> Path:
    """Download what an export reads of a repository; returns its folder. `report` counts bytes.

    Raises:
        FetchError: the hub does not answer within 10 s, has no such repository or revision, or does not let it be read.
        CheckpointError: the repository has no Safetensors.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = _within(
            _PROBE_DEADLINE,
            lambda: huggingface_hub.HfApi().model_info(
                route.id, revision=route.revision, timeout=_PROBE_SECONDS, files_metadata=True
            ),
        )
        names = [file.rfilename for file in info.siblings or ()]
        if not {"model.safetensors", "model.safetensors.index.json"} & set(names):
            raise CheckpointError(f"The hub's {route} {missing_weights(names)}")
        folder = huggingface_hub.snapshot_download(
            route.id,
            revision=route.revision,
            allow_patterns=_ALLOW,
            ignore_patterns=_IGNORE,
            tqdm_class=_forwarding_bar(report),
        )
    except errors.GatedRepoError as error:
        raise FetchError(
            f"The hub's {route} is gated: accept its terms on its page there, then run `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"The hub's {route.id} has no revision {route.revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"The hub has no repository {route.id!r}, or it is private: check the name, or run `hf auth login`."
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise FetchError(f"The hub cannot be used for {route}: {error}") from error
    except (httpx2.HTTPError, OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise FetchError(
                f"The disk of the hub's cache became full while downloading {route} ({error}). Free some space, or set "
                "HF_HOME to a folder on another disk."
            ) from error
        raise FetchError(
            f"The hub does not answer for {route} ({type(error).__name__}: {error}). Check the network and "
            "HF_ENDPOINT; run it again to go on where it stopped."
        ) from error
    return Path(folder)


def _within(seconds: float, ask: Callable[[], _T]) -> _T:
    """What `ask` returns or raises, if it does so in time; else it is left behind in its thread.

    Raises:
        TimeoutError: it did not.
    """
    answers: queue.SimpleQueue[_T | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:  # raised below, where it can be told
            answers.put(error)

    threading.Thread(target=run, name="paceline-hub-probe", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def verify_snapshot(folder: Path) -> None:
    """Hash a snapshot's weights. In huggingface_hub's cache a large file's entry links to one named by its SHA-256.

    Raises:
        FetchError: a file differs, or its entry is no such link, so that there is nothing to compare with.
    """
    for path in safetensors_files(folder):
        blob = path.resolve()
        if not re.fullmatch("[0-9a-f]{64}", blob.name):
            raise FetchError(f"{path} is not stored under its SHA-256: nothing to verify it with. Fetch it again.")
        if (digest := file_sha256(path)) != blob.name:
            raise FetchError(
                f"{path} has SHA-256 {digest}, the hub's file has {blob.name}; delete {blob} and fetch again."
            )


def _forwarding_bar(report: Report | None) -> type[Any]:
    """A tqdm class that draws nothing, and passes on what huggingface_hub counts as bytes on disk."""
    from tqdm import tqdm

    class ForwardingBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B" and "econstruct" in kwargs.get("desc", "")
            self.done = 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            if self.counts_bytes and report is not None:
                report("download", self.done, max(self.done, int(self.total or 0)))

    return ForwardingBar
