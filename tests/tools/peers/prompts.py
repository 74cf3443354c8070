"""The prompts that engines are measured on: code, Spec-Bench's categories, and edits of code."""

from __future__ import annotations

import ast
from pathlib import Path

from paceline_tools.benchmark.prompts import Prompt, read_prompts, spread
from paceline_tools.benchmark.prompts import human_eval as all_problems
from paceline_tools.benchmark.rows import rows_of

__all__ = ["CODE", "RETRIEVAL", "Prompt", "edits", "human_eval", "spec_bench"]

# The problems behind these stay unseen.
_OPEN_PROBLEMS = 82
HUMAN_EVAL, EDIT = "humaneval", "edit"
CODE = frozenset({HUMAN_EVAL, "coding"})
RETRIEVAL = frozenset({"summarization", "rag", EDIT})


def human_eval(path: Path, count: int) -> list[Prompt]:
    """`count` of HumanEval's first 82 problems, evenly spread, each as a message that asks for the function."""
    return spread(all_problems(path)[:_OPEN_PROBLEMS], count)


def edits(path: Path, count: int) -> list[Prompt]:
    """Small changes of the solutions of HumanEval's first 82 problems, by turns a new name and type hints."""
    prompts = []
    for index, row in enumerate(spread(rows_of(str(path))[:_OPEN_PROBLEMS], count)):
        code = row.text("prompt") + row.text("canonical_solution")
        if index % 2 == 0:
            wish = f"Rename the parameter `{_first_parameter(code, row.text('entry_point'))}` to `given` everywhere in"
        else:
            wish = "Add type hints to the parameters, to the result and to all local variables of"
        text = f"{wish} this Python function. Answer with the whole function.\n\n```python\n{code}```"
        prompts.append(Prompt(f"edit of {row.text('task_id')}", EDIT, text))
    return prompts


def spec_bench(path: Path, per_category: int) -> list[Prompt]:
    """The first turns of `per_category` prompts of each category of a file in Spec-Bench's format, evenly spread."""
    return read_prompts(f"spec-bench:{path}", raw=False, per_category=per_category)


def _first_parameter(code: str, function: str) -> str:
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node.args.args[0].arg
    raise ValueError(f"There is no function {function} in:\n{code}")
