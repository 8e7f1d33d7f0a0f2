"""Channels: all that one channel holds, in every parameter, goes at once, and squeezing leaves nothing of it behind.

Which slices of which parameters make up a channel is what the analysis of a squeeze finds out anyway: a channel of a
residual stream is a row of every layer that writes it, a column of every layer that reads it, an entry of every norm.
Of heads, and groups of a convolution, there are two kinds: a whole head, and one dimension of all heads alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..analyse import Analysis
from ..labels import Grid, Labels, Live

NONE = -1


@dataclass(frozen=True)
class Channels:
    """What makes up every channel of a model.

    of: parameter -> dimension -> the numbers of the channels at each index, -1 where none may go: a table with one row,
        or with two where heads and their dimensions cross. An index goes with either.
    needs: for each channel one that it is nothing without, or -1: a depthwise filter needs the channel that it reads.
    whole: which channels are whole heads or groups. How many there are is no width.
    across: which are one dimension of all heads, or of all groups.
    """

    of: dict[str, dict[int, Tensor]]
    needs: Tensor
    whole: Tensor
    across: Tensor

    @property
    def count(self) -> int:
        return len(self.needs)

    @property
    def places(self) -> list[Tensor]:
        """Wherever channels lie: the number of one at each index."""
        return [row for dims in self.of.values() for at in dims.values() for row in at]

    def without(self, refused: Tensor) -> Channels:
        """These may not go."""
        of = {
            name: {dim: at.where(~refused[at.clamp(min=0)], NONE) for dim, at in dims.items()}
            for name, dims in self.of.items()
        }
        return _numbered(of, self.needs, self.whole, self.across)


def by_analysis(ctx: Analysis, tables: Sequence[Grid]) -> Channels:
    """All that could go. tables: those that the model has, without what binds widths of its code."""
    every = torch.arange(len(ctx.labels.parent))
    alone = Live(ctx.labels)
    by_row, by_column = Live(_rows_bound(ctx.labels, tables)), Live(_columns_bound(ctx.labels, ctx.grids))
    for live in (by_row, by_column):
        ctx.mark_fixed(live)
    for grid in ctx.grids:
        if grid.rigid:
            by_column.mark(grid.labels, grid.where, "only whole rows go")
    in_row, in_column = (live.members(every) > alone.members(every) for live in (by_row, by_column))
    rows = torch.where(by_row[every], NONE, by_row.root)
    columns = torch.where(by_column[every], NONE, by_column.root + len(every))
    # What lies in a table goes with its column, and beside that with its row, if there is such a thing.
    numbers = torch.stack(
        [torch.where(in_column & ~in_row, columns, rows), torch.where(in_column & in_row, columns, NONE)]
    )
    found: dict[str, dict[int, Tensor]] = {}
    parameters = dict(ctx.model.named_parameters())
    for name, dims in ctx.param_dims.items():
        for dim, labels in enumerate(dims):
            if name in parameters and labels is not None:
                found.setdefault(name, {})[dim] = numbers[:, labels]
    needs = torch.full((2 * len(every),), NONE)
    for reader, read in _filters(ctx):
        reader, read = numbers[0, reader], numbers[0, read]
        known = (reader >= 0) & (read >= 0) & (reader != read)  # what may not go is always there
        needs[reader[known]] = read[known]
    whole, across = torch.zeros(2, 2 * len(every), dtype=torch.bool)
    whole[by_row.root[in_row]] = True
    across[len(every) :] = True
    return _numbered(found, needs, whole, across)


def _rows_bound(labels: Labels, tables: Sequence[Grid]) -> Labels:
    """Of tables of heads or groups whole rows go; of a table of such rows (q, k and v by heads) whole columns."""
    bound, names = labels.copy(), _names_of_rows(labels, tables)
    uses = torch.zeros(len(labels.parent), dtype=torch.int64)
    for grid in tables:
        for mine in (grid.labels, grid.outer):
            if mine is not None:
                uses[labels.find(mine.unique()).unique()] += 1
    for grid in tables:
        if bool(names[grid.labels].all()):
            bound.merge(grid.labels, grid.labels[:1].expand_as(grid.labels))
        elif grid.rigid or _are_heads(labels, grid, uses):
            bound.merge(grid.labels, grid.labels[:, :1].expand_as(grid.labels))
            if grid.outer is not None:
                bound.merge(grid.labels[:, 0], grid.outer)
    return bound


def _columns_bound(labels: Labels, tables: Sequence[Grid]) -> Labels:
    """All rows that stay keep equally many: one of each goes."""
    bound, names = labels.copy(), _names_of_rows(labels, tables)
    for grid in tables:
        if not (grid.rigid or grid.labels.size(1) == 1 or bool(names[grid.labels].all())):
            bound.merge(grid.labels, grid.labels[:1].expand_as(grid.labels))
            if grid.inner is not None:
                bound.merge(grid.labels[0], grid.inner)
    return bound


def _names_of_rows(labels: Labels, tables: Sequence[Grid]) -> Tensor:
    """Which labels stand for a row of some table."""
    names = torch.zeros(len(labels.parent), dtype=torch.bool)
    for grid in tables:
        if grid.outer is not None:
            names[grid.outer] = True
    return names


def _are_heads(labels: Labels, grid: Grid, uses: Tensor) -> bool:
    """Rows that other tables know of. q, k and v of a single head, or the parts of a chunk, do not go one by one."""
    if grid.outer is None:
        return False
    rows = labels.find(grid.outer)
    return len(rows.unique()) > 1 and bool((uses[rows] > 1).all())


def _filters(ctx: Analysis) -> Iterator[tuple[Tensor, Tensor]]:
    """Of every depthwise convolution the labels of its filters, and beside each that of the channel it reads."""
    for op in ctx.ops:
        rows, columns, geometry = (op.memo.get(key) for key in ("rows", "columns", "geometry"))
        if rows is not None and columns is not None and len(columns) == getattr(geometry, "groups", 1) > 1:
            yield rows, columns.repeat_interleave(len(rows) // len(columns))


def _numbered(found: dict[str, dict[int, Tensor]], needs: Tensor, *flags: Tensor) -> Channels:
    """From any integers to 0, 1, 2 ..., without rows and dimensions in which nothing may go."""
    used = torch.cat([torch.tensor([NONE]), *(at.reshape(-1) for dims in found.values() for at in dims.values())])
    used = used.unique()
    number = torch.full((len(needs) + 1,), NONE)  # the last is that of NONE
    number[used[1:]] = torch.arange(len(used) - 1)
    of: dict[str, dict[int, Tensor]] = {}
    for name, dims in found.items():
        for dim, at in dims.items():
            rows = [row for row in number[at] if bool((row >= 0).any())]
            if rows:
                of.setdefault(name, {})[dim] = torch.stack(rows)
    return Channels(of, number[needs[used[1:]]], *(flag[used[1:]] for flag in flags))


def rank(groups: Tensor, order: Tensor, count: int = 0) -> Tensor:
    """How many of its own group come before each one in an order; of those that are not in it, very many."""
    sorted_groups, place = groups[order].sort(stable=True)
    places = torch.full((count or len(order),), len(groups))
    places[order[place]] = torch.arange(len(order)) - torch.searchsorted(sorted_groups, sorted_groups)
    return places


def staying(stays: Tensor, numbers: Tensor) -> Tensor:
    """Which indices stay: those of which every channel does."""
    stay: Tensor = (stays[numbers.clamp(min=0)] | (numbers < 0)).all(0)
    return stay
