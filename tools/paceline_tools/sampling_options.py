"""The command line's options for `SamplingParams`, shared by the commands that sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from paceline.decoder import DEFAULT_VERIFICATION
from paceline.verify import VERIFICATION_RULES

__all__ = ["sampling_options", "verification_option"]

verification_option = click.option(
    "--verification",
    type=click.Choice(list(VERIFICATION_RULES)),
    default=DEFAULT_VERIFICATION,
    show_default=True,
    help="The rule by which drafted tokens stand; each keeps the target's law.",
)


class _Bias(click.ParamType[tuple[int, float]]):
    """A token id and what is added to its logit."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Split `ID:NUMBER`."""
        token_id, _, bias = str(value).partition(":")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"got {value!r}; a token id and a number are expected, such as 151643:-2.5.", param, ctx)


def sampling_options(*, temperature: float | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add one option for each field of `SamplingParams` but the seed; None leaves out the temperature, too.

    A command takes them as keyword arguments and hands them on: `SamplingParams(**knobs, seed=seed)`.
    """

    def number(name: str, default: float, text: str) -> Callable[..., Any]:
        return click.option(name, type=type(default), default=default, show_default=True, help=text)

    def token_ids(name: str, field: str, text: str) -> Callable[..., Any]:
        return click.option(name, field, metavar="ID", type=int, multiple=True, help=f"{text} May be repeated.")

    options = [
        *([] if temperature is None else [number("--temperature", temperature, "0 takes the most probable token.")]),
        number("--top-k", 0, "Keep the most probable tokens; 0 keeps all."),
        number("--top-p", 1.0, "Keep this much probability; 1 keeps all."),
        number("--min-p", 0.0, "Keep tokens this probable, relative to the most probable one; 0 keeps all."),
        number("--typical-p", 1.0, "Keep this much probability of the least surprising tokens; 1 keeps all."),
        number("--repetition-penalty", 1.0, "Divides logits of ids in prompt and new text; 1 changes nothing."),
        number("--presence-penalty", 0.0, "Subtracted from logits of ids in the new text."),
        number("--frequency-penalty", 0.0, "The same, once for each time an id occurs."),
        number("--no-repeat-ngram-size", 0, "No so many ids in a row twice; 0 allows all."),
        click.option(
            "--logit-bias",
            metavar="ID:NUMBER",
            type=_Bias(),
            multiple=True,
            help="Add a number to a token's logit. May be repeated.",
        ),
        token_ids("--ban-token-id", "banned_token_ids", "An id that is never emitted."),
        token_ids("--force-token-id", "forced_token_ids", "An id that the new text begins with, in this order."),
        number("--min-new-tokens", 0, "No end of the text before so many new tokens."),
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
