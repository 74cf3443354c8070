"""Open an exported graph in ONNX Runtime's CPU provider, as it is or changed so that it can be compared."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from paceline.bundle import ModelEntry, TensorSpec
from paceline.errors import BundleError
from paceline.ort import OrtModel
from paceline.ort_session import open_session

from .passes.half import to_float16
from .passes.inputs import leave_inputs
from .passes.static_length import set_static_length

__all__ = ["load_graph", "open_on_cpu"]

# Weights are dequantised once, when the graph is loaded, instead of being multiplied in integers.
_NO_FEW_BITS = ("session.disable_quant_qdq", "1")


def open_on_cpu(path: Path, entry: ModelEntry, max_length: int, *, exact: bool = False) -> OrtModel:
    """Open a graph for texts of at most `max_length` positions.

    A graph of the flavour `cuda` rounds no activations, so it is opened as it is. One of the flavour `trt` gets caches
    of that length, since its attention reads all of a cache in each step, and float16 in the place of bfloat16, which
    the CPU provider does not run.

    Args:
        path: of the graph, its weights beside it.
        entry: what the manifest says of it.
        max_length: positions of the longest text.
        exact: leave activations as they are where products, or operators in front of them, round them to 8 bits.

    Raises:
        BundleError: the weights cannot be read.
    """
    if entry.flavor == "cuda" or (entry.flavor == "ort" and not exact):
        return OrtModel(open_session(path), entry)
    model = load_graph(path)
    if entry.flavor == "ort":
        for node in model.graph.all_nodes():
            if node.op_type == "MatMulNBits":
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
        return OrtModel(open_session(_bytes(model), session_config=(_weights_in(path.parent),)), entry)
    if exact:
        leave_inputs(model)
    length = min(max_length, entry.max_length)
    set_static_length(model, length)
    changed = _with_caches(entry, length)
    if entry.kv_dtype != "bfloat16":
        session = open_session(_bytes(model), session_config=(_weights_in(path.parent), _NO_FEW_BITS))
        return OrtModel(session, changed)
    to_float16(model)
    with tempfile.TemporaryDirectory() as folder:  # other weights than those beside the graph
        ir.save(model, Path(folder) / "model.onnx", external_data="model.onnx.data")
        session = open_session(Path(folder) / "model.onnx", session_config=(_NO_FEW_BITS,))
    return OrtModel(session, changed)


def load_graph(path: Path) -> ir.Model:
    """Read a graph and check that its weights can be read.

    Raises:
        BundleError: onnx-ir refuses them, as it does when a file has several hard links.
    """
    model = ir.load(path)
    try:
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value.numpy()
    except (OSError, ValueError) as error:
        raise BundleError(f"The weights of {path} cannot be read: {error} Copy the bundle anew to check it.") from error
    return model


def _bytes(model: ir.Model) -> bytes:
    content: bytes = ir.to_proto(model).SerializeToString()
    return content


def _weights_in(folder: Path) -> tuple[str, str]:
    """Weights stay in their file, which a graph given as bytes finds through this setting."""
    return "session.model_external_initializers_file_folder_path", str(folder.resolve())


def _with_caches(entry: ModelEntry, length: int) -> ModelEntry:
    """The entry of the graph with caches of another length, in float16 where it was bfloat16."""

    def changed(spec: TensorSpec) -> TensorSpec:
        if not spec.name.startswith(("past_key_values.", "present.")):
            return spec
        batch, heads, _, size = spec.shape
        return TensorSpec(spec.name, dtype, (batch, heads, length, size))

    dtype: Literal["float32", "float16"] = "float32" if entry.kv_dtype == "float32" else "float16"

    return dataclasses.replace(
        entry,
        max_length=length,
        kv_dtype=dtype,
        inputs=tuple(map(changed, entry.inputs)),
        outputs=tuple(map(changed, entry.outputs)),
    )
