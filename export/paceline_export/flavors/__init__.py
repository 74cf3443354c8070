"""Graph flavours: what a graph is made for decides its operators, its inputs and how its weights are stored.

A flavour is one object. The trace, the passes and the export ask it; none of them knows its name.
"""

from __future__ import annotations

from paceline.errors import InvalidInputError

from .cuda import CUDA
from .flavor import Flavor, GraphInput
from .ort import ORT
from .trt import TRT

__all__ = ["FLAVORS", "Flavor", "GraphInput", "find_flavor"]

FLAVORS = {flavor.name: flavor for flavor in (ORT, CUDA, TRT)}


def find_flavor(name: str) -> Flavor:
    """The flavour of this name.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in FLAVORS:
        raise InvalidInputError(f"Unknown flavour {name!r}: expected one of {', '.join(FLAVORS)}.")
    return FLAVORS[name]
