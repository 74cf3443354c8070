"""What TensorRT accepts, drops or does slowly without failing: a strict build looks for each of these.

Each function returns sentences, one for each finding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from paceline.bundle import EngineProfile

__all__ = [
    "fused_attention",
    "ignored_arguments",
    "lost_inputs",
    "profile_faults",
    "suspicious_warnings",
    "unfused_attention",
]

# Kernels by the names that a detailed build prints, with the index of the part of the network that they are in: parts
# of the first profile come first. Those that attend in one piece have `mha` in their names.
_KERNEL = re.compile(r"^Name: (.*?)_myl(\d+)_\d+,", re.MULTILINE)
_FUSED = re.compile(r"_mha(_|$)")
_LENGTHS = 6  # the place of nonpad_kv_seqlen among the inputs of Attention
_SUSPICIOUS = ("Unused Input", "kMAX")


def ignored_arguments(graph: ir.Model) -> list[str]:
    """Arguments of attention that TensorRT reads and does not heed, or takes for something else, without a word."""
    found = []
    for node in graph.graph:
        if node.op_type != "Attention":
            continue
        if len(node.inputs) > _LENGTHS and node.inputs[_LENGTHS] is not None:
            found.append(f"TensorRT ignores nonpad_kv_seqlen, which {node.name!r} is given; put it into the mask")
        if "is_causal" in node.attributes and node.attributes["is_causal"].as_int():
            found.append(f"TensorRT seems to align is_causal, which {node.name!r} has, to the first key; use the mask")
    return found


def lost_inputs(expected: Collection[str], network: Any) -> list[str]:
    """Inputs of the graph that the parser dropped, and inputs of the network that no layer reads."""
    present = {network.get_input(i).name for i in range(network.num_inputs)}
    read = set()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        read |= {given.name for k in range(layer.num_inputs) if (given := layer.get_input(k)) is not None}
    dropped = [f"the parser dropped the input {name!r} of the graph" for name in expected if name not in present]
    return dropped + [f"no layer reads the input {name!r}" for name in sorted(present - read)]


def profile_faults(profiles: Iterable[EngineProfile], inputs: Mapping[str, tuple[int | str, ...]]) -> list[str]:
    """Profiles that do not fit the graph: TensorRT passes over names it does not know, and over sizes that clash.

    Args:
        profiles: to look at.
        inputs: shapes of the graph's inputs by their names; a string stands for one size wherever it occurs.
    """
    found = []
    for profile in profiles:
        what = f"the profile {profile.name!r}"
        found += [f"{what} names {name!r}, which is no input" for name in sorted(set(profile.shapes) - set(inputs))]
        found += [f"{what} gives no shape for the input {name!r}" for name in sorted(set(inputs) - set(profile.shapes))]
        for place, kind in enumerate(("least", "usual", "largest")):
            sizes: dict[int | str, dict[int, str]] = {}
            for name, dims in inputs.items():
                shape = profile.shapes[name][place] if name in profile.shapes else None
                if shape is not None and len(shape) != len(dims):
                    found.append(f"{what} gives {name!r}, which has {len(dims)} dimensions, {len(shape)} of them")
                    continue
                for dim, size in zip(dims, shape or (), strict=False):
                    sizes.setdefault(dim, {}).setdefault(size, name)
            for dim, by_size in sizes.items():
                wanted = {dim: "the graph"} if isinstance(dim, int) else {}
                if len(all_sizes := {**wanted, **by_size}) > 1:
                    clash = ", ".join(f"{size} ({name})" for size, name in all_sizes.items())
                    found.append(f"{what} gives the dimension {dim!r} sizes that clash in its {kind} shapes: {clash}")
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
