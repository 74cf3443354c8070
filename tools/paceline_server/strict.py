"""What all bodies of requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Strict"]


class Strict(BaseModel):
    """An object whose fields have exactly these types, and that has no others."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
