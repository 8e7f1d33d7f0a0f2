"""Norms over positions: group norm couples the channels of a group, instance norm treats each channel alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..facts import Fact, uniform, varying, vector
from ..labels import Live
from .base import Facts, Op, Rule, blank, contracted, flat, passed_on, rule
from .norm import BatchNorm, affine_labels, numbers

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


_MOST_AMPLIFIED = 4e4  # a rounded constant minus its mean, divided by a small deviation: leaves 11 digits in float64


class OverPositions(Rule):
    """What both share: statistics over all positions, and a weight and a bias for every channel.

    Keeps: channels that lie along a dimension of positions.
    """

    def labels(self, op: Op, ctx: Analysis, parameters: tuple[str, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Labels of the channels, bound to those of the parameters; and the layers that the output has."""
        x = op.given["input"]
        positions = tuple(range(2, len(x.shape)))
        for layer in x.layers:
            if set(varying(layer)) & set(positions):
                ctx.pin(layer, op, "enters the statistics of a norm over positions")
        labels = contracted(op, ctx, x, 1)
        affine_labels(op, ctx, labels, parameters)
        channels = [vector(labels, x.shape, 1)] if labels is not None else []
        return labels, (*passed_on(x, (1, *positions)), *channels)


@rule("group_norm")
class GroupNorm(OverPositions):
    """y_k = g_k (x_k - mu) / sqrt(var + eps) + b_k, mu and var over the positions and channels of k's group.

    Constant: y_k where g_k = 0, and a whole group if all of its x_k are constant.
    Need: all channels of a group of which one stays, constant or not. Whole groups go.
    Absorb: `num_groups` becomes the number of groups that are left.
    Exact: a group that is left has the members it had. A group of constants is one only where centring it loses no
    digits.
    Keeps: parts of groups; everything where a function is called instead of an nn.GroupNorm, whose `num_groups` can be
    set. A module with one group is a layer norm over channels and positions: see there.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, groups = op.given["input"], op.given["num_groups"]
        labels, layers = self.labels(op, ctx, ("weight", "bias"))
        if labels is not None:
            self._pin(op, ctx, labels)
        op.memo["table"] = None if labels is None else labels.reshape(groups, -1)
        c = uniform(x.value, 1)
        return Fact(x.shape, layers, vector(self._value(op, c.reshape(groups, -1)), x.shape, 1))

    def _pin(self, op: Op, ctx: Analysis, labels: Tensor) -> None:
        module = ctx.model.get_submodule(op.module)
        if not isinstance(module, nn.GroupNorm) or module.num_groups != op.given["num_groups"]:
            ctx.pin(labels, op, "its number of groups is written in the code; make it an nn.GroupNorm to let groups go")
        elif "norms" not in ctx.options:
            ctx.pin(labels, op, "this rule set leaves norms as they are")

    def _value(self, op: Op, c: Tensor) -> Tensor:
        weight, bias = numbers(op, "weight", c.numel(), 1.0), numbers(op, "bias", c.numel(), 0.0)
        centred = c - c.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + op.given["eps"]).sqrt()
        exact = c.abs().amax(1, keepdim=True) < _MOST_AMPLIFIED * scale
        normed = torch.where(exact, centred / scale, torch.nan).reshape(-1)
        return torch.where(weight == 0, bias, weight * normed + bias)

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        table = op.memo["table"]
        if table is None:
            return
        needed, stays = live.needed(table).any(1), live[table].any(1)
        live.mark(table[needed], op.where, "enters the mean and variance of a group that stays")
        live.mark(table[stays & ~needed], op.where, "its group stays", filler=True)

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        table = op.memo["table"]
        if table is not None and not bool(live[table].all()):
            left = self.groups_left(op, live)
            plan.sizes[op.module] = {"num_groups": left, "num_channels": left * table.size(1)}

    def groups_left(self, op: Op, live: Live) -> int:
        table = op.memo["table"]
        return int(op.given["num_groups"] if table is None else live[table].any(1).sum())


@rule("instance_norm")
class InstanceNorm(OverPositions):
    """y_k = g_k (x_k - mu_k) / sqrt(var_k + eps) + b_k, each channel alone.

    mu_k and var_k are those of the channel's own positions, so a constant x_k gives b_k; or running statistics, then
    it is a batch norm. Constant too: y_k where g_k = 0. A channel goes when nothing reads it or it is constant.
    Exact: no channel sees another one.
    Keeps: a constant so large that its mean is not exact, for the deviation is divided by sqrt(eps) alone.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x = op.given["input"]
        labels, layers = self.labels(op, ctx, ("weight", "bias", "running_mean", "running_var"))
        op.memo["labels"] = labels
        return Fact(x.shape, layers, vector(self._value(op, uniform(x.value, 1)), x.shape, 1))

    def _value(self, op: Op, c: Tensor) -> Tensor:
        weight, bias = numbers(op, "weight", len(c), 1.0), numbers(op, "bias", len(c), 0.0)
        if op.given["use_input_stats"]:
            exact = c.abs() < _MOST_AMPLIFIED * op.given["eps"] ** 0.5
            return torch.where(exact | (weight == 0), bias, torch.nan)
        mean, var = numbers(op, "running_mean", len(c), 0.0), numbers(op, "running_var", len(c), 1.0)
        scale = weight / (var + op.given["eps"]).sqrt()
        return torch.where(scale == 0, bias, scale * (c - mean) + bias)

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        labels = op.memo["labels"]
        module = ctx.model.get_submodule(op.module)
        if labels is not None and isinstance(module, nn.modules.instancenorm._InstanceNorm):
            plan.sizes[op.module] = {"num_features": int(live[labels].sum())}


@rule("_native_batch_norm_legit_no_training")
class NativeBatchNorm(BatchNorm):
    """The batch norm that torch.export leaves where it had to make a graph functional: it has its statistics as further
    outputs, which nobody reads in eval mode."""

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        op.given["training"] = False
        return [super().forward(op, ctx), *list(flat(blank(op)))[1:]]
