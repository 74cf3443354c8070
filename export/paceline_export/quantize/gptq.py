"""GPTQ (Frantar et al. 2023): round a weight column by column, each error made good by the columns that follow.

What counts is not the weight but the product with the inputs that a layer gets to see. With `H = X Xᵀ` over a
calibration text, the error of a row is `d H dᵀ`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from .blockwise import Blockwise, block_range, from_levels

__all__ = ["gptq"]

_COLUMNS = 32  # whose errors are handed on together


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    *,
    bits: int,
    block_size: int,
    symmetric: bool,
    damping: float,
) -> Blockwise:
    """Quantise a weight for the inputs that it is used with.

    Args:
        weight: float32 `[rows, columns]`.
        hessian: float32 `[groups, size, size]`: `X Xᵀ` of each group of its columns; groups are taken for independent
            of each other.
        bits: 4 or 8.
        block_size: columns that share a scale.
        symmetric: whether blocks have no zero point.
        damping: what is added to the Hessian's diagonal, as a share of its mean: the less text, the more is right.

    Returns:
        The quantised weight, its levels and scales chosen together.
    """
    groups, size, _ = hessian.shape
    levels: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    zeros: list[torch.Tensor] = []
    for group in range(groups):
        columns = weight[:, group * size : (group + 1) * size]
        damped = hessian[group].clone()
        mean = float(damped.diagonal().mean())
        damped.diagonal().add_(damping * mean if mean > 0 else 1.0)
        lower = torch.linalg.cholesky(damped.flip(0, 1))
        rows = columns.T.contiguous()  # transposed, so that a column of the weight lies in one piece
        identity = torch.eye(len(lower))
        factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)  # H⁻¹ = factorᵀ factor
        parts = _round_in_threads(rows, factor, bits, block_size, symmetric)
        for whole, part in zip((levels, scales, zeros), parts, strict=True):
            whole.append(part)
    return from_levels(
        torch.cat(levels).T,
        torch.cat(scales).T,
        None if symmetric else torch.cat(zeros).T,
        bits=bits,
        block_size=block_size,
    )


def _round_in_threads(
    weight: torch.Tensor, factor: torch.Tensor, bits: int, block_size: int, symmetric: bool
) -> list[torch.Tensor]:
    """As `_round`, with the rows shared out to threads: they do not depend on each other.

    The steps are small. Within one of them, threads would wait for each other longer than they compute.
    """
    threads = torch.get_num_threads()

    def work(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.set_num_threads(1)
        return _round(rows.contiguous(), factor, bits, block_size, symmetric)

    try:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(work, weight.chunk(threads, dim=1)))
    finally:
        torch.set_num_threads(threads)
    return [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]


def _round(
    weight: torch.Tensor, factor: torch.Tensor, bits: int, block_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels `[columns, rows]`, scales and zero points `[blocks, rows]` of a transposed weight, which is changed."""
    columns, rows = weight.shape
    top = 2**bits - 1
    levels = torch.empty(columns, rows, dtype=torch.uint8)
    blocks = -(-columns // block_size)
    scales, zeros = torch.empty(blocks, rows), torch.empty(blocks, rows)
    pivots = factor.diagonal()
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        piece = weight[start:end]
        errors = torch.empty_like(piece)
        for column in range(start, end):
            block, i = column // block_size, column - start
            if column % block_size == 0:
                here = slice(column, min(column + block_size, columns))
                scales[block], zeros[block] = _range(weight[here], pivots[here] ** -2, bits, symmetric)
            scale, zero = scales[block], zeros[block]
            level = (piece[i] / scale).round_().add_(zero).clamp_(0, top)
            levels[column] = level
            errors[i] = piece[i].sub(level.sub_(zero).mul_(scale)).div_(pivots[column])
            piece[i + 1 :].addr_(factor[column, column + 1 : end], errors[i], alpha=-1)
        weight[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return levels, scales, zeros


def _range(
    block: torch.Tensor, importance: torch.Tensor, bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and zero point `[rows]` of a block `[columns, rows]`, which reach to its ends.

    Clipping them would make a block's error less and the model worse: the largest weights matter beyond their square.
    """
    scale, zero = block_range(*torch.aminmax(block, dim=0), bits, symmetric)
    scale = torch.where(scale == 0, 1.0, scale)
    if not symmetric:
        return scale, zero

    # -middle … middle - 1 steps: the far end, or the other one, may have the longer side; columns are weighed.
    weights = (importance / importance.mean())[None]

    def error(scale: torch.Tensor) -> torch.Tensor:
        levels = (block / scale).round_().add_(zero).clamp_(0, 2**bits - 1)
        return (weights @ levels.sub_(zero).mul_(scale).sub_(block).square_())[0]

    return torch.where(error(-scale) < error(scale), -scale, scale), zero
