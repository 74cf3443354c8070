"""Print what single operators of ONNX Runtime take on this machine: `python tests/export/measure_kernels.py PART`.

`weights`: products of a 0.5B draft's shapes by few-bit weights, as a ratio to 4 bits in blocks of 128 with zero points.
`attention`: that of a 1.5B model behind caches of several lengths, as shipped, in float16, with keys and values in 8 or
4 bits, and as `--long-context` folds it. Each is also compared with the first in numbers.

Ways run in turns, and medians are printed. With `--threads 1` processor time is taken, which other work disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from paceline_export.passes import folded

# Rows and columns of the weights of a layer, and the number of layers: Qwen2.5 0.5B.
WEIGHTS = {"mlp": ([(9728, 896), (896, 4864)], 24), "attention": ([(1152, 896), (896, 896)], 24)}
HEADS, KV_HEADS, SIZE = 12, 2, 128  # Qwen2.5 1.5B
ROWS = (1, 3, 5)
LARGEST = 4.0  # of the numbers in caches: what the levels of few bits reach to
_IR = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int8": ir.DataType.INT8}
Clock = Callable[[], float]


def session(graph: ir.Graph, config: Sequence[tuple[str, str]] = ()) -> Any:
    options = ort.SessionOptions()
    options.use_per_session_threads, options.log_severity_level = False, 4
    for key, value in config:
        options.add_session_config_entry(key, value)
    return ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), options)


def value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def graph_of(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Sequence[ir.Node], constants: Any) -> Any:
    domains = {"": 21, "com.microsoft": 1}
    return ir.Graph(inputs, outputs, nodes=nodes, initializers=constants, opset_imports=domains, name="measured")


def filled(name: str, array: NDArray[Any]) -> ir.Value:
    made = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    made.type, made.shape = ir.TensorType(made.const_value.dtype), made.const_value.shape
    return made


def products(kind: str, layers: int, bits: int, block: int, *, symmetric: bool, table: bool) -> Any:
    """A session of all products of this kind."""
    shapes, most = WEIGHTS[kind]
    rng = np.random.default_rng(0)
    inputs = {columns: value(f"x{columns}", ir.DataType.FLOAT, ["rows", columns]) for _, columns in shapes}
    nodes: list[ir.Node] = []
    outputs: list[ir.Value] = []
    constants: list[ir.Value] = []
    for layer in range(min(layers, most)):
        for rows, columns in shapes:
            blocks, name = -(-columns // block), f"{layer}.{columns}.{rows}"
            packed = rng.integers(0, 256, (rows, blocks, block * bits // 8), np.uint8)
            parts = [filled(f"w{name}", packed), filled(f"s{name}", np.full(rows * blocks, 0.01, np.float32))]
            if not symmetric:
                parts.append(filled(f"z{name}", rng.integers(0, 256, rows * (-(-blocks * bits // 8)), np.uint8)))
            sizes = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 4}
            node = ir.node("MatMulNBits", [inputs[columns], *parts], sizes, domain="com.microsoft")
            made = node.outputs[0]
            made.name, made.type, made.shape = f"o{name}", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["rows", rows])
            nodes.append(node)
            outputs.append(made)
            constants += parts
    config = [("mlas.use_lut_gemm", "1")] if table else []
    return session(graph_of(list(inputs.values()), outputs, nodes, constants), config)


def measure_weights(layers: int, repeats: int, clock: Clock) -> None:
    rng = np.random.default_rng(0)
    ways = [(8, 128, True, False)]
    ways += [(4, 32, False, False), (4, 64, False, False), (4, 128, False, False), (4, 128, True, False)]
    ways += [(4, 256, False, False), (3, 128, False, False), (2, 32, False, False), (2, 64, False, False)]
    ways += [(2, 128, False, False), (2, 32, False, True), (2, 64, False, True), (2, 128, False, True)]
    for kind in WEIGHTS:
        sessions = {}
        for bits, block, symmetric, table in ways:
            name = f"{bits} bits/{block}{', symmetric' if symmetric else ''}{', table' if table else ''}"
            try:
                sessions[name] = products(kind, layers, bits, block, symmetric=symmetric, table=table)
            except Exception as error:
                print(f"{kind}, {name}: {str(error).strip().splitlines()[-1][-120:]}")
        for rows in ROWS:
            times: dict[str, list[float]] = {name: [] for name in sessions}
            for repeat in range(repeats + 1):
                for name, one in sessions.items():
                    fed = {i.name: rng.standard_normal((rows, i.shape[1]), np.float32) for i in one.get_inputs()}
                    started = clock()
                    one.run(None, fed)
                    if repeat:
                        times[name].append(clock() - started)
            base = statistics.median(times["4 bits/128"])
            figures = "  ".join(f"{name} {statistics.median(taken) / base:.2f}" for name, taken in times.items())
            print(f"{kind}, {rows} rows, ratios: {figures}", flush=True)


def attention(layers: int, cache: str, bits: int = 0, *, folds: bool = False) -> Any:
    """A session of all layers' attention with rotation, caches of this dtype."""
    io, kept = _IR["float16" if cache == "float16" else "float32"], ir.DataType.UINT8 if bits == 4 else _IR[cache]
    width = SIZE // 2 if bits == 4 else SIZE
    angles = np.arange(1 << 14)[:, None] / 1e6 ** (np.arange(SIZE // 2) / (SIZE // 2))
    tables = [filled(name, one.astype(io.numpy())) for name, one in (("cos", np.cos(angles)), ("sin", np.sin(angles)))]
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    ids = value("input_ids", ir.DataType.INT64, [1, "rows"])
    rows = [value(name, io, [1, "rows", count * SIZE]) for name, count in heads.items()]
    counters = [value("seqlens_k", ir.DataType.INT32, [1]), value("total", ir.DataType.INT32, [])]
    attributes: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": SIZE**-0.5, "do_rotary": 1}
    more: list[ir.Value | None] = []
    constants = list(tables)
    if bits:
        scale = filled("scale", np.full((KV_HEADS, 1, SIZE), LARGEST / (2 ** (bits - 1) - 1), np.float32))
        constants.append(scale)
        more = [None, None, None, scale, scale]
        quantised = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        attributes |= {**quantised, "kv_cache_bit_width": bits}
    inputs = [ids, *rows, *counters]
    outputs: list[ir.Value] = []
    nodes: list[ir.Node] = []
    for layer in range(layers):
        shape: list[int | str] = [1, KV_HEADS, "positions", width]
        past = [value(f"past.{layer}.{what}", kept, shape) for what in ("key", "value")]
        read = [*rows, *past, *counters, *tables, *more]
        node = ir.node("GroupQueryAttention", read, attributes, domain="com.microsoft", num_outputs=3)
        for one, name, like in zip(node.outputs, ("out", "key", "value"), (rows[0], *past), strict=True):
            one.name, one.type, one.shape = f"present.{layer}.{name}", like.type, like.shape
        inputs += past
        outputs += node.outputs
        nodes.append(node)
    model = ir.Model(graph_of(inputs, outputs, nodes, constants), ir_version=10)
    if folds:
        folded.fold_query_heads(model)
    return session(model.graph)


class Caches:
    """Bound buffers of a session of `attention`, the same numbers for every dtype."""

    def __init__(self, one: Any, length: int) -> None:
        self.session, self.binding = one, one.io_binding()
        rng = np.random.default_rng(1)
        numbers = rng.standard_normal((1, KV_HEADS, length + max(ROWS), SIZE), np.float32).clip(-LARGEST, LARGEST)
        for given in one.get_inputs():
            if given.name.startswith("past."):
                buffer = ort.OrtValue.ortvalue_from_numpy(_stored(numbers, given.type))
                self.binding.bind_ortvalue_input(given.name, buffer)
                self.binding.bind_ortvalue_output(given.name.replace("past", "present"), buffer)

    def feed(self, rows: int, length: int) -> None:
        rng = np.random.default_rng(2)
        for given in self.session.get_inputs()[1:4]:
            dtype = np.float16 if given.type == "tensor(float16)" else np.float32
            self.binding.bind_cpu_input(given.name, rng.standard_normal((1, rows, given.shape[2])).astype(dtype))
        self.binding.bind_cpu_input("input_ids", np.zeros((1, rows), np.int64))
        self.binding.bind_cpu_input("seqlens_k", np.array([length + rows - 1], np.int32))
        self.binding.bind_cpu_input("total", np.array(length + rows, np.int32))
        for made in self.session.get_outputs():
            if made.name.endswith(".out"):
                self.binding.bind_output(made.name)

    def run(self, clock: Clock) -> float:
        started = clock()
        self.session.run_with_iobinding(self.binding)
        return clock() - started

    def output(self) -> NDArray[np.float32]:
        """Of the last layer, which was bound last."""
        found: NDArray[np.float32] = self.binding.get_outputs()[-1].numpy().astype(np.float32)
        return found


def _stored(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "tensor(int8)":
        whole: NDArray[np.int8] = np.rint(numbers / LARGEST * 127).astype(np.int8)
        return whole
    if dtype == "tensor(uint8)":  # two levels of 4 bits a byte, 8 being zero
        levels: NDArray[np.uint8] = np.rint(numbers / LARGEST * 7).astype(np.int8).astype(np.uint8) + np.uint8(8)
        packed: NDArray[np.uint8] = np.ascontiguousarray(levels[..., 0::2] | levels[..., 1::2] << np.uint8(4))
        return packed
    return numbers.astype(np.float16 if dtype == "tensor(float16)" else np.float32)


def measure_attention(layers: int, repeats: int, clock: Clock, lengths: Sequence[int]) -> None:
    folded.LEAST_LENGTH = 0
    ways = {
        "as shipped": attention(layers, "float32"),
        "float16": attention(layers, "float16"),
        "8 bits": attention(layers, "int8", 8),
        "4 bits": attention(layers, "int8", 4),
        "folded": attention(layers, "float32", folds=True),
    }
    for length in lengths:
        caches = {name: Caches(one, length) for name, one in ways.items()}
        for rows in ROWS:
            times: dict[str, list[float]] = {name: [] for name in ways}
            for repeat in range(repeats + 1):
                for name, one in caches.items():
                    if not repeat:
                        one.feed(rows, length)
                    taken = one.run(clock)
                    if repeat:
                        times[name].append(taken * 1e3 * 28 / layers)
            first = caches["as shipped"].output()
            figures = (
                f"{name} {statistics.median(taken):.1f} ms (off by {np.abs(caches[name].output() - first).max():.0e})"
                for name, taken in times.items()
            )
            print(f"28 layers behind {length} positions, {rows} rows: {'  '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("weights", "attention"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=28, help="that are run; of attention, times are scaled to 28")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    ort.set_global_thread_pool_sizes(options.threads, 1)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    if options.part == "weights":
        measure_weights(options.layers, options.repeats, clock)
    else:
        measure_attention(options.layers, options.repeats, clock, options.lengths)


if __name__ == "__main__":
    main()
