"""The sampler's graphs in TensorRT-RTX, which parses and builds for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest

from paceline.engines import shared_log
from paceline_export.sampler.draft import greedy_sampler, sampler
from paceline_export.sampler.verify import block_verifier, deterministic_verifier, greedy_verifier, token_verifier

trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'paceline[trt]'")

GRAPHS: dict[str, Callable[[int, int], onnx.ModelProto]] = {
    "token": token_verifier,
    "block": block_verifier,
    "deterministic": deterministic_verifier,
    "greedy": greedy_verifier,
    "draft": sampler,
    "greedy_draft": greedy_sampler,
    "draft with ids of its own": lambda vocab_size, width: sampler(vocab_size, width // 2, range(0, width // 2 * 2, 2)),
}
ROWS = (1, 5, 9)  # least, usual, most: K from 0 to 8
INTEGERS = "binding."  # "Make sure input drafted has Int64 binding.": they have


def build(model: onnx.ModelProto, capability: str) -> list[str]:
    """Build an engine and return the warnings and errors of TensorRT."""
    said: list[str] = []

    def listen(severity: Any, message: str) -> None:
        if severity <= trt.ILogger.WARNING and not message.endswith(INTEGERS):
            said.append(message)

    log = shared_log(trt)
    log.listeners.append(listen)
    try:
        plan = _build(model, capability, log)
        return said if plan is not None else [*said, "no engine was built"]
    finally:
        log.listeners.remove(listen)


def _build(model: onnx.ModelProto, capability: str, log: Any) -> Any:
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(model.SerializeToString()):
        return None
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 in tuple(tensor.shape):
            profile.set_shape(
                tensor.name, *(tuple(rows if size == -1 else size for size in tensor.shape) for rows in ROWS)
            )
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_builds(name: str) -> None:
    assert build(GRAPHS[name](2000, 2048), "SM89") == []


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["SM86", "SM89", "SM120"])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_of_a_large_vocabulary_builds_for_every_gpu(name: str, capability: str) -> None:
    assert build(GRAPHS[name](151_665, 151_936), capability) == []
