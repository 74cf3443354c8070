"""The ids of two vocabularies that stand for the same: what a draft with a tokenizer of its own can propose."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, DraftTokenizerEntry
from .errors import BundleError
from .logit_ids import map_ids
from .tokenizer import Tokenizer

__all__ = ["find_shared_ids", "read_shared_ids"]


def find_shared_ids(
    target: Tokenizer, draft: Tokenizer, *, ends: tuple[int | None, int | None] = (None, None)
) -> NDArray[np.int32]:
    """Pair ids of two tokenizers: added tokens of the same name, then tokens that add the same bytes to a text.

    Whether a pair is a good one does not touch the law of the text: what counts is that no id is in two pairs.

    Args:
        target: its ids are proposed.
        draft: its ids are drawn.
        ends: the id that ends a text in each, paired where neither has another partner.

    Returns:
        int32 `[2, shared]`: ids of the draft, rising, and below them the target's.
    """
    pairs: dict[int, int] = {}
    ours = target.added_tokens
    for name, own in draft.added_tokens.items():
        if (other := ours.get(name)) is not None and other < target.vocab_size and own < draft.vocab_size:
            pairs[own] = other
    taken = set(pairs.values())
    if ends[0] is not None and ends[1] is not None and ends[1] not in pairs and ends[0] not in taken:
        pairs[ends[1]] = ends[0]
        taken.add(ends[0])
    of_target = target.ids_by_bytes()
    for data, own in draft.ids_by_bytes().items():
        if own not in pairs and (found := of_target.get(data)) is not None and found not in taken:
            pairs[own] = found
            taken.add(found)
    return np.array(sorted(pairs.items()), np.int32).reshape(-1, 2).T.copy()


def read_shared_ids(bundle: Bundle, entry: DraftTokenizerEntry) -> NDArray[np.int64]:
    """The pairs of a bundle, `[2, shared]`; see `find_shared_ids`.

    Raises:
        BundleError: the file is not what the manifest says: another type or shape, or an id that is none.
    """
    path, limits = bundle.path(entry.shared_ids), (entry.tokenizer.vocab_size, bundle.manifest.tokenizer.vocab_size)
    pairs, found = map_ids(path)
    if not isinstance(pairs, np.ndarray) or pairs.dtype != np.int32 or pairs.ndim != 2 or pairs.shape[0] != 2:
        raise BundleError(f"{path} holds {found}; expected int32 [2, shared]. Export the bundle again.")
    if not 1 <= pairs.shape[1] <= min(limits):
        raise BundleError(f"{path} pairs {pairs.shape[1]} ids of {min(limits)}; export the bundle again.")
    for ids, limit in zip(pairs, limits, strict=True):
        if not 0 <= int(ids.min()) <= int(ids.max()) < limit or len(np.unique(ids)) < len(ids):
            raise BundleError(
                f"{path} must pair ids below {limits[0]} of the draft with ids below {limits[1]} of the target, each "
                "at most once, but it does not. Export the bundle again."
            )
    return cast(NDArray[np.int64], pairs.astype(np.int64))
