"""How commands print figures: tables of plain text, and numbers with units."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bundle import QualityEntry

__all__ = ["duration", "number", "percent", "quality_table", "size", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by their widest cell: the first to the left, the others to the right; no newline at the end."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def quality_table(quality: QualityEntry) -> str:
    """What stored weights cost on each held-out text."""
    header = ("text", "positions", "KL, nats", "best token agrees", "perplexity", "in full precision")
    rows = [
        (
            name,
            str(text.positions),
            number(text.kl, 4),
            percent(text.argmax_agreement),
            number(text.perplexity, 3),
            number(text.full_perplexity, 3),
        )
        for name, text in (("prompts", quality.prompts), ("code", quality.code))
    ]
    return table(header, rows)


def size(num_bytes: float) -> str:
    """A number of bytes in the decimal unit that suits it: `1.12 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """A time in seconds, or in minutes and seconds: `0.42 s`, `2 min 05 s`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure with `digits` decimals, or a dash where it is not defined."""
    return "–" if value is None else f"{value:z.{digits}f}{unit}"  # z: never a minus before zero


def percent(fraction: float | None) -> str:
    """A fraction as a percentage, or a dash where it is not defined."""
    return number(None if fraction is None else 100 * fraction, 1, " %")
