"""An HTTP server that speaks OpenAI's API, in front of `paceline.AsyncEngine`; `paceline serve` runs it."""

from __future__ import annotations

from .app import create_app
from .served import Limits, Served

__all__ = ["Limits", "Served", "create_app"]
