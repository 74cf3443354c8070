"""What the library refuses, in the words of a request: its fields where the library speaks of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import InstallationError, InvalidInputError, MemoryBudgetError

from .api_error import ApiError, api_error
from .bodies import SamplingBody

__all__ = ["in_fields", "of_field"]


@contextmanager
def in_fields(body: SamplingBody, otherwise: str | None = None) -> Iterator[None]:
    """Let what the library refuses name the field that is to blame.

    Args:
        body: of the request.
        otherwise: the field where the library blames no argument; None is that of the prompt.

    Raises:
        ApiError: in place of the library's error.
    """
    try:
        yield
    except (InvalidInputError, InstallationError) as error:
        raise of_field(body, error, otherwise) from error


def of_field(
    body: SamplingBody, error: InvalidInputError | InstallationError, otherwise: str | None = None
) -> ApiError:
    """What the library refuses, as an answer that names a field of `body`; see `in_fields`."""
    fields = body.field_of
    argument = error.argument if isinstance(error, InvalidInputError) else None
    if argument is None and isinstance(error, MemoryBudgetError):
        argument = "max_new_tokens"
    param = fields.get(argument, argument) if argument else otherwise or fields["prompt"]
    message = str(error)
    for theirs, field in fields.items():
        if "_" in theirs:  # no word of a sentence has one
            message = re.sub(rf"(?<![\w./'\"-]){theirs}(?![\w/'\"-])", field, message)
    answer = api_error(error)
    assert answer is not None  # there is one to all that the library raises on purpose
    answer.message = message if re.search(rf"\b{param}\b", message) else f"{param}: {message}"
    answer.param = param
    return answer
