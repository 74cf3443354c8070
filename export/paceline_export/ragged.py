"""A batch of texts of different lengths through a graph with a write index for each sequence, and through torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.ort import OrtModel

__all__ = ["RaggedBatch"]

_STARTS = (0, 7, 19)  # where in the text each sequence begins
_PROMPTS = (40, 23, 9)  # tokens of each prompt
_KEPT = 4  # rows of each prompt that are compared, the last ones
_VERIFY = 5
_ACCEPTED = (1, 3, 5)  # tokens of each verified block that stand


class RaggedBatch:
    """Three sequences of a text: prompts of different lengths, one token each, a verification, and another after it.

    Between the two verifications each sequence is rolled back by a length of its own.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        ends = [start + prompt + 1 for start, prompt in zip(_STARTS, _PROMPTS, strict=True)]
        self._texts = [list(ids[start : end + _VERIFY]) for start, end in zip(_STARTS, ends, strict=True)]
        self._others = [list(reversed(ids[end : end + _VERIFY])) for end in ends]

    def onnx_logits(self, model: OrtModel) -> dict[str, NDArray[np.float32]]:
        """Rows of logits `[rows of all sequences, vocab]` of each phase."""
        entry, count = model.entry, len(self._texts)
        shape = (count, entry.num_kv_heads, model.max_length, entry.head_size)
        caches = {name: np.zeros(shape, entry.kv_dtype) for name in model.past_names}
        outputs = ["logits", *model.present_names]

        def run(blocks: list[list[int]], lengths: Sequence[int], kept: int) -> NDArray[np.float32]:
            rows = max(map(len, blocks))
            given = {
                "input_ids": np.array([block + [0] * (rows - len(block)) for block in blocks], np.int64),
                "write_indices": np.array(lengths, np.int64),
                "logits_indices": np.array([np.arange(len(block) - kept, len(block)) for block in blocks], np.int64),
            }
            logits, *present = model.session.run(outputs, {**given, **caches})
            caches.update(zip(caches, present, strict=True))
            return np.asarray(logits, np.float32).reshape(-1, logits.shape[-1])

        prompts = [text[: -_VERIFY - 1] for text in self._texts]
        lengths = list(map(len, prompts))
        found = {"batch: prefill": run(prompts, [0] * count, _KEPT)}
        found["batch: single step"] = run([[text[-_VERIFY - 1]] for text in self._texts], lengths, 1)
        lengths = [length + 1 for length in lengths]
        found["batch: verification"] = run([text[-_VERIFY:] for text in self._texts], lengths, _VERIFY)
        lengths = [length + accepted for length, accepted in zip(lengths, _ACCEPTED, strict=True)]
        found["batch: after rollback"] = run(self._others, lengths, _VERIFY)
        return found

    @torch.no_grad()
    def torch_logits(self, model: torch.nn.Module) -> dict[str, NDArray[np.float32]]:
        """The same rows, each from a forward of one sequence without any cache."""
        phases: dict[str, list[NDArray[np.float32]]] = {}
        for text, other, accepted in zip(self._texts, self._others, _ACCEPTED, strict=True):
            rows = model(torch.tensor([text]), use_cache=False).logits[0].numpy()
            end = len(text) - _VERIFY
            phases.setdefault("batch: prefill", []).append(rows[end - 1 - _KEPT : end - 1])
            phases.setdefault("batch: single step", []).append(rows[end - 1 : end])
            phases.setdefault("batch: verification", []).append(rows[end:])
            after = model(torch.tensor([[*text[: end + accepted], *other]]), use_cache=False).logits[0]
            phases.setdefault("batch: after rollback", []).append(after[-_VERIFY:].numpy())
        return {name: np.concatenate(rows) for name, rows in phases.items()}
