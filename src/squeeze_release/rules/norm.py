"""Normalisation: batch norm acts on each channel alone, layer norm couples all of them through its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import norms as _norms  # noqa: F401  defines the op
from ..facts import Fact, uniform, vector
from ..labels import Live
from .base import Facts, Op, Rule, contracted, passed_on, rule

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


def affine_labels(op: Op, ctx: Analysis, labels: Tensor | None, arguments: tuple[str, ...]) -> None:
    """Bind the per-channel parameters of a norm to the channels of its input."""
    for argument in arguments:
        fact = op.given.get(argument)
        if not isinstance(fact, Fact):
            continue
        mine = contracted(op, ctx, fact, 0)
        if labels is not None and mine is not None:
            ctx.labels.merge(labels, mine)
        elif labels is not None:
            ctx.pin(labels, op, f"its {argument} has a fixed width")
        elif mine is not None:
            ctx.pin(mine, op, "its input has a fixed width")


def numbers(op: Op, argument: str, width: int, default: float) -> Tensor:
    fact = op.given.get(argument)
    return uniform(fact.value, 0) if isinstance(fact, Fact) else torch.full((width,), default, dtype=torch.float64)


@rule("batch_norm")
class BatchNorm(Rule):
    """Eval mode: y_k = g_k (x_k - m_k) / sqrt(v_k + eps) + b_k. A constant stays one; gamma 0 makes one."""

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        if op.given["training"] or op.given["running_mean"] is None:
            return super().forward(op, ctx)
        x = op.given["input"]
        labels = contracted(op, ctx, x, 1)
        affine_labels(op, ctx, labels, ("weight", "bias", "running_mean", "running_var"))
        width = x.shape[1]
        scale = numbers(op, "weight", width, 1.0) / (numbers(op, "running_var", width, 1.0) + op.given["eps"]).sqrt()
        offset = numbers(op, "bias", width, 0.0) - scale * numbers(op, "running_mean", width, 0.0)
        c = uniform(x.value, 1)
        value = torch.where(scale == 0, offset, scale * c + offset)
        return Fact(x.shape, x.layers, vector(value, x.shape, 1))


@rule("squeeze_release::layer_norm")
class LayerNorm(Rule):
    """y_k = g_k (x_k - mu) / sqrt(var + eps) + b_k, mu and var over all channels, removed ones included.

    Constant: y_k where g_k = 0, and everything if every x_k is constant.
    Need: every x_k that is not constant, for it enters the statistics; a constant x_k only if y_k is read.
    Absorb: constants that go become three numbers of a CompensatedLayerNorm: count, mean, squared deviations.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, dim = op.given["x"], op.given["channel_dim"] % len(op.given["x"].shape)
        labels = contracted(op, ctx, x, dim)
        affine_labels(op, ctx, labels, ("weight", "bias"))
        c = uniform(x.value, dim)
        ctx.constants.setdefault(f"norm {op.module}", []).append(c)
        op.memo["labels"] = labels
        layers = [*passed_on(x, (dim,)), *x.along(dim)] if labels is not None else passed_on(x, (dim,))
        return Fact(x.shape, tuple(layers), vector(self._value(op, c), x.shape, dim))

    def _value(self, op: Op, c: Tensor) -> Tensor:
        weight, bias = numbers(op, "weight", len(c), 1.0), numbers(op, "bias", len(c), 0.0)
        if bool(c.isnan().any()):
            return torch.where(weight == 0, bias, torch.nan)
        removed, mean, m2 = op.given["removed"], op.given["removed_mean"], op.given["removed_m2"]
        total = len(c) + removed
        mu = (c.sum() + removed * mean) / total
        var = (((c - mu) ** 2).sum() + m2 + removed * (mean - mu) ** 2) / total
        value: Tensor = weight * (c - mu) / (var + op.given["eps"]).sqrt() + bias
        return value

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        labels = op.memo["labels"]
        if labels is None:
            return
        c = ctx.agreed(f"norm {op.module}")
        live.mark(labels[c.isnan()], op.where, "not constant, so it enters the mean and variance of this norm")
        if "norms" not in ctx.options:
            live.mark(labels, op.where, "this rule set leaves norms as they are")

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        labels = op.memo["labels"]
        if labels is None or op not in ctx.wanted:
            return
        gone = ~live[labels]
        if bool(gone.any()):
            plan.compensate(op.module, ctx.agreed(f"norm {op.module}")[gone], op.given["channel_dim"])


@rule("layer_norm", "native_layer_norm")
class InlineLayerNorm(Rule):
    """A layer norm that is called as a function cannot be swapped for a compensated one."""

    reason = "layer_norm called as a function inside a larger forward; make it an nn.LayerNorm to let channels go"


@rule("rms_norm")
class KeptNorm(Rule):
    """Norms that keep their widths."""

    reason = "this norm keeps its width"
