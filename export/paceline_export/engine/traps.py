"""What TensorRT accepts, drops or does slowly without failing: a strict build looks for each of these.

Each function returns sentences, one for each finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from paceline.bundle import EngineProfile

__all__ = ["fused_attention", "lost_inputs", "profile_faults", "suspicious_warnings", "unfused_attention"]

# Kernels by the names that a detailed build prints, with the index of the part of the network that they are in: parts
# of the first profile come first. Those that attend in one piece have `mha` in their names.
_KERNEL = re.compile(r"^Name: (.*?)_myl(\d+)_\d+,", re.MULTILINE)
_FUSED = re.compile(r"_mha(_|$)")
_SUSPICIOUS = ("Unused Input", "kMAX")


def lost_inputs(expected: Collection[str], network: Any) -> list[str]:
    """Inputs of the graph that the parser dropped, and inputs of the network that no layer reads."""
    present = {network.get_input(i).name for i in range(network.num_inputs)}
    read = set()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        read |= {given.name for k in range(layer.num_inputs) if (given := layer.get_input(k)) is not None}
    dropped = [f"the parser dropped the input {name!r} of the graph" for name in expected if name not in present]
    return dropped + [f"no layer reads the input {name!r}" for name in sorted(present - read)]


def profile_faults(profiles: Iterable[EngineProfile], network: Any) -> list[str]:
    """Tensors that a profile names and the network does not have, which TensorRT passes over, and the reverse."""
    shapes = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    dynamic = {name for name, shape in shapes.items() if -1 in shape}
    found = []
    for profile in profiles:
        found += [
            f"the profile {profile.name!r} names {name!r}, which is no input of the network"
            for name in sorted(set(profile.shapes) - set(shapes))
        ]
        found += [
            f"the profile {profile.name!r} gives no shape for the input {name!r}"
            for name in sorted(dynamic - set(profile.shapes))
        ]
    return found


def suspicious_warnings(messages: Iterable[str]) -> list[str]:
    """Warnings that say that a part of the graph is not used, or that a profile's largest shapes do not go together."""
    return [f"TensorRT warned: {text.strip():.300}" for text in messages if any(sign in text for sign in _SUSPICIOUS)]


def fused_attention(messages: Iterable[str], num_profiles: int) -> list[int]:
    """How many layers attend in one kernel, for each profile, from what a detailed build prints."""
    kernels = [(name, int(part)) for text in messages for name, part in _KERNEL.findall(text)]
    parts = max((part for _, part in kernels), default=0) + 1
    found = Counter(part * num_profiles // parts for name, part in kernels if _FUSED.search(name))
    return [found[index] for index in range(num_profiles)]


def unfused_attention(fused: Sequence[int], expected: int, profiles: Sequence[EngineProfile]) -> list[str]:
    """Profiles in which fewer layers attend in one kernel than there are."""
    return [
        f"in the profile {profile.name!r} {count} of {expected} layers attend in one fused kernel; the others write "
        "all their scores to memory"
        for count, profile in zip(fused, profiles, strict=True)
        if count < expected
    ]
