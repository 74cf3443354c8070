"""Let an embedding table that the LM head shares be read from disk row by row."""

from __future__ import annotations

from pathlib import Path

import onnx

__all__ = ["alias_tied_table"]


def alias_tied_table(path: Path) -> None:
    """Give the table of a saved graph an initializer of its own over the head's bytes in the file of weights.

    ONNX Runtime keeps a repacked copy of the head. Were the table the same initializer, the original would stay in
    memory beside it for the few rows that are looked up; a mapping of its own holds the pages of these rows alone.
    """
    model = onnx.load(path, load_external_data=False)
    initializers = {initializer.name: initializer for initializer in model.graph.initializer}
    heads = {node.input[1] for node in model.graph.node if node.op_type == "MatMulNBits"}
    shared = [n for n in model.graph.node if n.op_type == "GatherBlockQuantized" and n.input[0] in heads]
    for node in shared:
        table = onnx.TensorProto()
        table.CopyFrom(initializers[node.input[0]])
        if not table.external_data:
            continue  # so small that it lies in the graph itself
        table.name = node.input[0].removesuffix(".q") + ".table"
        model.graph.initializer.append(table)
        node.input[0] = table.name
    if shared:
        path.write_bytes(model.SerializeToString())
