"""A bundle in name only: a byte-level tokenizer and table models, so that the command line runs in milliseconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner, Result
from tokenizers import decoders, models, pre_tokenizers

import paceline
from paceline.bundle import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Bundle,
    FileEntry,
    Manifest,
    ModelEntry,
    SourceEntry,
    TensorSpec,
    TokenizerEntry,
    file_sha256,
)
from paceline.ort import OrtModel
from paceline.testing import TableModel
from paceline_tools.benchmark import meters
from paceline_tools.cli import cli

ROOT = Path(__file__).parents[2]
VOCAB = 257  # bytes, and the end of the text
CONTEXT = 64
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Invoke:
    """Run `paceline` in this process."""

    def run(*args: object, **options: Any) -> Result:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="paceline", **options)

    return run


def run_paceline(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m paceline_tools` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "paceline_tools", *map(str, args)],
        **{"capture_output": True, "text": True, "env": environment(), "timeout": 300, **options},
    )


def environment() -> dict[str, str]:
    """This process' environment, with the packages of the working tree."""
    folders = [str(ROOT / folder) for folder in ("runtime", "export", "tools")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONIOENCODING": "utf-8"}


def write_table_bundle(root: Path, *, draft: bool = True, template: str | None = TEMPLATE) -> Path:
    """A bundle that opens, and whose graphs nobody can run."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])

    def model(name: str) -> ModelEntry:
        (root / name).mkdir(parents=True)
        (root / name / "model.onnx").write_bytes(name.encode())
        source = SourceEntry(f"tiny-{name}", "folder", "0" * 64)
        names = (f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value"))
        past = tuple(TensorSpec(cache, "float32", ("batch", 1, "max_length", 8)) for cache in names)
        logits = (TensorSpec("logits", "float32", ("batch", "num_logits", VOCAB)),)
        return ModelEntry(
            f"{name}/model.onnx", "ort", "table", "int4", 32, 2, 1, 8, CONTEXT, VOCAB, "float32", past, logits, source
        )

    target, draft_model = model("target"), model("draft") if draft else None
    backend.save(str(root / "tokenizer.json"))
    if template is not None:
        (root / "chat_template.jinja").write_text(template)
    paths = [path for path in root.rglob("*") if path.is_file()]
    files = {path.relative_to(root).as_posix(): FileEntry(path.stat().st_size, file_sha256(path)) for path in paths}
    entry = TokenizerEntry(VOCAB, None, (VOCAB - 1,), None)
    manifest = Manifest(FORMAT_VERSION, paceline.__version__, target, draft_model, entry, files)
    (root / MANIFEST_NAME).write_text(manifest.to_json())
    return root


def ascii_table(seed: int) -> TableModel:
    """A model that writes letters and spaces, and never ends its text."""
    logits = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [alphabet.index(c) for c in "abcdefghijklmnopqrstuvwxyzĠ"]
    logits[:, letters] = np.random.default_rng(seed).standard_normal((VOCAB, len(letters)))
    return TableModel(logits, max_length=CONTEXT)


@pytest.fixture
def table_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose models are tables; the draft is another table than the target."""

    def open_model(bundle: Bundle, which: str, **options: Any) -> TableModel:
        return ascii_table(1 if which == "target" else 2)

    monkeypatch.setattr(OrtModel, "open", open_model)
    monkeypatch.setattr(meters, "_BYTES", 1 << 20)  # what a benchmark reads to know the memory's speed: half a second
    return write_table_bundle(tmp_path / "tables")
