"""The ids that a model of a bundle has logits for, where these are not all that it can be fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bundle import Bundle, ModelEntry
from .errors import BundleError

__all__ = ["map_ids", "read_logit_ids"]


def read_logit_ids(bundle: Bundle, entry: ModelEntry) -> NDArray[np.int64] | None:
    """The id that each logit of a model stands for, `[vocab_size]`, rising; None where the i-th stands for id i.

    Raises:
        BundleError: the file is not what the manifest says: another type, length or order, or an id that has no text.
    """
    if entry.logit_ids is None:
        return None
    # Only a draft has such ids.
    path, num_ids = bundle.path(entry.logit_ids.path), bundle.manifest.tokenizer_of("draft").vocab_size
    ids, found = map_ids(path)
    if found != f"int32 {[entry.vocab_size]}":
        raise BundleError(
            f"{path} holds {found}; expected int32 [{entry.vocab_size}], one id for each logit. Export the bundle "
            "again."
        )
    steps = np.diff(ids)
    if not 0 <= int(ids[0]) <= int(ids[-1]) < num_ids or (len(steps) and int(steps.min()) < 1):
        raise BundleError(
            f"{path} must hold rising ids below {num_ids}, each at most once, but it does not. Export the bundle again."
        )
    wide: NDArray[np.int64] = ids.astype(np.int64)
    return wide


def map_ids(path: Path) -> tuple[Any, str]:
    """What `np.save` wrote to a file of a bundle, mapped, and its dtype and shape in words.

    Raises:
        BundleError: it is no such file.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)  # mapped: a header that promises too much takes nothing
    except (OSError, ValueError, EOFError) as error:
        raise BundleError(f"{path} is no numpy array: {error} Export the bundle again.") from error
    return ids, f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
