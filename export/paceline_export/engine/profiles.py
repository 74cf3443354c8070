"""The ranges of shapes that speculative sampling asks of its two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bundle import EngineProfile, ModelEntry
from paceline.errors import InvalidInputError

__all__ = ["PREFILL_ROWS", "ProfileRows", "make_profiles"]

PREFILL_ROWS = 256  # of a prompt in one pass, at most

_Range = tuple[int, int, int]  # least, usual, most


@dataclass(frozen=True, slots=True)
class ProfileRows:
    """A profile that a user asks for: of which model, its name, and the rows that a pass has at least, mostly, at most.

    It replaces the profile of this name, or is one more.
    """

    model: str
    name: str
    rows: _Range

    def __post_init__(self) -> None:
        least, usual, most = self.rows
        if not 1 <= least <= usual <= most:
            raise InvalidInputError(
                f"The profile {self.model}:{self.name} is for {least}, {usual}, {most} rows; expected a least, a usual "
                "and a largest number from 1 on, in this order."
            )


def make_profiles(
    entry: ModelEntry,
    which: str,
    *,
    max_length: int,
    max_draft_tokens: int,
    max_batch: int,
    given: Sequence[ProfileRows] = (),
) -> tuple[EngineProfile, ...]:
    """One profile for the passes of a round, one for pieces of a prompt, and those that are given.

    A draft's step has one row, and two after a round whose drafts all stood, since its cache lacks the last of them. A
    target's pass has a row for each drafted token and one more; less is drafted near the end of a text. Both want the
    logits of what they score; from a prompt's last piece the target's come with the first drafts behind it.

    Args:
        entry: the model, of the flavour `trt`.
        which: `target` or `draft`.
        max_length: positions of the caches.
        max_draft_tokens: most drafted tokens of a round.
        max_batch: most sequences of a batch.
        given: profiles that a user asks for; those of another model are passed over.

    Raises:
        InvalidInputError: a number below 1, more rows than positions, or a pass of a round that no profile is for.
    """
    rows = 2 if which == "draft" else max_draft_tokens + 1
    for name, value in (
        ("max_length", max_length),
        ("max_draft_tokens", max_draft_tokens),
        ("max_batch", max_batch),
    ):
        if value < 1:
            raise InvalidInputError(f"{name} must be at least 1, got {value}.")
    if rows >= max_length:
        raise InvalidInputError(
            f"{max_draft_tokens} drafted tokens take passes of {rows} rows, and the caches have {max_length} "
            "positions; choose fewer drafted tokens or a larger max_length."
        )
    piece = max(min(PREFILL_ROWS, max_length), rows)
    ranges: dict[str, _Range] = {"step": (1, 1, rows)} if which == "draft" else {"verify": (1, rows, rows)}
    ranges["prefill"] = (1, piece, piece)
    ranges |= {profile.name: profile.rows for profile in given if profile.model == which}
    profiles = []
    for name, (least, usual, most) in ranges.items():
        if most > max_length:
            raise InvalidInputError(
                f"The profile {which}:{name} is for {most} rows, and the caches have {max_length} positions."
            )
        # A draft wants one row of logits. Where its profile allows no other number, TensorRT-RTX 1.7 writes an LM head
        # of few bits out as floats in each step; where it allows two, the head is read as it is.
        logits = (1, 1 if name == "prefill" else min(usual, rows), min(most, rows))
        profiles.append(_profile(entry, name, max_length, max_batch, rows=(least, usual, most), logits=logits))
    for count in range(1, rows + 1):
        if not any(least <= count <= most for least, _, most in ranges.values()):
            raise InvalidInputError(
                f"No profile of the {which} is for {count} rows, which a round with up to {max_draft_tokens} drafted "
                f"tokens asks for; there are {', '.join(f'{name} {rows}' for name, rows in ranges.items())}."
            )
    return tuple(profiles)


def _profile(
    entry: ModelEntry, name: str, max_length: int, max_batch: int, *, rows: _Range, logits: _Range
) -> EngineProfile:
    """The shapes of every input for these numbers of rows and of rows whose logits are wanted."""
    sizes: dict[int | str, _Range] = {"batch": (1, max_batch, max_batch), "rows": rows, "num_logits": logits}
    shapes = {}
    for spec in entry.inputs:
        dims = [
            sizes.get(dim) or (_length(spec.name, place, dim, max_length),) * 3 for place, dim in enumerate(spec.shape)
        ]
        shapes[spec.name] = tuple(zip(*dims, strict=True))
    return EngineProfile(name, shapes)


def _length(name: str, place: int, dim: int | str, max_length: int) -> int:
    """A fixed dimension; the third of a cache is its number of positions."""
    return max_length if name.startswith("past_key_values.") and place == 2 else int(dim)
