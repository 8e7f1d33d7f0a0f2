"""Units and the integers that name them: which channels go together, which stay, and why.

A *label* names one channel that some layer writes or some parameter holds. Labels that must live or die together are
merged (union-find); the classes are what other tools call groups. `Live` is the set of classes that stay. It only ever
grows, so the analysis ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Labels:
    """A growing set of labels with vectorised union-find."""

    def __init__(self) -> None:
        self._room = torch.arange(1024)  # doubled when it is full, so that a label costs the same in a big model
        self.parent = self._room[:0]

    def fresh(self, count: int) -> Tensor:
        start, end = len(self.parent), len(self.parent) + count
        if end > len(self._room):
            self._room = torch.cat([self.parent, torch.arange(start, 2 * end)])
        self.parent = self._room[:end]
        return torch.arange(start, end)

    def copy(self) -> Labels:
        twin = Labels()
        twin._room = twin.parent = self.parent.clone()
        return twin

    def find(self, labels: Tensor) -> Tensor:
        root = self.parent[labels]
        while not torch.equal(root, above := self.parent[root]):
            root = above
        self.parent[labels] = root  # a shorter way for the next one who asks
        return root

    def merge(self, a: Tensor, b: Tensor) -> None:
        """Bind a[i] to b[i] for every i: hook the larger root under the smaller until nothing moves."""
        a, b = a.reshape(-1), b.reshape(-1)
        while True:
            a, b = self.find(a), self.find(b)
            apart = a != b
            if not apart.any():
                break
            a, b = a[apart], b[apart]
            self.parent.scatter_reduce_(0, torch.maximum(a, b), torch.minimum(a, b), "amin")


@dataclass(frozen=True)
class Reason:
    """Why a channel stays: who refused, and the words for it."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class Live:
    """The classes that stay, each with the first reason that was given for it."""

    def __init__(self, labels: Labels) -> None:
        self.root = labels.find(torch.arange(len(labels.parent)))
        self.mask = torch.zeros(len(self.root), dtype=torch.bool)
        self.filler = torch.zeros_like(self.mask)
        self.why = torch.full((len(self.root),), -1)
        self.reasons: list[Reason] = []
        self.grown = False
        self._sizes = torch.bincount(self.root, minlength=len(self.root))
        self.row_of = torch.full((len(self.root),), -1)  # label -> the label that stands for its row in the finest grid
        self.in_grid = torch.zeros_like(self.mask)  # labels that stand for a column of a grid

    def reluctance(self, labels: Tensor) -> Tensor:
        """How little one would like to revive each dead label of a table, row by row of the table."""
        row = self.row_of[labels]
        gone = (row >= 0) & ~self[row.clamp(min=0)]
        # The n-th dead label of its row costs n, so that rows are filled evenly; a row that is gone costs most.
        return _rank(row, ~self[labels]) + gone * labels.size(1)

    def members(self, labels: Tensor) -> Tensor:
        """How many labels each one's class has."""
        return self._sizes[self.root[labels]]

    def __getitem__(self, labels: Tensor) -> Tensor:
        return self.mask[self.root[labels]]

    def needed(self, labels: Tensor) -> Tensor:
        """Which of them stay for their numbers, not only to fill a width."""
        roots = self.root[labels]
        return self.mask[roots] & ~self.filler[roots]

    def mark(self, labels: Tensor, where: str, text: str, *, filler: bool = False) -> None:
        """Let labels stay. A filler stays only because no width may be 0: nobody needs its numbers."""
        roots = self.root[labels.reshape(-1)]
        if not filler and bool(self.filler[roots].any()):
            self.grown = True
            self.filler[roots] = False
        new = roots[~self.mask[roots]]
        if not len(new):
            return
        self.grown = True
        self.mask[new] = True
        self.filler[new] = filler
        reason = Reason(where, text)
        if not self.reasons or self.reasons[-1] != reason:
            self.reasons.append(reason)
        self.why[new] = len(self.reasons) - 1

    def given_reasons(self) -> list[Reason]:
        """The reason of every class that stays."""
        return [self.reasons[i] for i in self.why[self.mask & (self.why >= 0)].tolist()]

    def reason(self, label: int) -> Reason | None:
        index = int(self.why[self.root[label]])
        return self.reasons[index] if index >= 0 else None


def _rank(groups: Tensor, counted: Tensor) -> Tensor:
    """For each entry of a table, how many counted entries of the same group, in its row, come before it."""
    order = torch.argsort(groups, dim=1, stable=True)
    groups, counted = groups.gather(1, order), counted.gather(1, order).long()
    running = counted.cumsum(1)
    starts = torch.ones_like(groups, dtype=torch.bool)
    starts[:, 1:] = groups[:, 1:] != groups[:, :-1]
    before = torch.where(starts, running - counted, 0).cummax(1).values
    return torch.empty_like(running).scatter_(1, order, running - before)


@dataclass
class Grid:
    """Labels in rows that must stay rectangular: heads of a tensor, groups of a convolution.

    Whole rows may go. The rows that stay keep equally many labels: any ones if `ragged`, the same columns otherwise.
    `outer` and `inner` are labels that stand for a whole row or column (a head of the scores, a rotary frequency).
    """

    labels: Tensor
    where: str
    outer: Tensor | None = None
    inner: Tensor | None = None
    ragged: bool = True
    rigid: bool = False  # only whole rows may go
    module: str = ""  # whose code lays the table out

    def enter(self, live: Live) -> Tensor:
        """Which rows stay; what stands for them stays with them.

        For all grids before any of them revives a label: a head that stays needs labels of its own, and others that a
        grid picked before these are known would stay beside them.
        """
        rows = live[self.labels].any(1)
        if self.outer is not None:
            live.mark(self.outer[rows], self.where, "part of its head or group stays")
            rows = rows | live[self.outer]
        return rows

    def settle(self, live: Live, least: int = 0) -> None:
        """Revive the fewest labels that make what stays rectangular, at least so many a row."""
        alive, rows = live[self.labels], self.enter(live)
        if self.inner is not None:
            rows = rows | (live[self.inner].any() & ~rows.any())
        if not rows.any():
            return
        wanted = self._wanted(alive, rows, live, least)
        live.mark(
            self.labels[wanted & ~alive], self.where, "every head or group that stays must keep equally many channels"
        )
        if self.inner is not None:
            live.mark(self.inner[wanted.any(0)], self.where, "shared by every head or group that stays")

    def _wanted(self, alive: Tensor, rows: Tensor, live: Live, least: int) -> Tensor:
        if self.rigid:
            return rows[:, None].expand_as(alive)
        if not self.ragged:
            columns = alive.any(0)
            if self.inner is not None:
                columns = columns | live[self.inner]
            if not columns.any():
                columns[:least] = True
            return rows[:, None] & columns[None, :]
        width = max(least, int(alive.sum(1).max()))
        # Living labels first, then dead ones: of rows of a finer grid that stay anyway, and evenly from each of them.
        order = torch.argsort(live.reluctance(self.labels).masked_fill(alive, -1), dim=1, stable=True)
        chosen = torch.zeros_like(alive).scatter_(1, order[:, :width], True)
        return chosen & rows[:, None]
