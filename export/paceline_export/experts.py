"""The experts function that transformers' experts interface calls while a model is traced.

An expert runs for every row, and a row keeps what its router chose: a plain product for each expert's projections,
which can be stored in few bits as any other. Which experts no row chose is asked later, where a flavour can
(`passes/experts.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from paceline.errors import CheckpointError

__all__ = ["EXPERTS_NAME"]

EXPERTS_NAME = "paceline"


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of what the chosen experts make of each row.

    Args:
        module: the experts, with their weights stacked: `[experts, rows of a projection, columns]`, or transposed.
        hidden_states: `[rows, width]`.
        top_k_index: the chosen experts, int64 `[rows, chosen]`.
        top_k_weights: theirs, `[rows, chosen]`.

    Returns:
        `[rows, width]`.

    Raises:
        CheckpointError: the experts do more than two projections and what is between them.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise CheckpointError(
            f"{type(module).__name__} normalises what each expert gives; this architecture is not supported."
        )

    def project(x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight: torch.Tensor = getattr(module, name)[expert]
        product = x @ (weight if module.is_transposed else weight.T)
        if not module.has_bias:
            return product
        bias: torch.Tensor = getattr(module, f"{name}_bias")[expert]
        return product + bias

    weights = torch.zeros(hidden_states.shape[0], module.num_experts, dtype=hidden_states.dtype)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(hidden_states.dtype))
    total = torch.zeros_like(hidden_states)
    for expert in range(module.num_experts):
        if module.has_gate:
            inner = module._apply_gate(project(hidden_states, "gate_up_proj", expert))
        else:
            inner = module.act_fn(project(hidden_states, "up_proj", expert))
        share = weights[:, expert : expert + 1]
        # Not a product alone: what was not chosen may be infinite.
        part = torch.where(share != 0, project(inner, "down_proj", expert) * share, torch.zeros_like(share))
        total = total + part
    return total


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts)
