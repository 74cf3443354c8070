"""Replace the text of a file at once."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["exchange"]


def exchange(path: Path, text: str) -> None:
    """Replace a file's text at once: a reader sees the old or the new one."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
