from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from paceline.errors import BundleError, InvalidInputError
from paceline.ort import OrtModel
from paceline.testing import TableModel

from .conftest import byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def make_bundle(root: Path, *, with_draft: bool) -> None:
    """A bundle whose graphs are only names; what runs them is replaced."""

    def model(name: str, width: int) -> ModelEntry:
        (root / name).mkdir()
        (root / name / "model.onnx").write_bytes(name.encode())
        source = SourceEntry("test", "folder", "0" * 64)
        parts = ("key", "value")
        past = tuple(TensorSpec(f"past_key_values.0.{part}", "float32", ("batch", 1, "max", 1)) for part in parts)
        logits = (TensorSpec("logits", "float32", ("batch", "num_logits", width)),)
        return ModelEntry(
            f"{name}/model.onnx", "ort", "Table", "fp32", None, 1, 1, 1, 64, width, "float32", past, logits, source
        )

    TOKENIZER._backend.save(str(root / "tokenizer.json"))
    target = model("target", TOKENIZER.vocab_size + 7)
    draft = model("draft", TOKENIZER.vocab_size) if with_draft else None
    entry = TokenizerEntry(TOKENIZER.vocab_size, None, TOKENIZER.eos_token_ids, None)
    paths = [path for path in root.rglob("*") if path.is_file()]
    files = {path.relative_to(root).as_posix(): FileEntry(path.stat().st_size, file_sha256(path)) for path in paths}
    manifest = Manifest(FORMAT_VERSION, paceline.__version__, target, draft, entry, files)
    (root / MANIFEST_NAME).write_text(manifest.to_json())


@pytest.mark.parametrize("with_draft", [True, False])
def test_load_makes_a_decoder_of_what_the_bundle_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_draft: bool
) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []

    def open_model(bundle: Bundle, which: str, **options: Any) -> TableModel:
        opened.append((which, options))
        width = getattr(bundle.manifest, which).vocab_size
        return TableModel(np.zeros((width, width)))

    monkeypatch.setattr(OrtModel, "open", open_model)
    make_bundle(tmp_path, with_draft=with_draft)
    decoder = paceline.load(tmp_path, threads=2, provider="cpu")
    options = {"provider": "cpu", "threads": 2}
    assert opened == [("target", options), ("draft", options)][: 2 if with_draft else 1]
    assert decoder.vocab_size == TOKENIZER.vocab_size == decoder.target.vocab_size - 7
    assert decoder.eos_token_ids == TOKENIZER.eos_token_ids
    generation = decoder.generate("hi", max_new_tokens=3)
    list(generation)
    assert generation.token_ids == (0, 0, 0)
    assert generation.text == TOKENIZER.decode([0, 0, 0])
    assert (generation.stats.proposed > 0) == with_draft


def test_load_checks_the_bundle_before_it_opens_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrtModel, "open", lambda *_, **__: pytest.fail("opened a model of a broken bundle"))
    with pytest.raises(BundleError, match=r"is not a bundle|no bundle"):
        paceline.load(tmp_path)
    make_bundle(tmp_path, with_draft=True)
    (tmp_path / "draft" / "model.onnx").write_bytes(b"cut")
    with pytest.raises(BundleError, match=r"'draft/model\.onnx' has 3 bytes where 5 are expected"):
        paceline.load(tmp_path)


def test_a_profile_is_a_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="profile must be 'auto', the path of a profile, or None, got 3"):
        paceline.load(tmp_path, profile=3)  # type: ignore[arg-type]
