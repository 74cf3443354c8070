"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all.

    Raises:
        OSError: it cannot be written; then it is as it was before.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a disk that is full may say so only now
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # not the partial file's name
    finally:
        partial.unlink(missing_ok=True)
