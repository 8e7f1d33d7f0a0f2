"""Layers put together by the beginnings of their names, so that a network of a thousand layers fits on a page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..report import Layer

MOST = 40


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
    groups = _at_depth(layers, depth)
    while len(groups) > MOST and depth > 1:
        depth -= 1
        groups = _at_depth(layers, depth)
    return groups if len(groups) <= MOST else _bundled(groups)


def _at_depth(layers: tuple[Layer, ...], depth: int) -> list[Group]:
    """Named by the first `depth` parts of their names."""
    found: dict[str, list[Layer]] = {}
    for layer in layers:
        found.setdefault(".".join(layer.name.split(".")[:depth]), []).append(layer)
    return [Group(mine[0].name if len(mine) == 1 else name, tuple(mine)) for name, mine in found.items()]


def _bundled(groups: list[Group]) -> list[Group]:
    """So many next to each other, where names alone leave too many."""
    many = math.ceil(len(groups) / MOST)
    bundles = [groups[start : start + many] for start in range(0, len(groups), many)]
    return [
        Group(
            bundle[0].name if len(bundle) == 1 else f"{bundle[0].name} … {bundle[-1].name}",
            tuple(layer for group in bundle for layer in group.layers),
        )
        for bundle in bundles
    ]
