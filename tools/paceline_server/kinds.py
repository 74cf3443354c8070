"""Fields that take several kinds of values, told apart by what was sent.

pydantic tries all members of a union and names each of them in what it reports. With a kind that is known before, it
reports what is wrong with that kind alone, under names that `sent` takes out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Discriminator

__all__ = ["AUTO", "LIST", "NUMBER", "OBJECT", "TEXT", "by_kind", "json_kind", "sent"]

_MARK = "|"  # begins the names of kinds
TEXT, NUMBER, LIST, OBJECT, AUTO = (_MARK + kind for kind in ("text", "number", "list", "object", "auto"))


def json_kind(value: object) -> str | None:
    """The kind of a JSON value; None for `true`, `false` and `null`."""
    if isinstance(value, bool):
        return None
    for kind, types in ((TEXT, str), (NUMBER, (int, float)), (LIST, list), (OBJECT, dict)):
        if isinstance(value, types):
            return kind
    return None


def by_kind(expected: str, kind: Callable[[Any], str | None] = json_kind) -> Discriminator:
    """For a union whose members have tags: `kind` gives the tag for a value, None where none of them can be meant.

    `expected` ends the sentence "Input should be …".
    """
    return Discriminator(kind, custom_error_type="kind", custom_error_message=f"Input should be {expected}")


def sent(path: Sequence[str | int]) -> list[str | int]:
    """A path of pydantic's without the names of kinds."""
    return [part for part in path if not (isinstance(part, str) and part.startswith(_MARK))]
