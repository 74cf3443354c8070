"""Fuse RMS normalisations, and the residual additions before them, into one operator each."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization

__all__ = ["fuse_norms"]


def fuse_norms(model: ir.Model) -> int:
    """Rewrite to `SimplifiedLayerNormalization` and `SkipSimplifiedLayerNormalization`, in place.

    Returns:
        The number of normalisations fused.
    """
    count: int = fuse_rms_normalization(model)
    fuse_skip_rms_normalization(model)
    return count
