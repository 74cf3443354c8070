"""Weight formats: what each `--precision` of the flavour `ort` stores. One file per way of quantising."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRECISIONS", "WeightFormat"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of one precision are stored.

    Attributes:
        dtype: of activations, caches and unquantised weights.
        bits: of quantised projections; None keeps them in `dtype`.
        embedding_bits: of the quantised embedding table; it costs no time, so it is never coarser than 8 bits.
        tied_bits: of an LM head that is the embedding table, too, which both read. Where the table is coarser than 8
            bits, every layer pays for it.
        symmetric: whether quantisation blocks have no zero point.
    """

    dtype: str
    bits: int | None
    embedding_bits: int | None
    tied_bits: int | None
    symmetric: bool


PRECISIONS = {
    "fp32": WeightFormat("float32", None, None, None, True),
    "fp16": WeightFormat("float16", None, None, None, True),
    "int8": WeightFormat("float32", 8, 8, 8, True),
    "int4": WeightFormat("float32", 4, 8, 8, True),
}
