"""Types of arguments that several commands take."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import click

from paceline.bundle import MANIFEST_NAME
from paceline.providers import PROVIDERS

__all__ = [
    "CACHE_DIR",
    "CAPABILITIES",
    "DRAFT_TOKENS",
    "DRAFT_VOCAB",
    "FOLDER",
    "NUMBERS",
    "OUTPUT_FILE",
    "PROFILE",
    "PROVIDER",
    "SIZE",
    "SOURCE",
    "THREADS",
    "DraftTokens",
    "DraftVocab",
    "NumberRange",
    "check_text",
    "engines_option",
    "folder_name",
    "own_layers",
    "profile_option",
    "provider_option",
    "raw_option",
    "threads_option",
]


class FilledText(click.types.StringParamType):
    """Text that is not empty, in UTF-8: it comes to stand in files of JSON."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the text."""
        text = str(value)
        if not text.strip():
            self.fail(
                f"got {text!r}; the name or path of a source is expected, such as a recipe's or a folder's.", param, ctx
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self.fail(f"{text!r} is not valid UTF-8 at character {error.start}.", param, ctx)
        return text


class FilledPath(click.Path):
    """A path that is not empty: `Path("")` would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the path."""
        if not os.fspath(value):
            self.fail("got an empty text where a path is expected; the current folder is written as a dot.", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilledPath):
    """A file that can be written, so that long work does not end in a refusal; links are followed.

    A bundle holds what the export wrote: nothing is written among its files, nor over one.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Check the path by writing a file beside it, which is removed again."""
        path = Path(os.path.realpath(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}; make it first.", param, ctx)
        if path.exists() and not path.is_file():
            self.fail(f"{value} is not a regular file, so it is not replaced; name a file.", param, ctx)
        if (bundle := next((one for one in path.parents if (one / MANIFEST_NAME).exists()), None)) is not None:
            self.fail(
                f"{value} lies in the bundle {bundle}, which holds what the export wrote; name another place.",
                param,
                ctx,
            )
        trial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        try:
            trial.touch()
            trial.unlink()
        except OSError as error:
            self.fail(f"{value} cannot be written ({error.strerror}); choose another place.", param, ctx)
        return path


class DraftTokens(click.ParamType[int | str]):
    """A number of tokens to draft per round, or auto."""

    name = "number"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Check the number."""
        if value == "auto":
            return "auto"
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < self._least:
            self.fail(f"got {value!r}; auto or a number of at least {self._least} is expected.", param, ctx)
        return number


class DraftVocab(click.ParamType[int]):
    """A number of ids, or full, which is 0."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Check the number."""
        try:
            number = 0 if value == "full" else int(value)
        except ValueError:
            number = -1
        if number < 0 or (number == 0 and value != "full"):
            self.fail(f"got {value!r}; full or a number of ids of at least 1 is expected.", param, ctx)
        return number


class NumberRange(click.FloatRange):
    """A range that holds numbers only: NaN lies below no bound and above none, so click lets it through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Check the number."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"got {value!r}; a number is expected.", param, ctx)
        return number


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Check the numbers."""
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            numbers = (math.nan,)
        if not all(map(math.isfinite, numbers)):
            self.fail(f"got {value!r}; numbers with commas between them are expected, such as 1,1.2,1.45.", param, ctx)
        return numbers


class Capabilities(click.ParamType[tuple[str, ...]]):
    """Compute capabilities with commas between them."""

    name = "capabilities"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Check the capabilities."""
        found = tuple(str(value).split(","))
        if not all(re.fullmatch(r"\d{1,2}\.\d", part) for part in found) or len(set(found)) < len(found):
            self.fail(
                f"got {value!r}; different compute capabilities with commas between them are expected, such as "
                "8.6,8.9.",
                param,
                ctx,
            )
        return found


class Profile(click.ParamType[tuple[str, str, tuple[int, int, int]]]):
    """A profile of an engine: model, name, and numbers of rows."""

    name = "profile"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str, tuple[int, int, int]]:
        """Check the profile."""
        found = re.fullmatch(r"(target|draft):([a-z0-9_-]+)=(\d{1,9}),(\d{1,9}),(\d{1,9})", str(value))
        if found is None:
            self.fail(
                f"got {value!r}; MODEL:NAME=LEAST,USUAL,MOST is expected, such as target:verify=1,5,9: target or "
                "draft, a name in small letters, and numbers of rows.",
                param,
                ctx,
            )
        return found[1], found[2], (int(found[3]), int(found[4]), int(found[5]))


class Size(click.ParamType[int]):
    """A number of bytes, with a unit or without."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Check the size."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).lower())
        units = {unit.lower(): count for unit, count in _UNITS.items()}
        count = round(float(found[1]) * units.get(found[2] or "b", 0)) if found else 0
        if count < 1:
            self.fail(
                f"got {value!r}; a size such as 512MB or 2GB is expected, in {', '.join(_UNITS)} or bytes.", param, ctx
            )
        return count


_UNITS = {"B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CAPABILITIES = Capabilities()
PROFILE = Profile()
SIZE = Size()
FOLDER = FilledPath(file_okay=False, readable=False, path_type=Path)
CACHE_DIR = FilledPath(file_okay=False, path_type=Path)
OUTPUT_FILE = OutputFile(dir_okay=False, path_type=Path)
SOURCE = FilledText()
DRAFT_TOKENS = DraftTokens()
NUMBERS = Numbers()
DRAFT_VOCAB = DraftVocab()
# ONNX Runtime starts any number of threads, which spin when they are idle: with 4096, two cores gave no token in 100 s.
THREADS = click.IntRange(1, 1024)
PROVIDER = click.Choice(list(PROVIDERS))

provider_option = click.option(
    "--provider",
    type=PROVIDER,
    default="cpu",
    show_default=True,
    help="What runs the models; `paceline doctor` says which start here.",
)
engines_option = click.option(
    "--engines",
    "engine_folder",
    metavar="DIR",
    type=FOLDER,
    help="Engines that `paceline build -o DIR` made.  [default: those in the bundle]",
)
raw_option = click.option(
    "--raw", is_flag=True, help="Continue the prompts as they are, without the bundle's chat template."
)
threads_option = click.option(
    "--threads", metavar="N", type=THREADS, help="Threads that run the models.  [default: one per core it may use]"
)
profile_option = click.option(
    "--profile",
    metavar="FILE|auto|none",
    default="auto",
    show_default=True,
    help="Costs that auto plans by: a file of `paceline tune`, the one that it stored for this setup, or none.",
)


def own_layers(draft: str | None) -> int | None:
    """N of a draft `self:N`, which is no source of its own."""
    if draft is None or not draft.startswith("self:"):
        return None
    count = draft.removeprefix("self:")
    if not (count.isascii() and count.isdecimal()) or not count.strip("0"):
        raise click.UsageError(f"--draft {draft}: a number of layers of at least 1 is expected, such as self:8.")
    return int(count) if len(count) <= 9 else 10**9  # no model has so many


def check_text(option: str, text: str) -> None:
    """Refuse bytes of the command line that are no characters; Python carries them as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{option} is not valid UTF-8 at character {error.start}.") from error


def folder_name(folder: Path) -> str:
    """A folder's name as the user wrote it, a link's its own; that of what it leads to where the path ends in none."""
    return folder.name if folder.name not in ("", "..") else folder.resolve().name
