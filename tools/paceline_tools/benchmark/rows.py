"""Files of JSON lines: each line an object, and where it stands, for errors."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInputError

__all__ = ["Row", "content", "rows_in", "rows_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a file of JSON lines, and where it stands, for errors."""

    where: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """A field that must be text, and not empty.

        Raises:
            InvalidInputError: it is missing or something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise InvalidInputError(f"{self.where}: {name!r} should be text that is not empty, got {value!r:.60}.")
        return self.checked(name, value)

    def checked(self, name: str, value: str) -> str:
        """The text, if it is one in UTF-8, too; JSON can hold halves of characters.

        Raises:
            InvalidInputError: it is not.
        """
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"{self.where}: {name!r} holds half of a character ({value[error.start]!a}) at character "
                f"{error.start + 1}."
            ) from error
        return value


def rows_of(source: str) -> list[Row]:
    """The lines of a file of JSON lines, which may be packed by gzip; `-` is stdin. Blank lines are passed over.

    Raises:
        InvalidInputError: it cannot be read, holds no line, or a line is no JSON object, which is named.
    """
    return rows_in(*content(source))


def content(source: str) -> tuple[str, bytes]:
    """What prompts of the source are called, and its bytes, unpacked."""
    if source == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise InvalidInputError("There are no prompts: stdin is a terminal; pipe prompts into it, or name a file.")
        return "stdin", sys.stdin.buffer.read()
    path = Path(source)
    try:
        found = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"The prompts {source!r} cannot be read ({error.strerror or error}); a file, - for stdin, or the name of "
            "a set of `paceline bench --help` is expected."
        ) from error
    if path.suffix == ".gz":
        try:
            found = gzip.decompress(found)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInputError(f"{source} is not packed by gzip, or damaged: {error}.") from error
    return path.name, found


def rows_in(name: str, found: bytes) -> list[Row]:
    """The lines in bytes; `name` is what errors call them. Blank lines are passed over."""
    rows = []
    for number, line in enumerate(found.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            fields = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"{where}: not UTF-8 (byte {error.start} of the line).") from error
        except json.JSONDecodeError as error:  # whose own line would be the first of this one
            raise InvalidInputError(f"{where}: no JSON ({error.msg} at character {error.colno}).") from error
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{where}: no JSON ({error}).") from error
        if not isinstance(fields, dict):
            raise InvalidInputError(f"{where}: a JSON object is expected, got {fields!r:.60}.")
        rows.append(Row(where, fields))
    if not rows:
        raise InvalidInputError(f"{name}, line 1: there are no prompts, the file is empty.")
    return rows
