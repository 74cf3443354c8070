"""paceline: speculative sampling with the target model's own distribution. This package is the lean runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bundle import Bundle
from .decoder import SpeculativeDecoder
from .drafters import Drafter
from .errors import PacelineError
from .generation import Generation, Step
from .kv_cache import KVCache
from .loading import load
from .model import CausalLM
from .prefix_cache import PrefixCache
from .sampling import SamplingParams
from .stats import Stats
from .verify import Draft

if TYPE_CHECKING:
    from .engine import AsyncEngine

__all__ = [
    "AsyncEngine",
    "Bundle",
    "CausalLM",
    "Draft",
    "Drafter",
    "Generation",
    "KVCache",
    "PacelineError",
    "PrefixCache",
    "SamplingParams",
    "SpeculativeDecoder",
    "Stats",
    "Step",
    "__version__",
    "load",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`AsyncEngine`, which brings asyncio along: a tenth of the import, for programs that have an event loop alone."""
    if name == "AsyncEngine":
        from .engine import AsyncEngine

        return AsyncEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
