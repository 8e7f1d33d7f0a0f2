"""Tables of channels: whole rows of them, copies of rows (grouped queries), and products of two kinds of channels.

A table has one row a head and one column a dimension of the head. See `Grid` for what it means that it stays
rectangular.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, varying, vector

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..labels import Live
    from .base import Op


def whole_rows(op: Op, ctx: Analysis, layer: Tensor, dims: set[int], text: str) -> Tensor | None:
    """What may still go of a layer whose extent along `dims` is fixed: whole heads, if `dims` are inside a head.

    Returns a layer that names the heads, the same for all that is in one; None if everything has to stay.
    """
    mine = varying(layer)
    outside = [d for d in mine if d not in dims]
    if not outside or list(mine[: len(outside)]) != outside:
        ctx.pin(layer, op, text)
        return None
    table = compact(layer)
    rows = table.reshape(-1, *[table.size(d) for d in mine[len(outside) :]]).flatten(1)
    heads = ctx.grid(op, rows, rigid=True)
    return heads.reshape([table.size(d) if d in outside else 1 for d in range(table.dim())]).expand(layer.shape)


def head_sizes(facts: list[Fact], shape: tuple[int, ...], count: int) -> list[int] | None:
    """The sizes of a result's batch dimensions, 1 where no heads are; None if its operands do not say where."""
    for layer in (layer for fact in facts for layer in fact.layers):
        dims = {d - layer.dim() for d in varying(layer) if d < layer.dim() - 2}
        sizes = [shape[d] if d - len(shape) in dims else 1 for d in range(len(shape) - 2)]
        if math.prod(sizes) == count:
            return sizes
    return [1] * (len(shape) - 2) if count == 1 else None


def copies_along(op: Op, ctx: Analysis, shape: tuple[int, ...], dims: list[int]) -> list[Tensor]:
    """Layers for dimensions along which a tensor repeats itself: any of the copies may go, if the code follows."""
    made = [(d, ctx.labels.fresh(shape[d])) for d in dims if shape[d] > 1]
    op.memo["copies"] = [labels for _, labels in made]
    return [vector(labels, shape, d) for d, labels in made]


def keep_unbound(op: Op, live: Live) -> None:
    """Copies that no other channel is bound to stay: it is not known what the code does with them."""
    for labels in op.memo.get("copies", ()):
        if bool(((live.members(labels) == 1) & ~live.in_grid[labels]).any()):
            live.mark(labels, op.where, "copies that are bound to nothing")


def copied(op: Op, ctx: Analysis, source: Tensor, times: int, copies: Tensor | None = None) -> Tensor:
    """A table in which every row of `source` stands `times` times in a row: keys and values of grouped queries.

    Copy c of row g is a head of its own. It needs the columns of row g, and every g that stays keeps equally many
    copies, any ones, for they are all the same. `copies` are labels of the dimension that was expanded, if the code has
    one: as many of them stay.
    """
    groups, width = source.shape
    op.memo.setdefault("sources", []).append(source)
    table = ctx.labels.fresh(groups * times * width).reshape(groups, times, width)
    heads = ctx.grid(op, table.reshape(-1, width)).reshape(groups, times)
    rows = ctx.grid(op, source)
    for g in range(groups):
        ctx.grid(op, table[g], outer=heads[g], inner=source[g], ragged=False)
    if copies is not None:
        standing = ctx.labels.fresh(1)
        ctx.grid(op, rows[None], outer=standing)
        ctx.labels.merge(copies, own := ctx.labels.fresh(times))
        heads, rows = torch.cat([heads, own[None]]), torch.cat([rows, standing])
    ctx.grid(op, heads, outer=rows)
    return table.reshape(-1, width)


def product(op: Op, ctx: Analysis, one: Tensor, other: Tensor) -> Tensor | None:
    """Two layers that a reshape laid along one dimension, as the one layer that they are together.

    Either each is a vector, and the channels are all their pairs; or one is a table of heads and the other counts
    copies of each head. None where it is neither.
    """
    if len(varying(one)) < len(varying(other)):
        one, other = other, one
    if len(varying(other)) != 1 or varying(one)[0] != varying(other)[0]:
        return None
    table = compact(one).reshape(one.size(varying(one)[0]), -1)
    names = compact(other).reshape(-1)
    pairs = _pairs(table, names)
    if pairs is None:
        return None
    rows, inner, interleaved = pairs
    if table.size(1) > 1:
        if not interleaved:
            return None
        new = copied(op, ctx, rows, len(inner), inner)
    else:
        first, second = (rows[:, 0], inner) if interleaved else (inner, rows[:, 0])
        grid = ctx.labels.fresh(len(table)).reshape(len(first), len(second))
        ctx.grid(op, grid, outer=first, inner=second, ragged=False)
        new = grid.reshape(-1, 1)
    return new.reshape(compact(one).shape).expand(one.shape)


def _pairs(table: Tensor, names: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Rows and names without their repeats, and whether the names run faster; None if not every pair is there once."""
    count = len(names.unique())
    if len(table) % count:
        return None
    rest = len(table) // count
    a, b = table.reshape(rest, count, -1), names.reshape(rest, count)
    if bool((a == a[:, :1]).all() and (b == b[:1]).all()):
        return a[:, 0], b[0], True
    a, b = table.reshape(count, rest, -1), names.reshape(count, rest)
    if bool((a == a[:1]).all() and (b == b[:, :1]).all()):
        return a[0], b[:, 0], False
    return None
