"""Writes a bundle's sampler graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from paceline.bundle import SamplerEntry

from .draft import greedy_sampler, sampler
from .draw import padded
from .verify import block_verifier, deterministic_verifier, greedy_verifier, token_verifier

__all__ = ["write_sampler"]


def write_sampler(
    folder: Path,
    vocab_size: int,
    target_width: int,
    draft_width: int | None,
    draft_logit_ids: Sequence[int] | None = None,
) -> SamplerEntry:
    """Write the graphs into `folder / "sampler"` and describe them.

    Args:
        folder: of the bundle.
        vocab_size: of the common vocabulary.
        target_width: width of the target's logits.
        draft_width: width of the draft model's logits; None where there is no draft model.
        draft_logit_ids: the id that each of the draft's logits stands for, rising; None where the i-th stands for id i.
    """
    graphs = {
        "token": token_verifier(vocab_size, target_width),
        "block": block_verifier(vocab_size, target_width),
        "deterministic": deterministic_verifier(vocab_size, target_width),
        "greedy": greedy_verifier(vocab_size, target_width),
    }
    if draft_width is not None:
        graphs["draft"] = sampler(vocab_size, draft_width, draft_logit_ids)
        graphs["greedy_draft"] = greedy_sampler(vocab_size, draft_width, draft_logit_ids)
    (folder / "sampler").mkdir()
    paths = {name: f"sampler/{name}.onnx" for name in graphs}
    for name, graph in graphs.items():
        onnx.save(graph, folder / paths[name])
    return SamplerEntry(graphs=paths, width=padded(vocab_size))
