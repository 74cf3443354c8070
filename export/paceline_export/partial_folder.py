"""A folder that appears under its name when it is complete, or not at all."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import InvalidInputError, PacelineError

__all__ = ["check_room", "partial_folder"]


def check_room(out: Path, least: int) -> None:
    """Check that the disk has room for a bundle of at least so many bytes, before hours of work rather than after.

    Raises:
        PacelineError: it has not.
    """
    real = Path(os.path.realpath(out))
    free = shutil.disk_usage(next(folder for folder in real.parents if folder.is_dir())).free
    if free < least:
        raise PacelineError(
            f"The disk is too full for this bundle: it needs more than {_amount(least)} at {real.parent}, where "
            f"{_amount(free)} are free. Free some space, or choose another disk or fewer bits."
        )


def _amount(size: int) -> str:
    """Bytes, in a unit in which they are no 0."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit / 10), (1e3, "kB"))
    return f"{size / unit:.1f} {name}"


@contextmanager
def partial_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and is removed otherwise."""
    out = Path(os.path.realpath(out))  # through a link, to the folder that it stands for
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():  # an export was killed between taking the old bundle away and putting the new one in place
        for old in out.parent.glob(f".{glob.escape(out.name)}.replaced-*"):
            if not _is_running(old.name.rpartition("-")[2]):
                old.rename(out)
                break
    for left in out.parent.glob(f".{glob.escape(out.name)}.partial-*"):  # of exports that were killed
        if not _is_running(left.name.rpartition("-")[2]):
            shutil.rmtree(left, ignore_errors=True)
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        if out.exists():
            if not overwrite:
                raise InvalidInputError(f"{out} appeared while the bundle was being written; it is left as it is.")
            old = out.parent / f".{out.name}.replaced-{os.getpid()}"
            out.rename(old)
            folder.rename(out)
            shutil.rmtree(old)
        else:
            folder.rename(out)
    except OSError as error:
        free = shutil.disk_usage(out.parent).free
        is_full, is_unnamed = free < 1 << 20, error.errno is None  # numpy's "… written" of a short write has no number
        if error.errno == errno.EFBIG or (is_unnamed and not is_full and "written" in str(error)):
            raise PacelineError(
                f"A file of weights is larger than a file may be at {out.parent} (by its file system, such as FAT32, "
                "or by `ulimit -f`). Nothing was kept; export again with --max-file-size, such as 2GB, or elsewhere."
            ) from error
        if error.errno == errno.ENOSPC or (is_unnamed and is_full):
            raise PacelineError(
                f"The disk is full: {_amount(free)} are left at {out.parent}. Nothing was kept; free some space and "
                "export again."
            ) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Wait until the files are on the disk, so that a bundle's name never stands for half a bundle after a crash."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_running(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
