"""Fuse RMS normalisations, and the residual additions before them, into one operator each."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter.ort_fusions.rms_normalization import fuse_rms_normalization as _simplified
from onnxscript.rewriter.ort_fusions.skip_normalization import fuse_skip_rms_normalization
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization as _standard

__all__ = ["fuse_residual_norms", "fuse_simplified_norms", "fuse_standard_norms"]


def fuse_simplified_norms(model: ir.Model) -> int:
    """Rewrite RMS normalisations to ONNX Runtime's `SimplifiedLayerNormalization`, in place.

    Inputs are widened as for `fuse_standard_norms`: an addition in front is not fused then, which needs one dtype.

    Returns:
        The number fused.
    """
    count = int(_simplified(model))
    _widen_inputs(model, "SimplifiedLayerNormalization")
    return count


def fuse_standard_norms(model: ir.Model) -> int:
    """Rewrite RMS normalisations to `RMSNormalization` of opset 23, in place.

    Where the factor is of a wider dtype than the input, as Gemma's is in half precision, the input is widened first:
    the operator's definition allows two dtypes, ONNX Runtime does not.

    Returns:
        The number fused.
    """
    count = int(_standard(model))
    _widen_inputs(model, "RMSNormalization")
    return count


def _widen_inputs(model: ir.Model, op_type: str) -> None:
    """Cast what such norms read to the dtype of their factors."""
    for node in model.graph:
        if node.op_type == op_type and node.inputs[0].dtype != (dtype := node.inputs[1].dtype):
            cast = ir.node("Cast", [node.inputs[0]], {"to": dtype})
            model.graph.insert_before(node, cast)
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), node.inputs[0].shape
            node.replace_input_with(0, cast.outputs[0])


def fuse_residual_norms(model: ir.Model) -> int:
    """Rewrite an addition and the fused norm of its sum to `SkipSimplifiedLayerNormalization`, in place.

    Returns:
        The number fused.
    """
    return int(fuse_skip_rms_normalization(model))
