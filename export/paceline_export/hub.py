"""The route through the model hub: huggingface_hub's own cache, settings and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bundle import file_sha256
from paceline.errors import CheckpointError, FetchError

from .pypi import Report
from .recipe import HubRoute
from .weights import missing_weights, safetensors_files

__all__ = ["fetch_from_hub", "snapshot_on_disk", "verify_snapshot"]

_PROBE_SECONDS = 5.0
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
        FetchError: the hub does not answer within 5 s, has no such repository or revision, or does not let it be read.
        CheckpointError: the repository has no Safetensors.
    """
    import httpx2
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().model_info(
            route.id, revision=route.revision, timeout=_PROBE_SECONDS, files_metadata=True
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
        raise FetchError(
            f"The hub does not answer for {route} ({type(error).__name__}: {error}). Check the network and "
            "HF_ENDPOINT; run it again to go on where it stopped."
        ) from error
    return Path(folder)


def verify_snapshot(route: HubRoute, folder: Path) -> None:
    """Hash a snapshot's weights against what the hub listed for them when they were downloaded.

    Raises:
        FetchError: a file differs, or there is no list to compare with.
    """
    import huggingface_hub
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = huggingface_hub.get_cached_repo_tree(route.id, revision=route.revision)
    except CachedRepoTreeNotFoundError as error:
        raise FetchError(
            f"{folder}: there is no list of hashes to verify it with; delete it and fetch again."
        ) from error
    expected = {file.path: file.lfs.sha256 for file in tree if file.lfs is not None}
    for path in safetensors_files(folder):
        if path.name not in expected:
            raise FetchError(f"{path}: the hub listed no SHA-256 for it; nothing to verify it with.")
        if (digest := file_sha256(path)) != expected[path.name]:
            raise FetchError(
                f"{path} has SHA-256 {digest}, the hub's file has {expected[path.name]}; "
                f"delete {path.resolve()} and fetch again."
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
