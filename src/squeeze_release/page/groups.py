"""Layers put together by the beginnings of their names, so that a network of a thousand layers fits on a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..report import Layer

MOST = 40
_FEWEST = 8  # fewer say little: then finer ones are bundled


@dataclass(frozen=True)
class Group:
    """Layers next to each other: a block, mostly; or one layer."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def before(self) -> int:
        return sum(layer.params_before for layer in self.layers)

    @property
    def after(self) -> int:
        return sum(layer.params_after for layer in self.layers)


def grouped(layers: tuple[Layer, ...]) -> list[Group]:
    """As fine as at most `MOST` groups allow."""
    depth = max((layer.name.count(".") + 1 for layer in layers), default=1)
    groups = finer = _at_depth(layers, depth)
    while len(groups) > MOST and depth > 1:
        depth -= 1
        groups, finer = _at_depth(layers, depth), groups
    return _bundled(finer) if len(groups) > MOST or len(groups) < _FEWEST else groups


def _at_depth(layers: tuple[Layer, ...], depth: int) -> list[Group]:
    """Named by the first `depth` parts of their names."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(".".join(layer.name.split(".")[:depth]), []).append(layer)
    return [Group(mine[0].name if len(mine) == 1 else name, tuple(mine)) for name, mine in found.items()]


def _bundled(groups: list[Group]) -> list[Group]:
    """So many next to each other, where names alone leave too many."""
    many = max(math.ceil(len(groups) / MOST), 1)
    bundles = [groups[start : start + many] for start in range(0, len(groups), many)]
    return [Group(_span([group.name for group in bundle]), _all_layers(bundle)) for bundle in bundles]


def _all_layers(groups: list[Group]) -> tuple[Layer, ...]:
    return tuple(layer for group in groups for layer in group.layers)


def _span(names: list[str]) -> str:
    """From the first to the last: layers.0 … 3"""
    first, last = names[0], names[-1]
    before, _, rest = last.rpartition(".")
    return first if first == last else f"{first} … {rest if first.rpartition('.')[0] == before else last}"
