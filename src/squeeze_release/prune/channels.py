"""Channels: all that one channel holds, in every parameter, goes at once, and squeezing leaves nothing of it behind.

Which slices of which parameters make up a channel is what the analysis of a squeeze finds out anyway: a channel of a
residual stream is a row of every layer that writes it, a column of every layer that reads it, an entry of every norm.
Heads, and groups of a convolution, go as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..analyse import Analysis, analyse
from ..copies import copy_model
from ..labels import Grid, Labels, Live
from ..trace import as_calls, trace
from ..unwrap import unwrap
from .masks import Keeper

NONE = -1


@dataclass(frozen=True)
class Channels:
    """What makes up every channel of a model.

    of: parameter -> dimension -> the number of the channel at each index, -1 where it may not go.
    needs: for each channel one that it is nothing without, or -1: a depthwise filter needs the channel that it reads.
    """

    of: dict[str, dict[int, Tensor]]
    needs: Tensor

    @property
    def count(self) -> int:
        return len(self.needs)


def find_channels(
    model: nn.Module, example_inputs: Any, kwargs: dict[str, Any] | None = None, *, skip: Iterable[str] = ()
) -> Channels:
    """What goes together in any model that can be squeezed. Inputs, outputs and what no rule understands stay.

    Args:
        skip: names of modules whose widths are left alone.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    >>> find_channels(net, torch.randn(4, 2), skip=["2"]).count
    2
    """
    copy = copy_model(unwrap(model)).eval()
    ctx = analyse(copy, [trace(copy, call) for call in as_calls(example_inputs, kwargs)], "all", tuple(skip))
    _bind_rows(ctx.labels, ctx.grids)
    fixed = Live(ctx.labels)
    ctx.mark_fixed(fixed)
    parameters = dict(copy.named_parameters())
    found: dict[str, dict[int, Tensor]] = {}
    for name, dims in ctx.param_dims.items():
        for dim, labels in enumerate(dims):
            if name in parameters and labels is not None and not bool(fixed[labels].all()):
                found.setdefault(name, {})[dim] = torch.where(fixed[labels], NONE, fixed.root[labels])
    return _numbered(found, _needs(ctx, fixed.root))


def _bind_rows(labels: Labels, grids: Sequence[Grid]) -> None:
    """Of tables of heads or groups only whole rows go; of a table of such rows (q, k and v by heads) whole columns."""
    stands_for_row = torch.zeros(len(labels.parent), dtype=torch.bool)
    for grid in grids:
        if grid.outer is not None:
            stands_for_row[grid.outer] = True
    for grid in grids:
        if bool(stands_for_row[grid.labels].all()):
            labels.merge(grid.labels, grid.labels[:1].expand_as(grid.labels))
            continue
        labels.merge(grid.labels, grid.labels[:, :1].expand_as(grid.labels))
        if grid.outer is not None:
            labels.merge(grid.labels[:, 0], grid.outer)


def _needs(ctx: Analysis, root: Tensor) -> Tensor:
    """Label -> the label of the one channel that it is computed from, or -1."""
    needs = torch.full_like(root, NONE)
    for op in ctx.ops:
        rows, columns, geometry = (op.memo.get(key) for key in ("rows", "columns", "geometry"))
        if rows is not None and columns is not None and len(columns) == getattr(geometry, "groups", 1) > 1:
            rows, columns = root[rows], root[columns.repeat_interleave(len(rows) // len(columns))]
            needs[rows] = torch.where(rows == columns, NONE, columns)
    return needs


def _numbered(found: dict[str, dict[int, Tensor]], needs: Tensor) -> Channels:
    """From any integers to 0, 1, 2 ..."""
    every = [at for dims in found.values() for at in dims.values()]
    used = torch.cat([torch.tensor([NONE]), *every]).unique()
    of = {name: {dim: torch.searchsorted(used, at) - 1 for dim, at in dims.items()} for name, dims in found.items()}
    mine = needs[used[1:]]
    known = torch.isin(mine, used[1:])  # what may not go is always there
    return Channels(of, torch.where(known, torch.searchsorted(used, mine) - 1, NONE))


class ChannelMasks(Keeper):
    """Which channels of a model are alive; used as `Masks` is.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> masks = ChannelMasks(net, find_channels(net, torch.randn(1, 4)))
    >>> masks.prune({name: p.abs() for name, p in net.named_parameters()}, keep=0.5)
    >>> int(net[0].bias.count_nonzero()) <= 4
    True
    """

    def __init__(self, model: nn.Module, channels: Channels, multiple: int = 1) -> None:
        """multiple: of what the widths should be; GPUs compute faster with multiples of 8 in half precision."""
        super().__init__({name: model.get_parameter(name) for name in channels.of})
        self._of, self._needs, self._multiple = channels.of, channels.needs, multiple
        self._layer = _layers(channels)
        self._stays = torch.ones(channels.count, dtype=torch.bool)

    @property
    def alive(self) -> int:
        return self._count(self._stays)

    def named(self) -> dict[str, Tensor]:
        return {name: self._mask(name) for name in self.names}

    @torch.no_grad()
    def prune(self, scores: Mapping[str, Tensor], keep: float) -> None:
        """Zero the channels that matter least for what they hold, until at most `keep` of all weights are alive.

        One channel of every layer stays whatever `keep` is, so that no network is cut in two; what is dead stays dead.
        """
        worth = self._worth(scores)
        best = self._stays & (_rank(self._layer, worth.argsort(descending=True, stable=True)) == 0)
        order = worth.masked_fill(best, torch.inf).argsort(descending=True, stable=True)
        few, many, room = int(best.sum()), int(self._stays.sum()), keep * self.total
        while few < many:  # the most that may stay
            count = (few + many + 1) // 2
            few, many = (count, many) if self._count(self._best(order, count)) <= room else (few, count - 1)
        self._stays = self._best(order, few)
        self.changed()

    @torch.no_grad()
    def take_zeros(self) -> None:
        self._stays = self._worth({name: weight.abs() for name, weight in self._weights.items()}) > 0
        self.changed()

    def state(self) -> dict[str, Tensor]:
        return {"channels": self._stays}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._stays = state["channels"].cpu()
        self._factors = None

    def _best(self, order: Tensor, count: int) -> Tensor:
        """The first so many, without those that would be nothing, and so that widths are multiples where they can."""
        stays = torch.zeros_like(self._stays)
        stays[order[:count]] = True
        for _ in range(3):  # a layer that is rounded may take others with it, which are rounded too
            may = self._stays & ((self._needs < 0) | stays[self._needs])
            stays &= may
            if self._multiple > 1:
                width = torch.bincount(self._layer, stays.float())
                rounded = (width / self._multiple).round() * self._multiple
                wanted = torch.where(rounded > 0, rounded, width)[self._layer]
                stays = may & (_rank(self._layer, order[may[order]], len(stays)) < wanted)
        return stays

    def _worth(self, scores: Mapping[str, Tensor]) -> Tensor:
        """The mean score of all living weights that would go with a channel; below all others for what is dead."""
        total, held = torch.zeros(2, len(self._stays), dtype=torch.float64)
        for name, dims in self._of.items():
            mask = self._mask(name).double()
            score = scores[name].double() * mask
            for dim, at in dims.items():
                others = [d for d in range(score.dim()) if d != dim]
                for sums, table in ((total, score), (held, mask)):
                    here = table.sum(others).cpu() if others else table.cpu()
                    sums.index_add_(0, at.clamp(min=0), here.where(at >= 0, 0.0))
        fed = self._needs >= 0
        for sums in (total, held):
            sums.index_add_(0, self._needs[fed], sums[fed])
        return torch.where(self._stays, total / held.clamp(min=1), -torch.inf)

    def _count(self, stays: Tensor) -> int:
        """Weights that are alive: of each parameter the product of what is alive along its dimensions."""
        whole = 0
        for name, dims in self._of.items():
            shape = list(self._weights[name].shape)
            for dim, at in dims.items():
                shape[dim] = int(_at(stays, at).sum())
            whole += torch.Size(shape).numel()
        return whole

    def _mask(self, name: str) -> Tensor:
        weight = self._weights[name]
        mask = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        for dim, at in self._of[name].items():
            mask &= _at(self._stays, at).to(weight.device).view([-1 if d == dim else 1 for d in range(weight.dim())])
        return mask


def _layers(channels: Channels) -> Tensor:
    """Channel -> a number that all channels of its layer share: the first dimension of a parameter it lies along."""
    first = torch.full((channels.count,), NONE)
    every = [at for dims in channels.of.values() for at in dims.values()]
    for number, at in enumerate(every):
        mine = at[at >= 0]
        first[mine] = torch.where(first[mine] < 0, number, first[mine])
    return first


def _rank(groups: Tensor, order: Tensor, count: int = 0) -> Tensor:
    """How many of its own group come before each one in an order; of those that are not in it, very many."""
    sorted_groups, place = groups[order].sort(stable=True)
    rank = torch.full((count or len(order),), len(groups))
    rank[order[place]] = torch.arange(len(order)) - torch.searchsorted(sorted_groups, sorted_groups)
    return rank


def _at(stays: Tensor, at: Tensor) -> Tensor:
    return stays[at.clamp(min=0)] | (at < 0)
