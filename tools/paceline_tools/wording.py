"""The library's messages in the command line's words: `max_length=9 exceeds …` becomes `--max-length 9 exceeds …`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

__all__ = ["in_options"]

# What the library calls otherwise than the commands do, by the name that click gives to the option.
_SAME = {
    "engines": "engine_folder",
    "draft_sampling": "draft_temperature",
    "num_draft_tokens": "draft_tokens",
    "prefix_cache_bytes": "prefix_cache",
    "profile_rows": "profiles",
    "stop_token_ids": "stop_token_id",
}


def in_options(text: str, parameters: Iterable[click.Parameter]) -> str:
    """A message about arguments of a function as one about options of a command.

    A name stands for an option where it is followed by `=` and a value, where it begins the message (`out must be …`),
    and wherever it has an underscore, which no word of a sentence has. Names within paths or quotes are left alone.

    Args:
        text: what the library says.
        parameters: of the command that was called.
    """
    options = {
        str(one.name): max(one.opts, key=len)
        for one in parameters
        if isinstance(one, click.Option) and max(one.opts, key=len).startswith("--")
    }
    options |= {theirs: options[mine] for theirs, mine in _SAME.items() if mine in options and theirs not in options}
    for name, option in options.items():
        # An empty value, and one with spaces in it, keep their quotes.
        text = re.sub(rf"(?<![\w./'\"-]){name}='([^\s']+)'", rf"{option} \1", text)
        text = re.sub(rf"(?<![\w./'\"-]){name}=", f"{option} ", text)
        text = re.sub(rf"^{name}(?= (must|exceeds|names|needs) )", option, text)
        if "_" in name:
            text = re.sub(rf"(?<![\w./'\"-]){name}(?![\w/'\"(-]|\.\w)", option, text)
    return text
