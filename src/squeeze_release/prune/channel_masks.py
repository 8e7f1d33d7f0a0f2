"""Which channels of a model are alive, kept so after every optimizer step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .channels import NONE, Channels, rank, staying
from .masks import Keeper


class ChannelMasks(Keeper):
    """Which channels of a model are alive; used as `Masks` is.

    >>> from squeeze_release.prune import find_channels
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> masks = ChannelMasks(net, find_channels(net, torch.randn(1, 4)))
    >>> masks.prune({name: p.abs() for name, p in net.named_parameters()}, keep=0.5)
    >>> int(net[0].bias.count_nonzero()) <= 4
    True
    """

    def __init__(self, model: nn.Module, channels: Channels, multiple: int = 1) -> None:
        """multiple: of what the widths should be; GPUs compute faster with multiples of 8 in half precision."""
        super().__init__({name: model.get_parameter(name) for name in channels.of})
        self._of, self._needs, self._whole, self._multiple = channels.of, channels.needs, channels.whole, multiple
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
        best = self._stays & (rank(self._layer, worth.argsort(descending=True, stable=True)) == 0)
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
                wanted = torch.where(rounded > 0, rounded, width)[self._layer].where(~self._whole, width[self._layer])
                stays = may & (rank(self._layer, order[may[order]], len(stays)) < wanted)
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
                    for row in at:
                        sums.index_add_(0, row.clamp(min=0), here.where(row >= 0, 0.0))
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
                shape[dim] = int(staying(stays, at).sum())
            whole += torch.Size(shape).numel()
        return whole

    def _mask(self, name: str) -> Tensor:
        weight = self._weights[name]
        mask = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        for dim, at in self._of[name].items():
            mask &= (
                staying(self._stays, at).to(weight.device).view([-1 if d == dim else 1 for d in range(weight.dim())])
            )
        return mask


def _layers(channels: Channels) -> Tensor:
    """Channel -> a number that all channels of its layer share: the first place where it lies."""
    first = torch.full((channels.count,), NONE)
    for number, at in enumerate(channels.places):
        mine = at[at >= 0]
        first[mine] = torch.where(first[mine] < 0, number, first[mine])
    return first
