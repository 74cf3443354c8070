"""Where the tests find OpenVINO's plugin.

The plugin of ONNX Runtime offers OpenVINO on Intel's processors only, though OpenVINO itself runs on others. On another
maker's processor the tests use a copy of the plugin that asks for that maker instead: it is good for seeing what the
plugin computes, and nothing that users get.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.cost_profile import cpu_name

__all__ = ["plugin_folder"]

PACKAGE = "onnxruntime_ep_openvino"
# `cmp eax, 0x8086` in x86's machine code: is the vendor Intel? AMD's number is 0x1022.
ASKS_FOR_INTEL, ASKS_FOR_AMD = b"\x3d\x86\x80\x00\x00", b"\x3d\x22\x10\x00\x00"


def plugin_folder(scratch: Path) -> Path | None:
    """The folder to put before Python's path: with the plugin, or with a copy made in `scratch`; None without it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    if "AMD" not in cpu_name():
        return package.parent
    copy = scratch / PACKAGE
    copy.mkdir(parents=True)
    for path in package.iterdir():
        if path.name == "libonnxruntime_providers_openvino_plugin.so":
            (copy / path.name).write_bytes(path.read_bytes().replace(ASKS_FOR_INTEL, ASKS_FOR_AMD))
        elif path.is_file():
            (copy / path.name).symlink_to(path)
    return scratch
