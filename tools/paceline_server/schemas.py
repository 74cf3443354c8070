"""Schemas that texts are held to, and how large: llguidance takes time by the square of their properties."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .api_error import ApiError

__all__ = ["MOST_CHARACTERS", "check_schemas"]

MOST_CHARACTERS = 1 << 16


def check_schemas(param: str, schemas: Iterable[Mapping[str, Any] | None]) -> None:
    """See that the schemas of a request, which the field `param` holds, are not too large together.

    Raises:
        ApiError: they are.
    """
    characters = sum(len(json.dumps(schema)) for schema in schemas)
    if characters > MOST_CHARACTERS:
        raise ApiError(
            400,
            f"{param}: schemas that a text is held to may have {MOST_CHARACTERS:,} characters together, these have "
            f"{characters:,}.",
            param=param,
            code="invalid_value",
        )
