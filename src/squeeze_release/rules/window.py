"""Positions traded for channels (unfold and fold, pixel shuffle), and channels shuffled or paired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, uniform, vector
from .base import Facts, Op, Rule, blank, contracted, passed_on, rule
from .shape import Move

if TYPE_CHECKING:
    from ..analyse import Analysis


@rule("unfold")
class Unfold(Move):
    """`x.unfold(dim, size, step)`: windows over positions; channels pass.

    Exact: elements are moved and nothing else.
    Keeps: channels that a window slides over.
    """

    def _source(self, op: Op, ctx: Analysis, x: Fact) -> Fact:
        dim = op.given["dimension"] % len(x.shape)
        for layer in x.along(dim):
            ctx.pin(layer, op, "a window slides over it")
        return Fact(x.shape, tuple(passed_on(x, (dim,))), x.value, x.source)


class Blocks(Rule):
    """Channels (dimension -3 of an image, or its stand-in) that become blocks of channels, or the other way round.

    Exact: elements are moved, or summed within a channel.
    Keeps: positions that carry channels.
    """

    def channels(self, op: Op, ctx: Analysis, x: Fact, dim: int) -> Tensor | None:
        """Labels along the channel dimension; positions that carry labels stay as they are."""
        for d in range(dim + 1, len(x.shape)):
            for layer in x.along(d):
                ctx.pin(layer, op, "positions become channels here, or channels positions")
        return contracted(op, ctx, x, dim)

    def result(self, op: Op, ctx: Analysis, x: Fact, out: Fact, dim: int, labels: Tensor | None, c: Tensor) -> Fact:
        layers = [_lead(layer, out, dim) for layer in passed_on(x, tuple(range(dim, len(x.shape))))]
        layers += _channels(op, ctx, labels, out, dim)
        return Fact(out.shape, tuple(layers), vector(c, out.shape, dim))


@rule("im2col", "pixel_unshuffle")
class Spread(Blocks):
    """Every channel becomes a block of r channels: its pixels, window by window (`F.unfold`, `F.pixel_unshuffle`).

    The r copies of a channel share its label: it goes when none of them is read. A constant stays one; in front of zero
    padding only 0 does.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, out = next(op.facts()), blank(op)
        assert isinstance(out, Fact)
        dim = len(x.shape) - 3
        labels, c = self.channels(op, ctx, x, dim), uniform(x.value, dim)
        block = out.shape[dim] // x.shape[dim]
        if any(op.given.get("padding") or ()):
            c = torch.where(c == 0, c, torch.nan)
        if labels is not None:
            labels = labels.repeat_interleave(block)
        return self.result(op, ctx, x, out, dim, labels, c.repeat_interleave(block))


@rule("col2im", "pixel_shuffle")
class Gather(Blocks):
    """Every block of r channels becomes one channel (`F.fold`, `F.pixel_shuffle`): the r go together.

    Constant: a channel whose r parts are the same constant (pixel shuffle), or all 0 (fold, where windows overlap).
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, out = next(op.facts()), blank(op)
        assert isinstance(out, Fact)
        dim = len(out.shape) - 3
        labels, c = self.channels(op, ctx, x, dim), uniform(x.value, dim).reshape(out.shape[dim], -1)
        alike = (c == c[:, :1]).all(1)
        if op.name.startswith("aten.col2im"):
            alike &= c[:, 0] == 0
        if labels is not None:
            table = labels.reshape(out.shape[dim], -1)
            ctx.labels.merge(*torch.broadcast_tensors(table[:, :1], table))
            labels = table[:, 0]
        return self.result(op, ctx, x, out, dim, labels, torch.where(alike, c[:, 0], torch.nan))


@rule("channel_shuffle", "native_channel_shuffle")
class ChannelShuffle(Rule):
    """Channels in a table of groups, read column by column: the same columns leave every group.

    Exact: then the shuffle of what is left is what is left of the shuffle.
    Keeps: a column of which one group needs its channel. Whole groups stay, for their number is an argument.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, groups = next(op.facts()), op.given["groups"]
        labels = contracted(op, ctx, x, 1)
        c = uniform(x.value, 1)
        layers = passed_on(x, (1,))
        if labels is not None:
            ctx.grid(op, labels.reshape(groups, -1), outer=ctx.labels.fresh(1).expand(groups), ragged=False)
            layers.append(vector(_shuffled(labels, groups), x.shape, 1))
        return Fact(x.shape, tuple(layers), vector(_shuffled(c, groups), x.shape, 1))


def _shuffled(t: Tensor, groups: int) -> Tensor:
    return t.reshape(groups, -1).t().reshape(-1)


@rule("glu")
class Glu(Rule):
    """y_k = a_k sigmoid(b_k), a and b the halves of x: a_k and b_k go together. Constant where both are, or a_k = 0.

    Exact: the halves stay equally long, so the op cuts where it cut before.
    Keeps: both, where one of them is needed.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, out = next(op.facts()), blank(op)
        assert isinstance(out, Fact)
        dim = op.given["dim"] % len(x.shape)
        half = out.shape[dim]
        labels = contracted(op, ctx, x, dim)
        layers = [compact(layer).expand(out.shape) for layer in passed_on(x, (dim,))]
        if labels is not None:
            ctx.labels.merge(labels[:half], labels[half:])
            layers += _channels(op, ctx, labels[:half], out, dim)
        a, b = uniform(x.value, dim).split(half)
        return Fact(out.shape, tuple(layers), vector(torch.where(a == 0, 0.0, a * b.sigmoid()), out.shape, dim))


def _channels(op: Op, ctx: Analysis, labels: Tensor | None, out: Fact, dim: int) -> list[Tensor]:
    """The layer of an output whose channels have these labels."""
    if labels is not None and len(labels) == 1:
        ctx.pin(labels, op, "a width of 1 cannot shrink")
        return []
    return [vector(labels, out.shape, dim)] if labels is not None else []


def _lead(layer: Tensor, out: Fact, dim: int) -> Tensor:
    """A layer that varies only in front of `dim`, on an output with other dimensions from there on."""
    return compact(layer).reshape(*compact(layer).shape[:dim], *(1,) * (len(out.shape) - dim)).expand(out.shape)
