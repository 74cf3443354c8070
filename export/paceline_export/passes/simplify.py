"""Fold constants, and drop operators that do nothing or undo each other, which traces are full of.

These are the steps of `onnxscript.optimizer.optimize_ir` with the rules that decoders meet. The others are about
convolutions and normalisation by batches; and one, which makes slices a split, goes through the whole graph for each of
its nodes: with it a third of the trace of a model of 30 layers was spent here.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common

__all__ = ["simplify"]

_RULES = (
    common.mul_by_1_rule,
    common.add_0_rule,
    common.sub_0_rule,
    common.div_by_1_rule,
    common.two_reshapes_matmul_reshape_rule,
    common.one_reshape_matmul_reshape_rule,
    common.cast_constant_of_shape_rule,
    common.cast_constant_of_shape_without_value_rule,
    common.collapse_slice_rule,
    common.collapse_slice2_rule,
    common.materialize_reshape_shape_rule,
    common.cast_cast_rule,
    common.no_op_cast_rule,
    common.no_op_expand_rule,
    common.reshape_reshape_rule,
    common.no_op_transpose_rule,
    common.transpose_transpose_rule,
    common.unsqueeze_unsqueeze_rule,
    common.squeeze_reshape_1d_rule,
    common.min_min_rule,
    common.max_max_rule,
    common.min_max_rule,
    common.max_min_rule,
)
_ROUNDS = 2  # a rule may make work for the folding, and the other way round


def simplify(model: ir.Model) -> None:
    """Change the model in place."""
    rewrite = RewritePass(_RULES)
    for _ in range(_ROUNDS):
        folded = onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True)
        rewritten = rewrite(model)
        passes.RemoveUnusedNodesPass()(model)
        if not (folded.modified or rewritten.modified):
            break
    ir.passes.Sequential(
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
