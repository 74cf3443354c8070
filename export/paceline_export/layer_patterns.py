"""Regular expressions of an adapter, which say what holds for which of its layers: read within a limit of time.

Anyone may have written them, and a few characters can take years to match.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from paceline.errors import CheckpointError

__all__ = ["first_matches"]

_SECONDS = 10.0
# In a process of its own, since a match cannot be ended from within.
_PROGRAM = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
ends = []
for pattern in patterns:
    try:
        ends.append(re.compile(rf"(.*\.)?({pattern})$"))
    except (re.error, OverflowError, RecursionError) as error:
        sys.exit(print(json.dumps([len(ends), str(error)])))
print(json.dumps([None, [next((i for i, end in enumerate(ends) if end.match(name)), None) for name in names]]))
"""


def first_matches(where: str, patterns: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """For each name the number of the first pattern that is its end, as in peft's `get_pattern_key`; None for none.

    Args:
        where: the file and the setting that the patterns come from, for messages.
        patterns: regular expressions.
        names: of layers.

    Raises:
        CheckpointError: a pattern is no regular expression, or they take too long.
    """
    if not patterns:
        return [None] * len(names)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _PROGRAM],
            input=json.dumps([patterns, names]),
            capture_output=True,
            text=True,
            check=True,
            timeout=_SECONDS,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        shown = ", ".join(f"{pattern!r:.80}" for pattern in patterns[:3])
        reason = (
            f"take longer than {_SECONDS:g} s" if isinstance(error, subprocess.TimeoutExpired) else "cannot be read"
        )
        raise CheckpointError(
            f"{where} names {shown}, which {reason} as regular expressions for {len(names)} layers; name the layers "
            "themselves, without repetitions such as '(a+)+'."
        ) from error
    bad, found = json.loads(done.stdout)
    if bad is not None:
        raise CheckpointError(
            f"{where} names {patterns[bad]!r:.80}, which is no regular expression ({found}); expected the end of a "
            "layer's name."
        )
    return list(found)
