"""A small graph with the operators of the flavour `trt`, made by hand, in which faults can be planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from paceline.bundle import EngineProfile

LENGTH, HEADS, SIZE, LAYERS, VOCAB = 128, 2, 64, 2, 64


def small_graph(
    *,
    size: int = SIZE,
    vocab: int = VOCAB,
    nonpad: bool = False,
    unused: bool = False,
    unfused: bool = False,
    mask_behind: bool = False,
) -> onnx.ModelProto:
    """Two layers of attention over caches, with a mask that both share.

    Args:
        size: of a head.
        vocab: rows of the embedding's table.
        nonpad: valid lengths reach the attention as its last input instead of the mask.
        unused: an input that nothing reads.
        unfused: the attention is written out, and its weights are used once more.
        mask_behind: the attention is written out, and its mask multiplies the weights, behind the softmax.
    """
    width = HEADS * size
    rng = np.random.default_rng(0)
    half, int64 = TensorProto.FLOAT16, TensorProto.INT64
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {
        "table": (rng.standard_normal((vocab, width)) * 0.1).astype(np.float16),
        "positions": np.arange(LENGTH),
        "one": np.array(1),
        "zero": np.array(0),
        "axes1": np.array([1]),
        "axis": np.array([-1]),
        "axes3": np.array([1, 3]),
        "split": np.array([0, 0, HEADS, size]),
        "join": np.array([0, 0, width]),
        "visible": np.array(0, np.float16),
        "hidden": np.array(np.finfo(np.float16).min, np.float16),
        "scale": np.array(size**-0.5, np.float16),
    }

    def add(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=f"n_{output}", **attributes))
        return output

    add("Gather", ["table", "input_ids"], "x0")
    add("Shape", ["input_ids"], "shape")
    add("Gather", ["shape", "one"], "rows")
    add("Range", ["zero", "rows", "one"], "offsets")
    add("Unsqueeze", ["write_indices", "axes1"], "starts")
    add("Add", ["starts", "offsets"], "at")
    add("Unsqueeze", ["at", "axes3"], "at4")
    add("LessOrEqual", ["positions", "at4"], "seen")
    mask = add("Where", ["seen", "visible", "hidden"], "mask")
    if mask_behind:
        add("Cast", ["seen"], "shown", to=half)
    if nonpad:
        add("Add", ["write_indices", "rows"], "lengths")
    past: list[str] = []
    for layer in range(LAYERS):
        x = f"x{layer}"
        parts = {}
        for part in ("q", "k", "v"):
            constants[f"{part}{layer}"] = (rng.standard_normal((width, width)) * 0.1).astype(np.float16)
            add("MatMul", [x, f"{part}{layer}"], f"{part}{layer}_flat")
            add("Reshape", [f"{part}{layer}_flat", "split"], f"{part}{layer}_split")
            parts[part] = add("Transpose", [f"{part}{layer}_split"], f"{part}{layer}_heads", perm=[0, 2, 1, 3])
        kept = {}
        for part, name in (("k", "key"), ("v", "value")):
            cache = f"past_key_values.{layer}.{name}"
            past.append(cache)
            inputs = [cache, parts[part], "write_indices"]
            kept[part] = add("TensorScatter", inputs, f"present.{layer}.{name}", axis=2, mode="linear")
        if unfused or mask_behind:
            add("Transpose", [kept["k"]], f"kt{layer}", perm=[0, 1, 3, 2])
            add("MatMul", [parts["q"], f"kt{layer}"], f"raw{layer}")
        if mask_behind:
            add("Softmax", [f"raw{layer}"], f"weights{layer}", axis=-1)
            add("Mul", [f"weights{layer}", "shown"], f"masked{layer}")
            add("MatMul", [f"masked{layer}", kept["v"]], f"a{layer}")
        elif unfused:
            add("Add", [f"raw{layer}", mask], f"scores{layer}")
            add("Softmax", [f"scores{layer}"], f"weights{layer}", axis=-1)
            add("MatMul", [f"weights{layer}", kept["v"]], f"values{layer}")
            add("ReduceMax", [f"weights{layer}", "axis"], f"most{layer}")  # what no kernel for attention gives
            add("Mul", [f"values{layer}", f"most{layer}"], f"a{layer}")
        else:
            last = ["", "", "", "lengths"] if nonpad else [mask]
            inputs = [parts["q"], kept["k"], kept["v"], *last]
            add("Attention", inputs, f"a{layer}", scale=size**-0.5)
        add("Transpose", [f"a{layer}"], f"a{layer}_rows", perm=[0, 2, 1, 3])
        add("Reshape", [f"a{layer}_rows", "join"], f"a{layer}_flat")
        add("Add", [x, f"a{layer}_flat"], f"x{layer + 1}")
    add("Cast", [f"x{LAYERS}"], "logits", to=TensorProto.FLOAT)

    cache_shape: list[str | int | None] = ["batch", HEADS, LENGTH, size]
    given = [
        helper.make_tensor_value_info("input_ids", int64, ["batch", "rows"]),
        helper.make_tensor_value_info("write_indices", int64, ["batch"]),
        *(helper.make_tensor_value_info(name, half, cache_shape) for name in past),
    ]
    if unused:
        given.append(helper.make_tensor_value_info("forgotten", half, ["batch", 4]))
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "rows", width]),
        *(
            helper.make_tensor_value_info(name.replace("past_key_values", "present"), half, cache_shape)
            for name in past
        ),
    ]
    values = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "small", given, outputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def write_small_graph(folder: Path, **faults: Any) -> Path:
    path = folder / "model.onnx"
    onnx.save(small_graph(**faults), path)
    return path


def small_profiles(rows: int = 5, batch: int = 2, size: int = SIZE) -> tuple[EngineProfile, EngineProfile]:
    def profile(name: str, most: int) -> EngineProfile:
        caches = ((1, HEADS, LENGTH, size), *[(batch, HEADS, LENGTH, size)] * 2)
        past = (f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value"))
        shapes = {"input_ids": ((1, 1), (batch, most), (batch, most)), "write_indices": ((1,), (batch,), (batch,))}
        return EngineProfile(name, {**shapes, **dict.fromkeys(past, caches)})

    return profile("verify", rows), profile("prefill", 64)
