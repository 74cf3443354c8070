"""The ranges of shapes that speculative sampling asks of its two models."""

from __future__ import annotations

from paceline.bundle import EngineProfile, ModelEntry
from paceline.errors import InvalidInputError

__all__ = ["PREFILL_ROWS", "make_profiles"]

PREFILL_ROWS = 256  # of a prompt in one pass, at most

_Range = tuple[int, int, int]  # least, usual, most


def make_profiles(
    entry: ModelEntry, which: str, *, max_length: int, max_draft_tokens: int, max_batch: int
) -> tuple[EngineProfile, ...]:
    """One profile for the passes of a round and one for pieces of a prompt.

    A draft's step has one row, and two after a round whose drafts all stood, since its cache lacks the last of them. A
    target's pass has a row for each drafted token and one more; less is drafted near the end of a text. Both want the
    logits of what they score; from a prompt's last piece the target's come with the first drafts behind it.

    Args:
        entry: the model, of the flavour `trt`.
        which: `target` or `draft`.
        max_length: positions of the caches.
        max_draft_tokens: most drafted tokens of a round.
        max_batch: most sequences of a batch.

    Raises:
        InvalidInputError: a number below 1, or more rows than positions.
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
    piece = min(PREFILL_ROWS, max_length)
    if which == "draft":
        step = _profile(entry, "step", max_length, max_batch, rows=(1, 1, rows), logits=(1, 1, 1))
        return step, _profile(entry, "prefill", max_length, max_batch, rows=(1, piece, piece), logits=(1, 1, 1))
    verify = _profile(entry, "verify", max_length, max_batch, rows=(1, rows, rows), logits=(1, rows, rows))
    piece = max(piece, rows)
    return verify, _profile(entry, "prefill", max_length, max_batch, rows=(1, piece, piece), logits=(1, 1, rows))


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
