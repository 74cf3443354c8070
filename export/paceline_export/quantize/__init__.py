"""Weight formats: what each `--precision` of the flavour `ort` stores. One file per way of quantising."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALIBRATIONS", "PRECISIONS", "WeightFormat"]

CALIBRATIONS = ("gptq", "none")  # how int4 weights may be chosen


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of one precision are stored.

    Attributes:
        dtype: of activations, caches and unquantised weights.
        bits: of quantised projections; None keeps them in `dtype`.
        attention_bits: of the projections of attention, which hurt most for their size.
        embedding_bits: of the quantised embedding table; it costs no time, so it is never coarser than 8 bits.
        tied_bits: of an LM head that is the embedding table, too, which both read. Where the table is coarser than 8
            bits, every layer pays for it.
        symmetric: whether blocks of `bits` have no zero point; those of 8 bits have none in any case.
        float8: whether projections and what they read are float8 numbers (e4m3), for which a text must tell how large
            the latter get. An LM head, which no text is run through, and the embedding table are integers.
        head_rows: of an LM head of its own, so many first rows are stored in 8 bits. Vocabularies are built by merging
            what is frequent, so that these rows make most of the text, for little of the head's time.
    """

    dtype: str
    bits: int | None
    attention_bits: int | None
    embedding_bits: int | None
    tied_bits: int | None
    symmetric: bool
    float8: bool = False
    head_rows: int = 0

    def projection_bits(self, *, attention: bool) -> int | None:
        """Bits of a projection, for attention or not."""
        return self.attention_bits if attention else self.bits


PRECISIONS = {
    "fp32": WeightFormat("float32", None, None, None, None, symmetric=True),
    "fp16": WeightFormat("float16", None, None, None, None, symmetric=True),
    "int8": WeightFormat("float32", 8, 8, 8, 8, symmetric=True),
    "int4": WeightFormat("float32", 4, 8, 8, 8, symmetric=False, head_rows=32768),
}
