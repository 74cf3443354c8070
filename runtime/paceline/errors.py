"""Every error that paceline raises on purpose.

```
PacelineError
├── InvalidInputError         an argument or option out of its range (also a ValueError); the CLI exits with 2
│   ├── ContextLengthError    a prompt that does not fit the model's context
│   ├── MemoryBudgetError     a text whose KV caches exceed an engine's budget
│   └── NoTokenLeftError      sampling parameters and constraint that together forbid every token
├── BuildError                an engine that cannot be built, or that a strict build refuses
├── BundleError               a bundle that is missing, truncated, altered, or of a newer format
├── CheckpointError           a source that cannot be used: unknown name, only pickles, remote code, unsupported model
├── DeadlineError             a generation that an engine ended at its deadline
├── EngineClosedError         an engine that drains or is closed, and takes nothing new
├── FetchError                a download that failed or does not match its hash
├── IncompatiblePairError     a draft model that cannot serve this target
├── InstallationError         a package that is missing, or two that exclude each other
├── ModelOutputError          logits that define no distribution (NaN, or nothing but minus infinity)
├── OverloadError             an engine whose queue is full; it says when to try again
├── ParityError               an exported graph that differs from its source beyond tolerance
└── ProfileError              a profile of costs that is missing, damaged, or of another setup
```

A message says what was given, what is expected, and how to mend it.
"""

from __future__ import annotations

__all__ = [
    "BuildError",
    "BundleError",
    "CheckpointError",
    "ContextLengthError",
    "DeadlineError",
    "EngineClosedError",
    "FetchError",
    "IncompatiblePairError",
    "InstallationError",
    "InvalidInputError",
    "MemoryBudgetError",
    "ModelOutputError",
    "NoTokenLeftError",
    "OverloadError",
    "PacelineError",
    "ParityError",
    "ProfileError",
]


class PacelineError(Exception):
    """Base of all errors that paceline raises on purpose."""


class InvalidInputError(PacelineError, ValueError):
    """An argument or option is out of its range.

    Attributes:
        argument: the name of the one that is to blame, where there is one.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class ContextLengthError(InvalidInputError):
    """A prompt does not fit the model's context."""


class MemoryBudgetError(InvalidInputError):
    """The KV caches of a text exceed an engine's budget, so that it could never run."""


class NoTokenLeftError(InvalidInputError):
    """Sampling parameters and constraint together forbid every token at a position."""


class BuildError(PacelineError):
    """An engine cannot be built, or a strict build refuses it."""


class BundleError(PacelineError):
    """A bundle is missing, truncated, altered, or of a newer format."""


class CheckpointError(PacelineError):
    """A source cannot be used as a checkpoint."""


class DeadlineError(PacelineError):
    """A generation's deadline passed before its text was complete."""


class EngineClosedError(PacelineError):
    """An engine drains or is closed."""


class FetchError(PacelineError):
    """A download failed or does not match its hash."""


class IncompatiblePairError(PacelineError):
    """A draft model cannot serve this target model."""


class InstallationError(PacelineError):
    """A package is missing, or two installed packages exclude each other."""


class ModelOutputError(PacelineError):
    """A model returned logits that define no distribution."""


class OverloadError(PacelineError):
    """An engine's queue is full.

    Attributes:
        retry_after_s: seconds after which there is probably room.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ParityError(PacelineError):
    """An exported graph differs from its source beyond the tolerance of its precision."""


class ProfileError(PacelineError):
    """A profile of costs is missing, damaged, or was measured in another setup."""


_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value as a message shows it: its beginning, whatever it is."""
    try:
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
    except Exception:  # an integer of thousands of digits, or an object whose own code fails
        return f"a value of type {type(value).__name__} that cannot be printed"
