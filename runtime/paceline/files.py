"""Files that are there in full, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8, so that a reader sees it in full, or as it was before.

    Raises:
        OSError: it cannot be written; then it is as it was before.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # a disk that is full may say so only now
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # not the partial file's name
    finally:
        partial.unlink(missing_ok=True)
