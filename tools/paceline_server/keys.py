"""API keys: where they come from, and the comparison that takes as long whatever is given."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from paceline.errors import InvalidInputError

from .api_error import ApiError

__all__ = ["ApiKeys"]


class ApiKeys:
    """The keys that a server takes; with none of them, it takes everyone."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path | None, environment: str | None) -> Self:
        """Keys of a file, one a line (`#` begins a comment), and of an environment variable, with commas between them.

        Raises:
            InvalidInputError: a source that is named holds no key, or no text.
        """
        keys: list[str] = []
        if path is not None:
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError as error:
                raise InvalidInputError(f"The file of keys {path} is not UTF-8 at byte {error.start}.") from error
            found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not found:
                raise InvalidInputError(f"The file {path} holds no key; write one a line.")
            keys += found
        if environment is not None:
            found = [key.strip() for key in environment.split(",") if key.strip()]
            if not found:
                raise InvalidInputError("PACELINE_API_KEYS is set, but holds no key; unset it, or give keys.")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> None:
        """Let the request pass if it bears a key.

        Raises:
            ApiError: 401, with the same words whatever is wrong.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        # Every key is compared, in full: neither which one nor how much of it fits shows in the time.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "A valid API key is expected in the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
