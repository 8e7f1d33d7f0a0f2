"""Line charts as SVG: axes, and what is drawn between them. Small, so that text stays readable on a phone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .markup import Markup, joined, tag

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 48, 390, 12, 192
_MOST_POINTS = 400  # of a line: more than there are pixels

_ROOM = 1.6  # at the ends of a log axis

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Where a number lies, in units of the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]
    name: str
    say: Callable[[float], str]

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value
        )  # fmt: skip
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)


def x_axis(values: Sequence[float], name: str, say: Callable[[float], str], *, log: bool = False) -> Axis:
    return _axis(values, LEFT, RIGHT, name, say, log)


def tight_x_axis(low: float, high: float, name: str, say: Callable[[float], str]) -> Axis:
    """Without room at its ends."""
    axis = x_axis([low, high], name, say)
    return replace(axis, low=low, high=high, ticks=tuple(tick for tick in axis.ticks if low <= tick <= high))


def y_axis(values: Iterable[float], name: str, say: Callable[[float], str], *, log: bool = False) -> Axis:
    return _axis(values, BOTTOM, TOP, name, say, log)


def _axis(values: Iterable[float], start: float, end: float, name: str, say: Callable[[float], str], log: bool) -> Axis:
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    low, high = min(shown), max(shown)
    if log:
        low, high = low / _ROOM, high * _ROOM
        return Axis(low, high, start, end, True, _log_ticks(low, high), name, say)
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    room = 0.08 * (high - low)  # for what is written beside the lowest point
    return Axis(low - room if low else 0.0, high + room / 2, start, end, False, ticks, name, say)


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """About five round numbers."""
    span = (high - low) or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return tuple(round(number * step, 12) for number in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten, at most six of them; with their parts where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    parts = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first == 3 else (1,)
    every = math.ceil((last - first + 1) / 7)
    found = [10.0**exponent * part for exponent in range(first, last + 1, every) for part in parts]
    return tuple(tick for tick in found if low <= tick <= high)


# ------------------------------------------------------------------------------------------------------------ the parts


def chart(title: str, x: Axis, y: Axis, *parts: Markup) -> Markup:
    """The picture. Its title says in words what it shows."""
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", tag("title", title), _grid(x, y), *parts, viewBox=size, role="img", class_="chart")


def _grid(x: Axis, y: Axis) -> Markup:
    return joined(
        *(tag("line", x1=LEFT, x2=RIGHT, y1=y(tick), y2=y(tick), class_="grid") for tick in y.ticks),
        *(text(y.say(tick), LEFT - 6, y(tick) + 4, "end") for tick in y.ticks),
        *(text(x.say(tick), x(tick), BOTTOM + 20, "middle") for tick in x.ticks),
        tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"),
        text(x.name, (LEFT + RIGHT) / 2, BOTTOM + 38, "middle", "name"),
    )


def text(words: str, x: float, y: float, anchor: str, class_: str = "tick") -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def line(points: Points, x: Axis, y: Axis, class_: str, *, steps: bool = False) -> Markup:
    """Through all points that can be drawn; with steps, flat from each to the next."""
    shown = _thinned([point for point in points if _is_drawable(point, x, y)])
    path = "".join(
        (f"H{x(a)}V{y(b)}" if steps else f"L{x(a)} {y(b)}") if number else f"M{x(a)} {y(b)}"
        for number, (a, b) in enumerate(shown)
    )
    return tag("path", d=path, class_=f"line {class_}") if path else joined()


def dots(points: Points, titles: Sequence[str], x: Axis, y: Axis, class_: str, radius: float = 4) -> Markup:
    return joined(
        *(
            tag("circle", tag("title", title), cx=x(point[0]), cy=y(point[1]), r=radius, class_=class_)
            for point, title in zip(points, titles, strict=True)
            if _is_drawable(point, x, y)
        )
    )


def diamonds(points: Points, titles: Sequence[str], x: Axis, y: Axis, class_: str) -> Markup:
    return joined(
        *(
            tag("path", tag("title", title), d=f"M{x(point[0])} {y(point[1]) - 6}l6 6-6 6-6-6z", class_=class_)
            for point, title in zip(points, titles, strict=True)
            if _is_drawable(point, x, y)
        )
    )


def across(value: float, y: Axis, class_: str) -> Markup:
    return tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_=class_)


def down(value: float, x: Axis, class_: str) -> Markup:
    return tag("line", x1=x(value), x2=x(value), y1=TOP, y2=BOTTOM, class_=class_)


def _is_drawable(point: tuple[float, float], x: Axis, y: Axis) -> bool:
    good = (math.isfinite(value) and (value > 0 or not axis.log) for value, axis in zip(point, (x, y), strict=True))
    return all(good)


def _thinned(points: Points) -> Points:
    """Lowest and highest of every stretch, so that no peak is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / _MOST_POINTS)
    found: list[tuple[float, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        found += sorted(ends, key=lambda point: point[0])
    return found if found[-1] == points[-1] else [*found, points[-1]]
