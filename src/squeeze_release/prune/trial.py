"""Which channels may go: all that the analysis finds, but for those that a squeeze leaves in a trial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..analyse import analyse
from ..copies import copy_model
from ..follow import Memory, fit
from ..rehearse import Call
from ..trace import Trace, as_calls, trace
from ..unwrap import unwrap
from .channels import Channels, by_analysis, rank, staying


def find_channels(
    model: nn.Module, example_inputs: Any, kwargs: dict[str, Any] | None = None, *, skip: Iterable[str] = ()
) -> Channels:
    """What goes together in any model that can be squeezed. Inputs, outputs and what no rule understands stay.

    What the code of a model lets go only shows when it is tried: a squeeze is planned, though not carried out.

    Args:
        skip: names of modules whose widths are left alone.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    >>> find_channels(net, torch.randn(4, 2), skip=["2"]).count
    2
    """
    copy = _of_random_weights(copy_model(unwrap(model)).eval())
    calls = as_calls(example_inputs, kwargs)
    trial = _Trial(copy, calls, [trace(copy, call) for call in calls], tuple(skip))
    found = trial.all_that_could_go()
    while True:
        left, tied = trial.left(found)
        if not bool(left.any()):
            return found
        if tied is not None and not bool(trial.left(tied)[0].any()):
            return tied
        found = found.without(_at_fault(found, left))


@dataclass(frozen=True)
class _Trial:
    """Some channels of every kind are made zero: what a squeeze would not remove may not go."""

    model: nn.Module
    calls: list[Call]
    traces: list[Trace]
    skip: tuple[str, ...]

    def all_that_could_go(self) -> Channels:
        """By the analysis alone."""
        ctx = analyse(self.model, self.traces, "all", self.skip)
        return by_analysis(ctx, ctx.grids)

    def left(self, channels: Channels) -> tuple[Tensor, Channels | None]:
        """What stays though it is zero, with all of its kind; and the channels as they would be if bound to others.

        Of kinds that are as wide unequally many go, so that code which takes two widths for one shows itself.
        """
        kinds = _kinds(channels)
        widths = torch.bincount(kinds)
        gone = _few(kinds, 1 + rank(widths, torch.arange(len(widths)))[kinds] % 4)
        if not bool(gone.any()):
            return gone, None
        ctx = analyse(self._without(channels, gone), self.traces, "all", self.skip)
        tables, memory = list(ctx.grids), Memory()
        fitted = fit(ctx, self.calls, memory)
        left = torch.zeros_like(gone) if fitted.saved > 0 else gone.clone()
        for name, dims in channels.of.items():
            for dim, at in dims.items():
                labels = ctx.param_dims[name][dim]
                assert labels is not None
                for row in at:
                    left[row[fitted.live[labels] & (row >= 0)]] = True
        of_heads = bool(memory.tied) and max(memory.tied.values()) == 1  # their dimensions, and no other width
        return torch.isin(kinds, kinds[left & gone]), by_analysis(ctx, tables) if of_heads else None

    @torch.no_grad()
    def _without(self, channels: Channels, gone: Tensor) -> nn.Module:
        model = copy_model(self.model)
        for name, dims in channels.of.items():
            weight = model.get_parameter(name)
            for dim, at in dims.items():
                weight.index_fill_(dim, (~staying(~gone, at)).nonzero().view(-1).to(weight.device), 0)
        return model


@torch.no_grad()
def _of_random_weights(model: nn.Module) -> nn.Module:
    """What a channel is does not depend on them; but those of a network that begins as the identity are all dead."""
    chance = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.copy_(torch.rand(weight.shape, generator=chance) + 0.5)
    return model


def _at_fault(channels: Channels, left: Tensor) -> Tensor:
    """Where heads stay, their dimensions are given up first, then the heads; whatever else stays may be their fault."""
    heads = left & (channels.whole | channels.across)
    beside = torch.zeros_like(left)
    for dims in channels.of.values():
        for at in dims.values():
            here = at[at >= 0]
            if bool(heads[here].any()):
                beside[here] = True
    for given_up in (beside & channels.across, heads):
        if bool(given_up.any()):
            return given_up
    return left


def _kinds(channels: Channels) -> Tensor:
    """Channel -> a number that those share which lie in the same places: 0, 1, 2 ... in the order of the first ones."""
    sums = torch.zeros(channels.count, dtype=torch.int64)
    chance = torch.Generator().manual_seed(0)
    for at in channels.places:
        sums.index_add_(0, here := at[at >= 0], torch.randint(2**62, (1,), generator=chance).expand_as(here))
    kinds = sums.unique(return_inverse=True)[1]
    every = torch.arange(len(kinds))
    first = torch.full((len(kinds),), len(kinds)).scatter_reduce_(0, kinds, every, "amin")
    number: Tensor = first[kinds].unique(return_inverse=True)[1]
    return number


def _few(kinds: Tensor, count: Tensor) -> Tensor:
    """The first so many of each kind, though never all of it."""
    sizes = torch.bincount(kinds, minlength=1)
    return rank(kinds, torch.arange(len(kinds))) < torch.minimum(count, sizes[kinds] - 1)
