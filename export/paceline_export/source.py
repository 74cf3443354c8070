"""One notion of a source: what `--target` and `--draft` take, and what the exporter reads.

A text is tried in this order, and the first form that fits is taken:

1. `….toml`              a recipe's file
2. `smollm2-135m`        the name of a recipe of `models/`; a folder of the same name is written `./smollm2-135m`
3. an existing path      a folder with a checkpoint, or a `.gguf` file; an existing `org/name` hides the hub's
4. `org/name[@revision]` a repository of the model hub

Nothing of a source is executed: weights are Safetensors or GGUF, never pickles, and remote code is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import CheckpointError

from .fetch import fetch, progress_bar
from .recipe import find_model_recipe, hub_recipe, resolve_pair, unknown_source
from .weights import check_gguf, read_json, safetensors_files

__all__ = ["Source", "SourceKind", "folder_source", "gguf_source", "resolve", "resolve_pair"]

SourceKind = Literal["recipe", "hub", "folder", "gguf"]


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on this disk, checked to be complete: a folder, and in it a GGUF file or Safetensors.

    `weight_files` are in order of their names. `gguf_file` is a name inside `folder`, None for Safetensors.
    """

    name: str
    kind: SourceKind
    folder: Path
    gguf_file: str | None
    weight_files: tuple[Path, ...]

    def __post_init__(self) -> None:
        if self.kind not in get_args(SourceKind):
            raise CheckpointError(f"A source is of kind {', '.join(get_args(SourceKind))}; got {self.kind!r}.")
        if not self.weight_files or list(self.weight_files) != sorted(self.weight_files):
            raise CheckpointError(f"{self.name}: weight_files must be sorted and not empty, got {self.weight_files}.")

    def sha256(self, on_bytes: Callable[[int], None] | None = None) -> str:
        """SHA-256 over the weight files, one after the other; `on_bytes` is called with the size of each piece read.

        The hash of a single file is what `sha256sum` prints for it. Reads every byte: about 0.5 s a gigabyte.
        """
        digest = hashlib.sha256()
        for path in self.weight_files:
            with path.open("rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
                    if on_bytes is not None:
                        on_bytes(len(piece))
        return digest.hexdigest()


def resolve(text: str, *, cache_dir: Path | None = None, progress: bool = False) -> Source:
    """Find the checkpoint that `text` names (see the module), and fetch it when it is not on this disk yet.

    `cache_dir` is where packages are assembled, by default the user's cache folder for paceline. `progress` draws a
    bar in bytes on stderr.

    Raises:
        CheckpointError: no such source, or one that cannot be used: incomplete, only pickles, needs remote code.
        FetchError: it had to be fetched, and that failed.
    """
    text = os.fspath(text)
    kind: SourceKind = "recipe"
    recipe = find_model_recipe(text)
    if recipe is None:
        path = Path(text).expanduser()
        if path.is_dir():
            return folder_source(path)
        if path.is_file():
            return gguf_source(path)
        kind, recipe = "hub", hub_recipe(text)
        if recipe is None or path.suffix == ".gguf":
            raise unknown_source(text)
    with progress_bar() if progress else nullcontext() as report:
        fetched = fetch(text, cache_dir=cache_dir, progress=report)
    name = recipe.name if kind == "recipe" else text
    if fetched.is_dir():
        return folder_source(fetched, name=name, kind=kind)
    return gguf_source(fetched, name=name, kind=kind)


def folder_source(folder: Path, *, name: str | None = None, kind: SourceKind = "folder") -> Source:
    """The checkpoint in a folder: config.json with Safetensors, or a single GGUF file.

    Raises:
        CheckpointError: it is incomplete, has its weights only as pickles, or needs remote code.
    """
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file():
        if len(ggufs) == 1:
            return gguf_source(ggufs[0], name=name)
        if ggufs:
            names = ", ".join(path.name for path in ggufs)
            raise CheckpointError(f"{folder} has {len(ggufs)} GGUF files ({names}); name one of them as the source.")
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no config.json. Expected a folder with config.json and "
            "model.safetensors, as save_pretrained writes it, or a single .gguf file."
        )
    _refuse_remote_code(folder)
    return Source(name or folder.resolve().name, kind, folder, None, safetensors_files(folder))


def gguf_source(path: Path, *, name: str | None = None, kind: SourceKind = "gguf") -> Source:
    """The checkpoint in a GGUF file.

    Raises:
        CheckpointError: it is not GGUF, or truncated.
    """
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is a file of weights alone; name its folder, which has config.json too.")
    check_gguf(path)
    return Source(name or path.name, kind, path.parent, path.name, (path,))


def _refuse_remote_code(folder: Path) -> None:
    """Refuse a checkpoint whose model or tokenizer is Python code that comes with it.

    An `auto_map` beside an architecture that transformers knows is harmless: transformers' own code is used.
    """
    config_path = folder / "config.json"
    config = read_json(config_path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{config_path} names no 'model_type'; expected one that transformers knows, as 'llama'.")
    if "auto_map" in config:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if model_type not in CONFIG_MAPPING_NAMES:
            raise CheckpointError(
                f"{config_path}: the model type {model_type!r} needs remote code ('auto_map'), and paceline runs no "
                "code that comes with a checkpoint. Use a checkpoint of an architecture that transformers has, or a "
                "release of transformers that has this one."
            )
    tokenizer_config = folder / "tokenizer_config.json"
    if (
        tokenizer_config.is_file()
        and not (folder / "tokenizer.json").is_file()
        and "auto_map" in read_json(tokenizer_config)
    ):
        raise CheckpointError(
            f"{folder}: its tokenizer needs remote code ('auto_map' in tokenizer_config.json, and no tokenizer.json), "
            "and paceline runs no code that comes with a checkpoint. Save the tokenizer as tokenizer.json first."
        )
