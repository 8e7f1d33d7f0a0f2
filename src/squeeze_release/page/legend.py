"""Figures with their legends, which are text and not part of the picture, so that they wrap and never overlap."""

from __future__ import annotations

from .markup import Markup, tag

Entries = list[tuple[str, str]]  # the class of the sample, and what it stands for

_SAMPLES: dict[str, tuple[str, dict[str, object]]] = {
    "dot": ("circle", {"cx": 10, "cy": 7, "r": 4}),
    "ring": ("circle", {"cx": 10, "cy": 7, "r": 5.5}),
    "diamond": ("path", {"d": "M10 1l6 6-6 6-6-6z"}),
    "phase": ("rect", {"x": 3, "y": 3, "width": 14, "height": 8}),
    "slab": ("rect", {"x": 3, "y": 2, "width": 14, "height": 10}),
}


_STROKE: tuple[str, dict[str, object]] = ("line", {"x1": 0, "x2": 20, "y1": 7, "y2": 7})


def figure(name: str, picture: Markup, entries: Entries) -> Markup:
    return tag("figure", tag("figcaption", name), picture, legend(entries) if entries else None)


def legend(entries: Entries) -> Markup:
    return tag("ul", *(tag("li", _sample(class_), words) for class_, words in entries), class_="legend")


def _sample(class_: str) -> Markup:
    shape, place = _SAMPLES.get(class_.split()[0], _STROKE)
    style = f"line {class_}" if shape == "line" else class_
    return tag("svg", tag(shape, class_=style, **place), viewBox="0 0 20 14", class_="sample", aria_hidden="true")
