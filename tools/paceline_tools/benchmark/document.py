"""The JSON document of a benchmark. `models/benchmark.md` explains its fields."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.bundle import build_dataclass
from paceline.errors import BundleError, InvalidInputError

from .crowds import Crowd
from .measurement import Failure, Measurement
from .methods import Method

__all__ = [
    "FORMAT",
    "VERSION",
    "Document",
    "Failure",
    "MeasuredPrompt",
    "SkippedPrompt",
    "body_of",
    "document_of",
    "read_json",
]

FORMAT = "paceline bench"
VERSION = 1
_T = TypeVar("_T")
# From here on, a figure in a document is damage: a century, and as many tokens as a 32-bit number counts.
_LONGEST_S = 3.2e9
_MOST_TOKENS = 2**31
# What figures, tables and pages take from a document's run.
_RUN = {
    "paceline": str,
    "command": list,
    "started": str,
    "seconds": float,
    "complete": bool,
    "machine": {"cpu": str, "cores": int, "system": str, "python": str, "packages": dict},
    "bundle": {"manifest_sha256": str, "target": {"source": str, "precision": str}},
    "settings": {"repeats": int, "max_new_tokens": int},
    "load_s": float,
    "peak_bytes": int,
    "target_bytes": int,
}


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """A prompt of the benchmark, without its text. `tokens` is the length of the prompt."""

    name: str
    category: str
    tokens: int


@dataclass(frozen=True, slots=True)
class SkippedPrompt:
    """A prompt that was left out, and why."""

    name: str
    category: str
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Document:
    """Everything that a benchmark measured; all figures are computed from this.

    Attributes:
        run: command, times, machine, bundle and settings.
        methods: what was compared.
        prompts: what was continued.
        skipped: what was left out.
        measurements: one for each text, in the order in which they were written.
        failures: of peers, at most one of each method: from there on it was left out.
        crowds: texts that were written several at once.
    """

    run: Mapping[str, Any]
    methods: tuple[Method, ...]
    prompts: tuple[MeasuredPrompt, ...]
    skipped: tuple[SkippedPrompt, ...]
    measurements: tuple[Measurement, ...]
    failures: tuple[Failure, ...] = ()
    crowds: tuple[Crowd, ...] = ()

    @property
    def samplings(self) -> list[str]:
        """The kinds of sampling, in the order of the methods."""
        return list(dict.fromkeys(method.sampling for method in self.methods))

    @property
    def categories(self) -> list[str]:
        """The categories of prompts, in their order."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))

    @property
    def complete(self) -> bool:
        """Whether the benchmark ran to its end."""
        return bool(self.run.get("complete"))

    def to_json(self, summary: Mapping[str, Any]) -> str:
        """Serialise, with the figures; a line for each text."""
        head = {"format": FORMAT, "version": VERSION, "run": self.run, "summary": summary}
        return f"{json.dumps(head, indent=1)[:-2]},\n{body_of(self)}\n}}\n"

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read a document that `paceline bench --json` wrote. Its figures are left: they are computed anew.

        Raises:
            InvalidInputError: it cannot be read, is damaged or of another format.
        """
        data = read_json(path, FORMAT, VERSION)
        try:
            return document_of(data, data.get("run"))
        except BundleError as error:
            raise InvalidInputError(f"{path} is damaged: {str(error).rstrip('.')}.") from error

    def _check(self) -> None:
        if not 0 <= self.run["seconds"] < _LONGEST_S:
            raise BundleError(f"run.seconds should be a time, got {self.run['seconds']!r:.60}")
        if not isinstance(self.run.get("peers", {}), dict):
            raise BundleError(f"run.peers should be of type dict, got {self.run['peers']!r:.60}")
        speed = self.run.get("read_bytes_per_s")
        if speed is not None and (type(speed) not in (int, float) or not 0 < speed < math.inf):
            raise BundleError(f"run.read_bytes_per_s should be a number above 0, or null, got {speed!r:.60}")
        for index, one in enumerate(self.measurements):
            lengths = {len(steps) for steps in (one.steps_s, one.steps_tokens, one.steps_proposed, one.steps_accepted)}
            if len(lengths) != 1 or not one.steps_s:
                raise BundleError(f"measurements[{index}] has no steps, or of different numbers")
            times = (*one.steps_s, one.prefill_s, one.decode_s, one.target_s, one.draft_s)
            if not all(0 <= time < _LONGEST_S for time in times):
                raise BundleError(f"measurements[{index}] has a time that is none")
            numbers = (*one.steps_tokens, *one.steps_proposed, *one.steps_accepted)
            if min(numbers) < 0 or max(numbers) >= _MOST_TOKENS:
                raise BundleError(f"measurements[{index}] has a number of tokens that is none")
            if not 0 <= one.prompt < len(self.prompts) or not 0 <= one.method < len(self.methods):
                raise BundleError(f"measurements[{index}] is of a prompt or method that is not there")
        for index, crowd in enumerate(self.crowds):
            self._check_crowd(crowd, f"crowds[{index}]")

    def _check_crowd(self, crowd: Crowd, where: str) -> None:
        if not crowd.prompts or len({*map(len, (crowd.prompts, crowd.steps_s, crowd.steps_tokens))}) != 1:
            raise BundleError(f"{where} has no texts, or different numbers")
        for seconds, tokens in zip(crowd.steps_s, crowd.steps_tokens, strict=True):
            if not seconds or len(seconds) != len(tokens):
                raise BundleError(f"{where} has a text without steps, or with different numbers")
            if min(tokens) < 0 or max(tokens) >= _MOST_TOKENS:
                raise BundleError(f"{where} has a number of tokens that is none")
            if not all(0 <= time < _LONGEST_S for time in seconds):
                raise BundleError(f"{where} has a time that is none")
        if not 0 < crowd.wall_s < _LONGEST_S or not crowd.new_tokens:
            raise BundleError(f"{where} took no time, or has no tokens")
        if not 0 <= crowd.method < len(self.methods) or not all(0 <= p < len(self.prompts) for p in crowd.prompts):
            raise BundleError(f"{where} is of a prompt or method that is not there")


def body_of(document: Document) -> str:
    """Fields of a JSON object: all of a document but its run; a line for each text."""
    lists: dict[str, Sequence[Any]] = {
        "methods": document.methods,
        "prompts": document.prompts,
        "skipped": document.skipped,
        "failures": document.failures,
    }
    fields = json.dumps({name: [asdict(one) for one in found] for name, found in lists.items()}, indent=1)[2:-2]
    lines = ",\n  ".join(json.dumps(asdict(one)) for one in document.measurements)
    crowds = ",\n  ".join(json.dumps(asdict(one)) for one in document.crowds)
    return f'{fields},\n "measurements": [\n  {lines}\n ],\n "crowds": [\n  {crowds}\n ]'


def document_of(data: Mapping[str, Any], run: Any) -> Document:
    """The document that `body_of` wrote, with its run.

    Raises:
        BundleError: it is damaged.
    """
    document = Document(
        _checked(run, _RUN, "run"),
        _list(Method, data, "methods"),
        _list(MeasuredPrompt, data, "prompts"),
        _list(SkippedPrompt, data, "skipped"),
        _list(Measurement, data, "measurements"),
        _list(Failure, data, "failures"),
        _list(Crowd, {"crowds": [], **data}, "crowds"),
    )
    document._check()
    return document


def read_json(path: Path, expected: str, version: int) -> dict[str, Any]:
    """A JSON object of a format and version.

    Raises:
        InvalidInputError: it cannot be read, or is something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is no JSON document: {str(error).rstrip('.')}.") from error
    if not isinstance(data, dict) or data.get("format") != expected:
        known = isinstance(data, dict) and str(data.get("format", "")).startswith("paceline bench")
        also = f"; it is one of `{data['format']} --json`" if known else ""
        raise InvalidInputError(f"{path} is not a document of `{expected} --json`{also}.")
    if data.get("version") != version:
        raise InvalidInputError(
            f"{path} has version {data.get('version')!r} of the format, and this paceline reads {version}; measure "
            "again."
        )
    return data


def _checked(value: Any, expected: Any, where: str) -> Any:
    """`value`, if it is of the type that `expected` says, or an object with at least these fields."""
    kind = dict if isinstance(expected, dict) else expected
    if kind is float and type(value) is int:  # as other writers of JSON write whole numbers
        return value
    if type(value) is not kind:
        raise BundleError(f"{where} should be of type {kind.__name__}, got {value!r:.60}")
    for name, inner in expected.items() if isinstance(expected, dict) else ():
        _checked(value.get(name), inner, f"{where}.{name}")
    return value


def _list(cls: type[_T], data: Mapping[str, Any], name: str) -> tuple[_T, ...]:
    items = data.get(name)
    if not isinstance(items, list):
        raise BundleError(f"{name} should be a list")
    return tuple(build_dataclass(cls, item, f"{name}[{index}]") for index, item in enumerate(items))
