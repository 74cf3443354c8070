"""Who may import whom, read from the syntax tree of every file (README, "Folders")."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"paceline", "paceline_export", "paceline_tools", "paceline_server"}
RUNTIME = {"numpy", "onnxruntime", "tokenizers", "jinja2", "paceline"}
# Extras of the runtime, imported inside functions; tests/runtime/test_public.py sees that nothing loads them early.
OPTIONAL = {("runtime/paceline/grammar.py", "llguidance")}
EXPORT_ONLY = {"torch", "transformers", "onnx"}
# Runs in the peer's own Python, and nothing imports it.
FOREIGN = "tools/paceline_tools/peers/run_transformers.py"
# What export may take from the runtime; parity and quality are measured with the runtime itself, and what two
# tokenizers share is found by the runtime's own.
BUNDLE = {"paceline.bundle", "paceline.engines", "paceline.errors", "paceline.__version__"}


def imported(source: str) -> Iterator[str]:
    """Dotted names of the absolute imports of a file, wherever they stand in it."""
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import) and any(alias.name == "paceline" for alias in node.names):
            # The bare package: what counts is what is taken from it.
            used = {use.attr for use in nodes if isinstance(use, ast.Attribute) and _is_name(use.value, "paceline")}
            yield from (f"paceline.{name}" for name in used or {"*"})
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from paceline import bundle` reaches paceline.bundle; `from torch import nn` reaches torch.nn.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def breaches(path: str, source: str) -> list[str]:
    """Imports of the file at `path` (relative to the root) that a border forbids."""
    folder = path.split("/")[0]
    found = []
    for name in imported(source):
        package = name.split(".")[0]
        allowed = {
            "runtime": package in RUNTIME or package in sys.stdlib_module_names or (path, package) in OPTIONAL,
            "export": package != "paceline"
            or any(f"{name}.".startswith(f"{module}.") for module in BUNDLE)
            or path.endswith(("/parity.py", "/quality.py", "/cpu.py", "/ragged.py", "/other_tokenizer.py")),
            "tools": package not in EXPORT_ONLY or path == FOREIGN,
            "tests": True,
        }[folder]
        if package in ("paceline_tools", "paceline_server") and folder not in ("tools", "tests"):
            allowed = False
        if package == "paceline_tools" and path.startswith("tools/paceline_server/"):
            allowed = False
        if package in EXPORT_ONLY and folder not in ("export", "tests") and path != FOREIGN:
            allowed = False
        if not allowed:
            found.append(f"{path} imports {name}")
    return found


FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("runtime", "export", "tools")
    for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("path", FILES)
def test_no_file_crosses_a_border(path: str) -> None:
    assert breaches(path, (ROOT / path).read_text(encoding="utf-8")) == []


def test_the_runtime_is_among_the_files() -> None:
    assert "runtime/paceline/__init__.py" in FILES


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/paceline/ort.py", "import torch"),
        ("runtime/paceline/ort.py", "def f():\n    from torch import nn"),
        ("runtime/paceline/ort.py", "import requests"),
        ("runtime/paceline/decoder.py", "def f():\n    import llguidance"),
        ("runtime/paceline/ort.py", "from paceline_export import engine"),
        ("runtime/paceline/ort.py", "import paceline_tools.cli"),
        ("export/paceline_export/pair.py", "from paceline.tokenizer import Tokenizer"),
        ("export/paceline_export/pair.py", "from paceline import load"),
        ("export/paceline_export/pair.py", "import paceline"),
        ("export/paceline_export/pair.py", "import paceline\nprint(paceline.__version__, paceline.load)"),
        ("export/paceline_export/pair.py", "from paceline_tools import cli"),
        ("runtime/paceline/engine.py", "import paceline_server"),
        ("runtime/paceline/engine.py", "import starlette"),
        ("tools/paceline_server/app.py", "from paceline_tools import cli"),
        ("tools/paceline_tools/info.py", "import transformers"),
        ("tools/paceline_tools/info.py", "if True:\n    import onnx.helper"),
    ],
)
def test_a_crossing_is_seen(path: str, source: str) -> None:
    assert breaches(path, source) != []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("runtime/paceline/ort.py", "import json\nimport onnxruntime\nfrom .bundle import Bundle"),
        ("runtime/paceline/grammar.py", "def f():\n    from llguidance import LLMatcher"),
        (
            "export/paceline_export/pair.py",
            "import torch\nfrom paceline.bundle import Bundle\nfrom paceline import errors",
        ),
        ("export/paceline_export/export.py", "import paceline\nprint(paceline.__version__)"),
        ("export/paceline_export/parity.py", "from paceline.ort import OrtModel"),
        ("export/paceline_export/other_tokenizer.py", "from paceline.tokenizer import Tokenizer"),
        ("tools/paceline_tools/serve.py", "from paceline_server import Served"),
        ("tools/paceline_tools/generate.py", "import click\nimport paceline\nfrom paceline_export import pair"),
    ],
)
def test_what_the_borders_allow(path: str, source: str) -> None:
    assert breaches(path, source) == []
