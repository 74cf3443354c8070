"""`GET /v1/models`: the one model there is."""

from __future__ import annotations

from typing import Any

from .api_error import ApiError
from .served import Served

__all__ = ["check_model", "model_shape"]


def model_shape(served: Served) -> dict[str, Any]:
    """The model as OpenAI's API describes one."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "paceline",
        "max_model_len": served.decoder.target.max_length,
    }


def check_model(served: Served, name: str) -> None:
    """See that a request names the model.

    Raises:
        ApiError: 404 for any other.
    """
    if name != served.name:
        raise ApiError(
            404, f"There is no model {name!r:.100} here, only {served.name!r}.", param="model", code="model_not_found"
        )
