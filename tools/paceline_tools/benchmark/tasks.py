"""The tasks of the paper's Table 1: what is asked, how it is sampled, and how an answer is judged."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from paceline.errors import InstallationError, InvalidInputError

from .prompts import Prompt, human_eval_prompts, human_eval_rows, spread, summary_prompts, summary_rows, unique
from .rows import Row
from .solutions import PASSED, Problem, run_program

__all__ = ["TASKS", "Judgement", "Task", "read_task"]

# The text of a chat ends where its block of code ends, a base model's where the function does, as in Codex' paper.
_END_OF_BLOCK = ("\n```\n",)
_END_OF_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_CODE_CANNOT_RUN = "without --run-generated-code"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an answer is worth: 0 to 1, or None where it was not judged; and why, in words."""

    score: float | None
    outcome: str


@dataclass(frozen=True, slots=True)
class Task:
    """A task, with its prompts and what judges their answers.

    Attributes:
        name: of `TASKS`.
        metric: what scores are, on average.
        temperature: of the nucleus rows, as in the paper.
        top_p: the same.
        max_new_tokens: the paper's.
        stop: strings that end a text.
        prompts: what is asked.
        judges: by a prompt's name, what judges an answer.
    """

    name: str
    metric: str
    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    judges: Mapping[str, Callable[[str], Judgement]]


def read_task(source: str, *, raw: bool, limit: int | None, count: int | None, run_code: bool) -> Task:
    """A task of `TASKS`, alone or with a colon and a file.

    Args:
        source: as in `--prompts`.
        raw: answers go on where the prompts end.
        limit: look at so many prompts at the beginning; None looks at all.
        count: take so many of these, evenly spread; None takes all.
        run_code: whether programs that a model wrote may run; else they are not judged.

    Raises:
        InvalidInputError: no task, or a file that is none.
        InstallationError: what brings or judges it is missing.
    """
    name, _, file = source.partition(":")
    if name not in TASKS:
        raise InvalidInputError(
            f"--paper measures {' and '.join(TASKS)}, with a colon and a file where you have one; --prompts {source} "
            "is neither."
        )

    def choose(pairs: Sequence[tuple[Prompt, Row]]) -> list[tuple[Prompt, Row]]:
        chosen = spread(list(pairs)[:limit], count)
        return list(zip(unique(prompt for prompt, _ in chosen), (row for _, row in chosen), strict=True))

    return TASKS[name](Path(file) if file else None, raw, run_code, choose)


_Choose = Callable[[Sequence[tuple[Prompt, Row]]], list[tuple[Prompt, Row]]]


def _human_eval(path: Path | None, raw: bool, run_code: bool, choose: _Choose) -> Task:
    rows = human_eval_rows(path)
    chosen = choose(list(zip(human_eval_prompts(rows, raw), rows, strict=True)))

    def judge(problem: Problem) -> Callable[[str], Judgement]:
        def judged(answer: str) -> Judgement:
            if not run_code:
                return Judgement(None, _CODE_CANNOT_RUN)
            outcome = run_program(problem.program(answer, raw=raw)).outcome
            return Judgement(float(outcome == PASSED), outcome)

        return judged

    return Task(
        "humaneval",
        "pass@1",
        0.8,
        0.95,
        512,
        _END_OF_FUNCTION if raw else _END_OF_BLOCK,
        tuple(prompt for prompt, _ in chosen),
        {
            prompt.name: judge(Problem(row.text("prompt"), row.text("entry_point"), row.text("test")))
            for prompt, row in chosen
        },
    )


def _summaries(path: Path | None, raw: bool, run_code: bool, choose: _Choose) -> Task:
    if importlib.util.find_spec("rouge_score") is None:
        raise InstallationError(
            "ROUGE-2 of summaries comes with the package rouge-score, which is not installed: pip install "
            "'paceline[paper]'; or leave the summaries out."
        )
    from rouge_score.rouge_scorer import RougeScorer

    rows = summary_rows(path)
    chosen = choose(list(zip(summary_prompts(rows, raw), rows, strict=True)))
    scorer = RougeScorer(["rouge2"], use_stemmer=True)

    def judge(references: list[str]) -> Callable[[str], Judgement]:
        return lambda answer: Judgement(scorer.score_multi(references, answer)["rouge2"].fmeasure, "judged")

    return Task(
        "summaries",
        "ROUGE-2",
        1.0,
        0.8,
        128,
        ("\n\n",) if raw else (),
        tuple(prompt for prompt, _ in chosen),
        {prompt.name: judge(_references(row)) for prompt, row in chosen},
    )


def _references(row: Row) -> list[str]:
    found = row.fields.get("reference")
    if isinstance(found, list) and found and all(isinstance(one, str) and one.strip() for one in found):
        return [row.checked("reference", one) for one in found]
    if isinstance(found, str):
        return [row.text("reference")]
    raise InvalidInputError(f"{row.where}: 'reference' should be a summary, or a list of some, got {found!r:.60}.")


# In the paper's order but for XSum, whose place a file of the user's takes.
TASKS: Mapping[str, Callable[[Path | None, bool, bool, _Choose], Task]] = MappingProxyType(
    {"humaneval": _human_eval, "summaries": _summaries}
)
