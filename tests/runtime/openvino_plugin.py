"""OpenVINO's plugin for the tests: the installed one on Intel's processors, and on AMD's, **if asked, a patched copy**.

The plugin of ONNX Runtime (1.8.1 and before) offers no device on AMD's processors, though OpenVINO itself runs on them.
Where the environment variable PACELINE_TEST_PATCHED_OPENVINO is 1, the tests make a copy of the plugin in a scratch
folder, and change its question "is the maker Intel?" to "is it AMD?". That shows what paceline does with a plugin that
has a device; it is not what users get. Nothing outside `tests/` knows of the copy.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

__all__ = ["ASKED", "OFFERS_A_DEVICE", "PACKAGE", "installed_folder", "patched_folder"]

PACKAGE = "onnxruntime_ep_openvino"
VARIABLE = "PACELINE_TEST_PATCHED_OPENVINO"
ASKED = os.environ.get(VARIABLE) == "1"
_PROCESSOR = Path("/proc/cpuinfo").read_text(encoding="utf-8")
# Whether the installed plugin has a device for this processor.
OFFERS_A_DEVICE = "GenuineIntel" in _PROCESSOR
_LIBRARY = "libonnxruntime_providers_openvino_plugin.so"
# `cmp eax, 0x8086` in x86's machine code, the number of Intel, and the same with 0x1022, AMD's.
_ASKS_FOR_INTEL, _ASKS_FOR_AMD, _TIMES = b"\x3d\x86\x80\x00\x00", b"\x3d\x22\x10\x00\x00", 4


def installed_folder() -> Path | None:
    """The folder that the plugin's package lies in; None without it."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def patched_folder(installed: Path, scratch: Path) -> Path:
    """Make the copy; returns the folder to put before Python's path.

    Raises:
        RuntimeError: the processor or the plugin is not what this patch was made for.
    """
    if "AuthenticAMD" not in _PROCESSOR:
        raise RuntimeError("The patch of OpenVINO's plugin is for AMD's processors; leave it out.")
    library = (installed / PACKAGE / _LIBRARY).read_bytes()
    if (count := library.count(_ASKS_FOR_INTEL)) != _TIMES:
        raise RuntimeError(f"{_LIBRARY} asks for Intel {count} times, 1.8.1 asks {_TIMES} times: see what it does now.")
    copy = scratch / PACKAGE
    copy.mkdir()
    for path in (installed / PACKAGE).iterdir():
        if path.name == _LIBRARY:
            (copy / path.name).write_bytes(library.replace(_ASKS_FOR_INTEL, _ASKS_FOR_AMD))
        elif path.is_file() and not path.name.startswith(_LIBRARY):
            (copy / path.name).symlink_to(path)
    return scratch
