"""What a server serves, and how much of it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, fields

from paceline import AsyncEngine, SpeculativeDecoder
from paceline.errors import InvalidInputError, shown
from paceline.tokenizer import Tokenizer

__all__ = ["Limits", "Served", "check_name"]


def check_name(name: str) -> str:
    """Check a model's name, which stands in URLs and logs, and return it.

    Raises:
        InvalidInputError: it does not fit.
    """
    if len(name) > 200 or not re.fullmatch(r"\w[\w.:@+~-]*(/\w[\w.:@+~-]*)*", name):
        raise InvalidInputError(
            "A model's name in the API has up to 200 letters, digits and characters of _.:@+~-, in parts with / "
            f"between them that begin with a letter or a digit; got {shown(name)}. Choose one with --model-name."
        )
    return name


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for; beyond it, the server answers with 4xx.

    Attributes:
        body_bytes: of a request's body.
        prompt_tokens: of a prompt; None is the model's context.
        new_tokens: of each text; also what a chat gets that does not say.
        choices: texts per request: prompts times `n`.
        timeout_s: from a request's arrival to its last token; a request may ask for less.
        client_s: seconds that a client may take to send a request's head, its body, or to read what was sent to it.
    """

    body_bytes: int = 4 << 20
    prompt_tokens: int | None = None
    new_tokens: int = 4096
    choices: int = 16
    timeout_s: float = 600.0
    client_s: float = 30.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (value is None and entry.name == "prompt_tokens") and not value > 0:
                raise InvalidInputError(f"{entry.name} must be above 0, got {value}.")


@dataclass(slots=True)
class Served:
    """A decoder under a name, and the engine that runs its texts.

    Attributes:
        decoder: what new requests use; another one may be put here while older requests go on with theirs.
        engine: runs the texts.
        name: the model's name in the API; see `check_name`.
        limits: of a request.
        created: Unix time in seconds, as `/v1/models` tells it.
        draining: whether the server is about to stop.
    """

    decoder: SpeculativeDecoder
    engine: AsyncEngine
    name: str
    limits: Limits = Limits()
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The decoder's tokenizer.

        Raises:
            InvalidInputError: the decoder has none.
        """
        if self.decoder.tokenizer is None:
            raise InvalidInputError("A decoder without a tokenizer cannot be served.")
        return self.decoder.tokenizer
