"""Percentiles of times, as a benchmark prints them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["SHARES", "percentiles"]

SHARES = (50, 90, 99)


def percentiles(values: Sequence[float], weights: Sequence[int] | None = None) -> dict[str, float] | None:
    """The least value that so many of a hundred do not exceed; a value of weight n counts n times.

    Returns:
        `p50`, `p90` and `p99`; None where there are no values.
    """
    if not values:
        return None
    repeated = np.asarray(values) if weights is None else np.repeat(values, weights)
    found = np.percentile(repeated, SHARES, method="inverted_cdf")
    return {f"p{share}": float(value) for share, value in zip(SHARES, found, strict=True)}
