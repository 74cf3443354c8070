"""The command line's options for `SamplingParams`, shared by the commands that sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["sampling_options"]


def sampling_options(*, temperature: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one option for each field of `SamplingParams` but the seed, named like the field.

    A command takes them as keyword arguments and hands them on: `SamplingParams(**knobs, seed=seed)`.
    """
    options = [
        click.option(
            "--temperature", type=float, default=temperature, show_default=True, help="0 takes the most probable token."
        ),
        click.option(
            "--top-k", type=int, default=0, show_default=True, help="Keep the most probable tokens; 0 keeps all."
        ),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Keep this much probability; 1 keeps all."
        ),
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
