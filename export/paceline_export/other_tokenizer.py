"""A draft with a tokenizer of its own: what it shares with the target's, and how it drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from paceline.bundle import DraftTokenizerEntry, TokenizerEntry
from paceline.errors import IncompatiblePairError
from paceline.shared_ids import find_shared_ids
from paceline.tokenizer import Tokenizer

from .checkpoint import Checkpoint

__all__ = ["DEFAULT_METHOD", "METHODS", "OtherTokenizer"]

METHODS = ("intersection", "text")
DEFAULT_METHOD = "intersection"


@dataclass(frozen=True, slots=True)
class OtherTokenizer:
    """A draft's tokenizer, and the ids that it shares with the target's.

    Attributes:
        draft: the checkpoint that brings it.
        entry: what the manifest says of it.
        shared_ids: int32 `[2, shared]`; see `paceline.shared_ids.find_shared_ids`.
        method: one of `METHODS`.
    """

    draft: Checkpoint
    entry: TokenizerEntry
    shared_ids: NDArray[np.int32]
    method: str

    @classmethod
    def between(
        cls, target: Checkpoint, draft: Checkpoint, entries: tuple[TokenizerEntry, TokenizerEntry], method: str
    ) -> OtherTokenizer:
        """Compare the tokenizers of a target and a draft, which `entries` describe.

        Raises:
            IncompatiblePairError: no id of the one stands for what an id of the other does.
        """
        ours, theirs = (
            Tokenizer(checkpoint.tokenizer.backend_tokenizer, entry)
            for checkpoint, entry in zip((target, draft), entries, strict=True)
        )
        shared = find_shared_ids(ours, theirs, ends=(target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id))
        if not shared.shape[1]:
            raise IncompatiblePairError(
                f"The tokenizers of target {target.source.name} and draft {draft.source.name} share no token, so the "
                "draft can propose nothing; take another draft."
            )
        return cls(draft, entries[1], shared, method)

    def write(self, folder: Path) -> DraftTokenizerEntry:
        """Write tokenizer and ids into the bundle's folder and describe them."""
        paths = "draft/tokenizer.json", "draft/shared_ids.npy"
        self.draft.tokenizer.backend_tokenizer.save(str(folder / paths[0]))
        np.save(folder / paths[1], self.shared_ids, allow_pickle=False)
        return DraftTokenizerEntry(paths[0], self.entry, paths[1], cast(Literal["intersection", "text"], self.method))

    @property
    def note(self) -> str:
        """What a reader should know of it."""
        how = {
            "intersection": "drafts ids that both have (intersection)",
            "text": "goes on with the text in its own tokens (text)",
        }
        return (
            f"it has a tokenizer of its own, which shares {self.shared_ids.shape[1]} of its "
            f"{self.entry.vocab_size} ids with the target's; it {how[self.method]}."
        )
