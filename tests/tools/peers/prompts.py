"""The prompts that engines are measured on: code, Spec-Bench's categories, and edits of code."""

from __future__ import annotations

import ast
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CODE", "RETRIEVAL", "Prompt", "edits", "human_eval", "spec_bench"]

# The problems behind these stay unseen.
_OPEN_PROBLEMS = 82
HUMAN_EVAL, EDIT = "humaneval", "edit"
CODE = frozenset({HUMAN_EVAL, "coding"})
RETRIEVAL = frozenset({"summarization", "rag", EDIT})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message. Categories are Spec-Bench's, and `humaneval` and `edit`."""

    name: str
    category: str
    text: str


def human_eval(path: Path, count: int) -> list[Prompt]:
    """`count` of HumanEval's first 82 problems, evenly spread, each as a message that asks for the function."""
    return [
        Prompt(row["task_id"], HUMAN_EVAL, f"Complete this Python function.\n\n```python\n{row['prompt']}```")
        for row in _spread(list(_rows(path))[:_OPEN_PROBLEMS], count)
    ]


def edits(path: Path, count: int) -> list[Prompt]:
    """Small changes of the solutions of HumanEval's first 82 problems, by turns a new name and type hints."""
    prompts = []
    for index, row in enumerate(_spread(list(_rows(path))[:_OPEN_PROBLEMS], count)):
        code = row["prompt"] + row["canonical_solution"]
        if index % 2 == 0:
            wish = f"Rename the parameter `{_first_parameter(code, row['entry_point'])}` to `given` everywhere in"
        else:
            wish = "Add type hints to the parameters, to the result and to all local variables of"
        text = f"{wish} this Python function. Answer with the whole function.\n\n```python\n{code}```"
        prompts.append(Prompt(f"edit of {row['task_id']}", EDIT, text))
    return prompts


def spec_bench(path: Path, per_category: int) -> list[Prompt]:
    """The first turns of `per_category` prompts of each category of a file in Spec-Bench's format, evenly spread."""
    categories: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _rows(path):
        categories[row["category"]].append(row)
    return [
        Prompt(f"{category} {row['question_id']}", category, row["turns"][0])
        for category, rows in categories.items()
        for row in _spread(rows, per_category)
    ]


def _spread(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    for line in content.decode("utf-8").split("\n"):
        if line.strip():
            yield json.loads(line)


def _first_parameter(code: str, function: str) -> str:
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node.args.args[0].arg
    raise ValueError(f"There is no function {function} in:\n{code}")
