"""SmolLM2-135M of the flavour `trt` against torch on the same weights, in ONNX Runtime's CPU provider."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bundle import Bundle
from paceline_export.parity import PREFILL, SINGLE, VERIFY, check_bundle


@pytest.mark.parametrize("precision", ["fp16", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_real_graph_is_torch(precision: str, smol_trt: Callable[[str], Path]) -> None:
    """A prompt, single rows, a verification, one behind a rollback; of one text, and of three of unequal lengths."""
    (model,) = check_bundle(Bundle.open(smol_trt(precision))).models
    assert model.passed, model.reason
    assert {phase.name: phase.rows for phase in model.phases} == {
        "prefill": PREFILL,
        "single steps": SINGLE,
        "verification": VERIFY,
        "after rollback": VERIFY,
        "batch: prefill": 12,
        "batch: single step": 3,
        "batch: verification": 3 * VERIFY,
        "batch: after rollback": 3 * VERIFY,
    }
    assert model.arithmetic == "fp16"
    # Tighter than the tolerance, which serves larger models, too.
    assert max(phase.max_logit_diff for phase in model.phases) < 0.1
    assert max(phase.kl for phase in model.phases) < 1e-4
