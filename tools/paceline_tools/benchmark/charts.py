"""Charts as SVG: lines, columns, ranges and stacks. Colours are classes `c0`, `c1`, … that the page's style defines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

__all__ = ["COLOURS", "Range", "Series", "columns", "lines", "ranges", "stacks"]

COLOURS = 8
# The page shows a chart at 300 to 560 pixels, with larger letters on a phone.
_WIDTH = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 20, 12, 40
_HEIGHT = 250
# Intervals of few prompts are wide: they are cut at so many times the largest value.
_MOST_REACH = 1.5
_SIDE = 20  # where values stand below, on both sides


@dataclass(frozen=True, slots=True)
class Series:
    """One line or set of columns.

    Attributes:
        name: in tooltips.
        colour: number of its class.
        points: `(x, y)`; of columns, y alone counts.
        ranges: `(low, high)` of each point, or None.
        dashed: a prediction.
        dots: mark each point.
    """

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    ranges: Sequence[tuple[float, float] | None] = ()
    dashed: bool = False
    dots: bool = True


@dataclass(frozen=True, slots=True)
class Range:
    """A value with its interval, in a row of `ranges`."""

    name: str
    colour: int
    value: float
    low: float | None
    high: float | None


@dataclass(slots=True)
class _Axis:
    """From values to places between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        """Widen to whole ticks, of which there are about five."""
        span = self.high - self.low or 1.0
        rough = span / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first, last = math.floor(self.low / step + 1e-9), math.ceil(self.high / step - 1e-9)
        self.ticks = [step * tick for tick in range(first, max(last, first + 1) + 1)]
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def at(self, value: float) -> float:
        """Where a value stands; one beyond the axis stands at its end."""
        value = min(max(value, self.low), self.high)
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class _Canvas:
    def __init__(self, height: float, label: str) -> None:
        self._height = height
        self._label = label
        self._parts: list[Markup] = []

    def add(self, form: str, *values: object) -> None:
        """Add an element; every value is escaped, numbers are rounded."""
        self._parts.append(Markup(form).format(*(round(v, 1) if isinstance(v, float) else v for v in values)))

    def svg(self) -> Markup:
        form = '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
        return Markup(form).format(_WIDTH, round(self._height), self._label, Markup("\n").join(self._parts))

    def text(self, x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> None:
        self.add('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>', x, y, anchor, kind, text)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>', x1, y1, x2, y2, kind)

    def axes(self, x: _Axis, y: _Axis, x_label: str, y_label: str, unit: str, *, x_ticks: bool = True) -> None:
        """Horizontal grid lines with their values, and the values below."""
        for tick in y.ticks:
            self.line(x.start, y.at(tick), x.end, y.at(tick), "mesh")
            self.text(x.start - 6, y.at(tick) + 4, f"{tick:g}{unit}", "end")
        for tick in x.ticks if x_ticks else ():
            self.text(x.at(tick), y.start + 16, f"{tick:g}")
        self.text((x.start + x.end) / 2, y.start + 33, x_label, kind="axis")
        self.text(4, _TOP + 2, y_label, "start", "axis")


def lines(
    label: str, series: Sequence[Series], x_label: str, y_label: str, *, unit: str = "", base: float | None = None
) -> Markup:
    """Lines over a common x axis; `base` draws a level to compare with."""
    ys = [*(y for one in series for _, y in one.points), *([] if base is None else [base])]
    most = _MOST_REACH * max(ys)
    ys += [min(end, most) for one in series for found in one.ranges if found for end in found]
    xs = [x for one in series for x, _ in one.points]
    x = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    if all(float(value).is_integer() for value in xs) and max(xs) - min(xs) <= 16:
        x.low, x.high = min(xs) - 0.3, max(xs) + 0.3
        places = range(round(min(xs)), round(max(xs)) + 1)
        x.ticks = [float(tick) for tick in places[:: 1 + len(places) // 10]]
    y = _Axis(min(0.0, *ys), max(ys), _HEIGHT - _BOTTOM, _TOP + 14)
    canvas = _Canvas(_HEIGHT, label)
    canvas.axes(x, y, x_label, y_label, unit)
    if base is not None:
        canvas.line(x.start, y.at(base), x.end, y.at(base), "base")
    for one in series:
        path = " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in one.points)
        kind = "dashed" if one.dashed else "line"
        canvas.add(
            '<polyline points="{}" class="{} c{}"><title>{}</title></polyline>', path, kind, one.colour, one.name
        )
        for index, (a, b) in enumerate(one.points if one.dots else ()):
            found = one.ranges[index] if one.ranges else None
            if found:
                canvas.line(x.at(a), y.at(found[0]), x.at(a), y.at(found[1]), f"whisker c{one.colour}")
            text = f"{one.name}, {a:g}: {b:.3g}{unit}"
            form = '<circle cx="{}" cy="{}" r="4" class="dot c{}"><title>{}</title></circle>'
            canvas.add(form, x.at(a), y.at(b), one.colour, text)
    return canvas.svg()


def columns(label: str, series: Sequence[Series], x_label: str, y_label: str, *, unit: str = "") -> Markup:
    """Columns beside each other: x of a point is a whole number."""
    places = max(int(x) for one in series for x, _ in one.points) + 1
    y = _Axis(0.0, max(y for one in series for _, y in one.points), _HEIGHT - _BOTTOM, _TOP + 14)
    x = _Axis(0.0, 1.0, _LEFT, _WIDTH - _RIGHT)
    canvas = _Canvas(_HEIGHT, label)
    canvas.axes(x, y, x_label, y_label, unit, x_ticks=False)
    room = (x.end - x.start) / places
    width = 0.8 * room / len(series)
    for number in range(0, places, 1 + places // 10):
        canvas.text(x.start + (number + 0.5) * room, y.start + 16, str(number))
    for index, one in enumerate(series):
        for place, value in one.points:
            left = x.start + (place + 0.1) * room + index * width
            top = y.at(value)
            form = '<rect x="{}" y="{}" width="{}" height="{}" class="bar c{}"><title>{}</title></rect>'
            text = f"{one.name}, {place:g}: {value:.3g}{unit}"
            canvas.add(form, left, top, max(width - 1, 1.0), max(y.start - top, 0.0), one.colour, text)
    return canvas.svg()


def ranges(label: str, rows: Sequence[tuple[str, Sequence[Range]]], x_label: str, *, unit: str, base: float) -> Markup:
    """A row for each name, with values and their intervals below each other; `base` is a level to compare with."""
    most = _MOST_REACH * max(base, *(one.value for _, found in rows for one in found))
    ends = [end for _, found in rows for one in found for end in (one.value, one.low, one.high) if end is not None]
    x = _Axis(min(*ends, base), min(max(*ends, base), most), _SIDE, _WIDTH - _SIDE)
    heights = [24 + 14 * len(found) for _, found in rows]
    bottom = sum(heights) + 8
    canvas = _Canvas(bottom + _BOTTOM, label)
    for tick in x.ticks:
        canvas.line(x.at(tick), 4, x.at(tick), bottom, "mesh")
        canvas.text(x.at(tick), bottom + 16, f"{tick:g}{unit}")
    canvas.line(x.at(base), 4, x.at(base), bottom, "base")
    canvas.text((x.start + x.end) / 2, bottom + 33, x_label, kind="axis")
    top = 4.0
    for (name, found), height in zip(rows, heights, strict=True):
        canvas.text(4, top + 14, name, "start", "row")
        for index, one in enumerate(found):
            y = top + 26 + 14 * index
            text = f"{name}, {one.name}: {one.value:.2f}{unit}"
            if one.low is not None and one.high is not None:
                canvas.line(x.at(one.low), y, x.at(one.high), y, f"whisker c{one.colour}")
                text += f" ({one.low:.2f} to {one.high:.2f})"
            form = '<circle cx="{}" cy="{}" r="4.5" class="dot c{}"><title>{}</title></circle>'
            canvas.add(form, x.at(one.value), y, one.colour, text)
        top += height
    return canvas.svg()


def stacks(label: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], x_label: str) -> Markup:
    """A bar of shares for each name; the n-th share has colour n."""
    x = _Axis(0.0, 100.0, _SIDE, _WIDTH - _SIDE)
    bottom = 44.0 * len(rows) + 4
    canvas = _Canvas(bottom + _BOTTOM, label)
    for tick in x.ticks:
        canvas.line(x.at(tick), 4, x.at(tick), bottom, "mesh")
        canvas.text(x.at(tick), bottom + 16, f"{tick:g} %")
    canvas.text((x.start + x.end) / 2, bottom + 33, x_label, kind="axis")
    for index, (name, shares) in enumerate(rows):
        top = 44.0 * index + 4
        canvas.text(4, top + 14, name, "start", "row")
        begin = 0.0
        for colour, (part, share) in enumerate(shares):
            width = max(100 * share, 0.0)
            form = '<rect x="{}" y="{}" width="{}" height="18" class="bar c{}"><title>{}</title></rect>'
            text = f"{name}, {part}: {100 * share:.1f} %"
            canvas.add(form, x.at(begin), top + 20, x.at(begin + width) - x.at(begin), colour, text)
            begin += width
    return canvas.svg()
