"""Types of the options of `paceline bench`: lists of numbers with commas between them."""

from __future__ import annotations

from typing import Any

import click

from paceline_tools.arguments import DraftTokens

__all__ = ["CountList", "Curve", "DraftTokensList"]

_MOST_AT_ONCE = 1024


class DraftTokensList(click.ParamType[tuple[int | str, ...]]):
    """Numbers of tokens to draft, or auto, with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | str, ...]:
        """Check each of them."""
        one = DraftTokens(least=1)
        return tuple(one.convert(part.strip(), param, ctx) for part in str(value).split(","))


class CountList(click.ParamType[tuple[int, ...]]):
    """Numbers of texts at once, with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Check each of them."""
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = (0,)
        if not 1 <= min(found) <= max(found) <= _MOST_AT_ONCE:
            self.fail(f"got {value!r}; numbers from 1 to {_MOST_AT_ONCE} are expected, such as 1,4.", param, ctx)
        return tuple(dict.fromkeys(found))


class Curve(click.ParamType[tuple[int, ...]]):
    """Numbers of drafted tokens with commas between them, or none."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Check each of them."""
        if value == "none":
            return ()
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1 or len(set(found)) < len(found):
            self.fail(f"got {value!r}; none, or different numbers of at least 1 are expected, as in 1,2,4.", param, ctx)
        return found
