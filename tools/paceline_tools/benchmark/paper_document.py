"""The JSON document of the paper's table: a benchmark's measurements for each part of it, and every answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bundle import build_dataclass
from paceline.errors import BundleError, InvalidInputError

from .document import Document, body_of, document_of, read_json

__all__ = ["FORMAT", "VERSION", "Answer", "PaperDocument", "Part"]

FORMAT = "paceline bench --paper"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, by `Measurement`'s indices of prompt, method and repeat, and what it is worth.

    Attributes:
        prompt: its index in the part.
        method: its index in the part.
        repeat: from 0.
        text: what was written.
        score: 0 to 1; None where it was not judged.
        outcome: of a program `passed`, `timed out` or `failed: …`; of a summary `judged`; why there is no score.
    """

    prompt: int
    method: int
    repeat: int
    text: str
    score: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark of the run.

    Attributes:
        task: `humaneval` or `summaries`.
        stage: `table`, or `curves`, whose answers are not judged.
        metric: what scores are, on average.
        settings: sampling, limits.
        document: methods, prompts and measurements.
        answers: of the table.
    """

    task: str
    stage: str
    metric: str
    settings: Mapping[str, Any]
    document: Document
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class PaperDocument:
    """Everything that was measured, and all answers. `run` is a benchmark's, with the settings of all parts."""

    run: Mapping[str, Any]
    parts: tuple[Part, ...]

    @property
    def complete(self) -> bool:
        """Whether it ran to its end."""
        return bool(self.run.get("complete"))

    def to_json(self, summary: Mapping[str, Any]) -> str:
        """Serialise, with the figures; a line for each text."""
        head = {"format": FORMAT, "version": VERSION, "run": self.run, "summary": summary}
        parts = ",\n".join(_part_json(part) for part in self.parts)
        return f'{json.dumps(head, indent=1)[:-2]},\n "parts": [\n{parts}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> PaperDocument:
        """Read a document that `--json` wrote. Its figures are left: they are computed anew.

        Raises:
            InvalidInputError: it cannot be read, is damaged or of another format.
        """
        data = read_json(path, FORMAT, VERSION)
        try:
            found = data.get("parts")
            if not isinstance(found, list) or not isinstance(data.get("run"), dict):
                raise BundleError("run should be an object, and parts a list")
            parts = tuple(_part_of(one, data["run"], f"parts[{index}]") for index, one in enumerate(found))
        except BundleError as error:
            raise InvalidInputError(f"{path} is damaged: {str(error).rstrip('.')}.") from error
        return cls(data["run"], parts)


def _part_json(part: Part) -> str:
    fields = {"task": part.task, "stage": part.stage, "metric": part.metric, "settings": part.settings}
    answers = ",\n  ".join(json.dumps(asdict(one)) for one in part.answers)
    body = body_of(part.document)
    return f'{json.dumps(fields, indent=1)[:-2]},\n "answers": [\n  {answers}\n ],\n{body}\n}}'


def _part_of(data: Any, run: Mapping[str, Any], where: str) -> Part:
    if not isinstance(data, dict):
        raise BundleError(f"{where} should be an object")
    for name, kind in (("task", str), ("stage", str), ("metric", str), ("settings", dict), ("answers", list)):
        if not isinstance(data.get(name), kind):
            raise BundleError(f"{where}.{name} should be of type {kind.__name__}, got {data.get(name)!r:.60}")
    settings = {**run.get("settings", {}), **data["settings"]}
    document = document_of(data, {**run, "settings": settings})
    answers = tuple(
        build_dataclass(Answer, one, f"{where}.answers[{index}]") for index, one in enumerate(data["answers"])
    )
    for index, one in enumerate(answers):
        if not 0 <= one.prompt < len(document.prompts) or not 0 <= one.method < len(document.methods):
            raise BundleError(f"{where}.answers[{index}] is of a prompt or method that is not there")
        if one.score is not None and not 0 <= one.score <= 1:
            raise BundleError(f"{where}.answers[{index}].score should lie from 0 to 1, got {one.score!r}")
    return Part(data["task"], data["stage"], data["metric"], data["settings"], document, answers)
