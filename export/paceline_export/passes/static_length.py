"""Give the caches of a graph, whose length is a number in it, another one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from paceline.errors import InvalidInputError

__all__ = ["IN_PIECES", "POSITIONS", "set_static_length"]

# In the metadata of a graph: how many layers attend by products and a softmax. Here, since builds import no torch.
IN_PIECES = "paceline.attention_in_pieces"

# The graph's only table of as many integers: the positions of a cache.
POSITIONS = "rotary.positions"


def set_static_length(model: ir.Model, length: int) -> None:
    """Shorten the caches of a graph of the flavour `trt`, in place; weights and tables of rotation stay.

    Args:
        model: as exported.
        length: new number of positions.

    Raises:
        InvalidInputError: more positions than the graph has tables for.
    """
    positions = model.graph.initializers[POSITIONS]
    exported = int(positions.shape[0])
    if not 1 <= length <= exported:
        raise InvalidInputError(
            f"A length of {length} positions was asked for, and the graph was exported for 1 to {exported}; export it "
            "again with a larger --max-length."
        )
    positions.const_value = ir.tensor(np.arange(length), name=POSITIONS)
    positions.shape = ir.Shape([length])
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_key_values.", "present.")):
            batch, heads, _, size = value.shape
            value.shape = ir.Shape([batch, heads, length, size])
    for node in model.graph:  # what was inferred for the old length
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
