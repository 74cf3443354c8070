"""Files that commands write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_or_rescue", "write_whole"]


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


def write_or_rescue(path: Path, text: str) -> None:
    """Write a file like `write_whole`; where that fails, write it to the folder for temporary files.

    Raises:
        OSError: it could not be written to `path`; the message says where it is now, if anywhere.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        spare = Path(tempfile.gettempdir()) / f"{path.stem}-{os.getpid()}{path.suffix}"
        try:
            write_whole(spare, text)
        except OSError:
            raise error from None
        raise OSError(error.errno, f"{error.strerror}; it was written to {spare} instead", str(path)) from error
