"""paceline: speculative sampling with the target model's own distribution. This package is the lean runtime."""

from __future__ import annotations

from .bundle import Bundle
from .decoder import SpeculativeDecoder
from .drafters import Drafter
from .engine import AsyncEngine
from .errors import PacelineError
from .generation import Generation, Step
from .kv_cache import KVCache
from .loading import load
from .model import CausalLM
from .prefix_cache import PrefixCache
from .sampling import SamplingParams
from .stats import Stats
from .verify import Draft

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
