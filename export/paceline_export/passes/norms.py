"""Fuse RMS normalisations, and the residual additions before them, into one operator each."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization

__all__ = ["fuse_residual_norms", "fuse_rms_norms"]


def fuse_rms_norms(model: ir.Model) -> int:
    """Rewrite RMS normalisations to `SimplifiedLayerNormalization`, in place.

    Returns:
        The number fused.
    """
    return int(fuse_rms_normalization(model))


def fuse_residual_norms(model: ir.Model) -> int:
    """Rewrite an addition and the fused norm of its sum to `SkipSimplifiedLayerNormalization`, in place.

    Returns:
        The number fused.
    """
    return int(fuse_skip_rms_normalization(model))
