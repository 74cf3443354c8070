"""The command line's options for `paceline bench --paper`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from paceline_tools.arguments import OUTPUT_FILE

from .option_types import Curve

__all__ = ["paper_arguments", "paper_options", "refuse_paper_options"]

_ONLY_PAPER = ("curve", "curve_prompts", "run_code", "markdown_file")
_TAKEN = (
    *("folder", "paper", "json_file", "from_file", "prompts", "limit", "per_category", "raw", "draft_tokens"),
    *("drafters", "rules", "seed", "no_seed", "max_new_tokens", "repeats", "provider", "threads", "profile"),
    "engine_folder",
    *_ONLY_PAPER,
)


def paper_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options."""
    for option in reversed(
        (
            click.option(
                "--paper",
                is_flag=True,
                help="Measure Table 1 of arXiv 2302.01318: plain (ArS) and speculative (SpS) decoding, nucleus and "
                "greedy, on humaneval and on summaries:FILE, with the quality of the texts.",
            ),
            click.option(
                "--run-generated-code",
                "run_code",
                is_flag=True,
                help="With --paper: the programs that the model writes may run, shut in, to know which are right.",
            ),
            click.option(
                "--curve",
                metavar="K,…|none",
                type=Curve(),
                default="1,2,3,4,6,8",
                show_default=True,
                help="With --paper: numbers of drafted tokens of Figure 1's curves.",
            ),
            click.option(
                "--curve-prompts",
                metavar="N",
                type=click.IntRange(min=1),
                default=6,
                show_default=True,
                help="With --paper: prompts of each task that curves are measured on.",
            ),
            click.option(
                "--markdown",
                "markdown_file",
                type=OUTPUT_FILE,
                help="With --paper: write the tables as a page of Markdown, too.",
            ),
        )
    ):
        command = option(command)
    return command


def paper_arguments(given: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `run_paper`, from the options of `paceline bench` and those that were given.

    Raises:
        UsageError: an option that the paper's table does not have.
    """
    for name, option in given.items():
        if name not in _TAKEN:
            raise click.UsageError(f"--paper samples as the paper did and measures paceline alone; leave {option} out.")
    found = {name: options[name] for name in _TAKEN if name in options and name not in ("paper", "no_seed")}
    if "prompts" not in given:
        found["prompts"] = ("humaneval",)
    if "repeats" not in given:
        found["repeats"] = 1
    if "max_new_tokens" not in given:
        found["max_new_tokens"] = None
    found["seed"] = None if options["no_seed"] else options["seed"]
    return found


def refuse_paper_options(given: Mapping[str, str]) -> None:
    """Refuse options that mean something with `--paper` alone.

    Raises:
        UsageError: one was given.
    """
    for name in _ONLY_PAPER:
        if name in given:
            raise click.UsageError(f"{given[name]} is for --paper.")
