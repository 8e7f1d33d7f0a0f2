"""The network, layer by layer: as a silhouette of its widths, and as bars of its parameters."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..report import STAND_INS, Layer
from . import formats
from .groups import Group, grouped
from .legend import legend
from .markup import Markup, breakable, joined, tag
from .tables import Number, table

_HEIGHT, _WIDTH = 160.0, 1000.0
_MOST_LABELLED, _MOST_SLABS = 9, 120
_GONE = tuple(kind.__name__ for kind in STAND_INS)
_ARROW = re.compile(r"^(\d{1,12}) -> (\d{1,12})\b")


@dataclass(frozen=True)
class Slab:
    """A layer of the silhouette, as high as it has outputs."""

    name: str
    before: int
    after: int


def silhouette(layers: tuple[Layer, ...]) -> Markup:
    """Widths along the network, before and after; nothing where no layer has inputs and outputs."""
    every = _slabs(layers)
    if not every:
        return joined()
    slabs = _pooled(every)
    tallest = max(slab.before for slab in slabs) or 1
    step = _WIDTH / len(slabs)
    gap = 0.12 * step
    both = [
        tag(
            "g",
            tag("title", f"{s.name}: {s.before:,} → {s.after:,}"),
            _rectangle(place * step, step - gap, s.before / tallest, "slab before"),
            _rectangle(place * step, step - gap, s.after / tallest, "slab after"),
        )
        for place, s in enumerate(slabs)
    ]
    widest = f"the widest had {max(slab.before for slab in every):,} channels"
    words = f"Widths of {len(every)} layers from input to output, before and after; {widest}"
    words += f"; each slab is the mean of {math.ceil(len(every) / _MOST_SLABS)}" if len(slabs) < len(every) else ""
    size = f"0 0 {_WIDTH:g} {_HEIGHT:g}"
    fit = {"viewBox": size, "preserveAspectRatio": "none", "role": "img", "class": "silhouette"}
    picture = tag("svg", tag("title", words), *both, **fit)
    foot = _labels(slabs) if len(slabs) <= _MOST_LABELLED else _ends()
    entries = [("slab before", "width before"), ("slab after", "width now")]
    return tag("figure", tag("figcaption", f"{words}."), picture, foot, legend(entries), class_="network")


def _slabs(layers: tuple[Layer, ...]) -> list[Slab]:
    found: list[Slab] = []
    for layer in layers:
        was, now = _ARROW.match(layer.before), _ARROW.match(layer.after)
        if was and not found:
            found.append(Slab("input", int(was[1]), int(now[1]) if now else 0))
        if was:
            found.append(Slab(layer.name, int(was[2]), int(now[2]) if now else 0))
        elif layer.after.startswith(_GONE) and (number := re.search(r"\d{1,12}", layer.after + layer.before)):
            found.append(Slab(layer.name, int(number[0]), 0))
    return found


def _pooled(slabs: list[Slab]) -> list[Slab]:
    """Means of so many next to each other that all can be told apart."""
    many = math.ceil(len(slabs) / _MOST_SLABS)
    parts = [slabs[start : start + many] for start in range(0, len(slabs), many)] if many > 1 else []
    return [
        Slab(
            f"{part[0].name} … {part[-1].name}, mean",
            round(sum(slab.before for slab in part) / len(part)),
            round(sum(slab.after for slab in part) / len(part)),
        )
        for part in parts
    ] or slabs


def _rectangle(x: float, width: float, share: float, class_: str) -> Markup:
    height = max(_HEIGHT * share, 1.0) if share > 0 else 0.0
    place = {"x": x, "y": (_HEIGHT - height) / 2, "width": width, "height": height}
    return tag("rect", **{name: f"{value:.2f}".rstrip("0").rstrip(".") for name, value in place.items()}, class_=class_)


def _labels(slabs: list[Slab]) -> Markup:
    each = (tag("li", tag("span", f"{s.before:,}", class_="was"), tag("b", f"{s.after:,}")) for s in slabs)
    return tag("ol", *each, class_="widths", aria_label="Widths before and now")


def _ends() -> Markup:
    return tag("p", tag("span", "input"), tag("span", "output"), class_="ends")


# ------------------------------------------------------------------------------------------------------------- the bars


def bars(layers: tuple[Layer, ...], others: int = 0) -> Markup:
    """A row for each layer or block, its bar as long as it has parameters. `others` are in unchanged layers."""
    groups = grouped(layers)
    if others > 0:
        groups.append(Group("layers that did not change", (Layer("", "", "", others, others),)))
    longest = max((max(group.before, group.after) for group in groups), default=1) or 1
    return tag("ol", *(tag("li", _group(group, longest)) for group in groups), class_="layers")


def _group(group: Group, longest: int) -> Markup:
    if len(group.layers) == 1:
        layer = group.layers[0]
        return tag("div", _row(group, _became(*_widths(layer)), longest), class_="row")
    inner = table(
        f"Layers of {group.name}",
        ("layer", "before", "now", "parameters before", "now"),
        (
            (
                _inside(layer.name, group.name),
                *_widths(layer),
                Number(layer.params_before, formats.count(layer.params_before)),
                Number(layer.params_after, formats.count(layer.params_after)),
            )
            for layer in group.layers
        ),
        class_="inner",
    )
    summary = tag("summary", _row(group, f"{len(group.layers)} layers", longest), class_="row")
    return tag("details", summary, inner)


def _row(group: Group, widths: object, longest: int) -> Markup:
    return joined(
        tag("span", breakable(group.name), class_="layer"),
        tag("span", widths, class_="width"),
        _bar(group.before / longest, group.after / longest),
        tag("span", _became(formats.count(group.before), formats.count(group.after)), class_="params"),
        tag("span", _smaller(group.before, group.after), class_="times"),
    )


def _smaller(before: int, after: int) -> str:
    if before == after:
        return "same"
    return "gone" if after == 0 else formats.ratio(before, after)


def _bar(before: float, after: float) -> Markup:
    shares = {"b": before, "a": after}
    parts = (tag("i", class_=name, style=f"width:{100 * share:.2f}%") for name, share in shares.items() if share > 0)
    return tag("span", *parts, class_="bar", aria_hidden="true")


def _inside(name: str, group: str) -> Markup:
    return breakable("(itself)" if name == group else name.removeprefix(f"{group}."))


def _became(before: str, after: str) -> Markup:
    if before == after:
        return breakable(before)
    return joined(tag("span", breakable(before), " →", class_="was"), " ", tag("b", breakable(after)))


def _widths(layer: Layer) -> tuple[str, str]:
    """Inputs times outputs; what both have in front of their numbers is said once."""
    times = f" {formats.TIMES} "
    before, after = layer.before.replace(" -> ", times), layer.after.replace(" -> ", times)
    kind, _, number = after.rpartition(" ")
    said = before != after and kind.isidentifier() and before.rpartition(" ")[0] == kind
    return before, number if said else after
