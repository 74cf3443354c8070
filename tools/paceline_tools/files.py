"""Files that commands write after long work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from paceline.files import write_whole

__all__ = ["write_or_rescue"]


def write_or_rescue(path: Path, text: str) -> None:
    """Write a file like `paceline.files.write_whole`; where that fails, write it to the folder for temporary files.

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
