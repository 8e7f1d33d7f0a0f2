"""Normalisation: batch norm acts on each channel alone, layer norm couples all of them through its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, Span, compact, uniform, unknown, varying, vector
from ..labels import Live
from ..trace.norms import Norm
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
    """Eval mode: y_k = g_k (x_k - m_k) / sqrt(v_k + eps) + b_k. A constant stays one; gamma 0 makes one.

    Known: what was known of x_k up to shared functions is known of y_k, for it is scaled and shifted.
    Exact: no channel sees another one.
    Keeps: everything where it has no running statistics or is left in train mode.
    """

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
        span = x.span and x.span.scaled(vector(scale, x.shape, 1), vector(offset, x.shape, 1))
        return Fact(x.shape, x.layers, vector(value, x.shape, 1), span=span)


class Statistics(Rule):
    """What norms over channels share: all of these enter the statistics, so what varies is needed.

    Need: every x_k that is not constant; a constant x_k only if y_k is read and no carrier stands for it.
    Absorb: constants that go become numbers of a compensated norm.
    Exact: statistics of the removed channels are kept in float64, and do not depend on the input.
    Keeps: every channel that varies; a constant where something that is not linear reads it behind the norm, or where
    calls of one module see different ones. Over one of several dimensions that hold channels (qk-norm: each head
    alone), all but whole heads.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, dim = op.given["x"], op.given["channel_dim"] % len(op.given["x"].shape)
        summed = (dim, *(self._pin_positions(op, ctx, x) if op.given.get("positions") else ()))
        if any(len(varying(layer)) > 1 for layer in x.along(dim)):
            return self._each_head(op, ctx, x, dim)
        labels = contracted(op, ctx, x, dim)
        affine_labels(op, ctx, labels, ("weight", "bias"))
        c = uniform(x.value, dim)
        ctx.constants.setdefault(f"norm {op.module}", []).append(c)
        op.memo["labels"] = labels
        layers = [*passed_on(x, summed), *(x.along(dim) if labels is not None else ())]
        offset, *parts = (vector(numbers, x.shape, dim) for numbers in self.span(op, c))
        value = vector(self.constant(op, c), x.shape, dim)
        return Fact(x.shape, tuple(layers), value, span=Span(dim, offset, tuple(parts)))

    def norm(self, op: Op) -> Norm:
        kind, given = op.name.split(".")[1].removesuffix("_norm"), op.given
        offset, positions = given.get("weight_offset", 0.0), given.get("positions", False)
        return Norm(kind, given["channel_dim"], given["eps"], offset, positions)

    def _pin_positions(self, op: Op, ctx: Analysis, x: Fact) -> tuple[int, ...]:
        """What lies along positions enters the statistics too, and stays."""
        positions = tuple(range(2, len(x.shape)))
        for layer in x.layers:
            if set(varying(layer)) & set(positions):
                ctx.pin(layer, op, "enters the statistics of a norm over positions")
        return positions

    def span(self, op: Op, c: Tensor) -> list[Tensor]:
        """What becomes of constants: an offset and the factors of what all channels share."""
        raise NotImplementedError

    def constant(self, op: Op, c: Tensor) -> Tensor:
        """Outputs that do not depend on the input."""
        raise NotImplementedError

    def _each_head(self, op: Op, ctx: Analysis, x: Fact, dim: int) -> Facts:
        for layer in x.along(dim):
            dims = varying(layer)
            if dims[-1] == dim:
                ctx.grid(op, compact(layer).reshape(-1, layer.size(dim)), rigid=True)
            else:
                ctx.pin(layer, op, "a norm over channels that are not the innermost")
        for argument in ("weight", "bias"):
            fact = op.given.get(argument)
            for layer in fact.layers if isinstance(fact, Fact) else ():
                ctx.pin(layer, op, "a norm of each head alone")
        return Fact(x.shape, x.layers, unknown(x.shape))

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        labels = op.memo.get("labels")
        if labels is None:
            return
        c = ctx.agreed(f"norm {op.module}")
        live.mark(labels[c.isnan()], op.where, "not constant, so it enters the statistics of this norm")
        if "norms" not in ctx.options:
            live.mark(labels, op.where, "this rule set leaves norms as they are")

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        labels = op.memo.get("labels")
        if labels is None or bool(live[labels].all()):
            return
        if op in ctx.wanted:
            plan.compensate(op.module, self.norm(op), ctx.agreed(f"norm {op.module}")[~live[labels]])
        else:  # nobody reads its numbers, but it runs
            plan.unread_norms[op.module] = int(live[labels].sum())


@rule("squeeze_release::layer_norm")
class LayerNorm(Statistics):
    """y_k = g_k (x_k - mu) / sigma + b_k, mu and sigma over all channels, removed ones included.

    Constant: y_k where g_k = 0, and everything if every x_k is constant.
    Known: a constant x_k = c gives y_k = b_k + g_k c / sigma - g_k mu / sigma, so two channels carry all of them.
    Absorb: count, mean and squared deviations of the constants that go (`CompensatedLayerNorm`).
    Exact: (m var_A + M2 + (m K / C) (mu_A - m_R)^2) / C is the variance over all C = m + K channels; nothing cancels.
    A group norm with one group is the same with mu and sigma over positions too (`CompensatedGroupNorm`).
    """

    def span(self, op: Op, c: Tensor) -> list[Tensor]:
        weight, bias = numbers(op, "weight", len(c), 1.0), numbers(op, "bias", len(c), 0.0)
        return [torch.where(c.isnan(), torch.nan, bias), weight * c, torch.where(c.isnan(), torch.nan, -weight)]

    def constant(self, op: Op, c: Tensor) -> Tensor:
        weight, bias = numbers(op, "weight", len(c), 1.0), numbers(op, "bias", len(c), 0.0)
        if bool(c.isnan().any()):
            return torch.where(weight == 0, bias, torch.nan)
        removed, mean, m2 = op.given["removed"], op.given["removed_mean"], op.given["removed_m2"]
        total = len(c) + removed
        mu = (c.sum() + removed * mean) / total
        var = (((c - mu) ** 2).sum() + m2 + removed * (mean - mu) ** 2) / total
        value: Tensor = weight * (c - mu) / (var + op.given["eps"]).sqrt() + bias
        return value


@rule("squeeze_release::rms_norm")
class RMSNorm(Statistics):
    """y_k = g_k x_k / rms, rms over all channels, removed ones included.

    Constant: y_k where g_k = 0 or x_k = 0.
    Known: a constant x_k = c gives y_k = g_k c / rms, so one channel carries all of them.
    Absorb: count and squares of the constants that go (`CompensatedRMSNorm`).
    Exact: sums of squares add up. A zero leaves without a carrier. Where eps depends on the dtype nothing else is
    constant.
    """

    def span(self, op: Op, c: Tensor) -> list[Tensor]:
        return [torch.where(c.isnan(), c, 0.0), self._weight(op, len(c)) * c]

    def _weight(self, op: Op, width: int) -> Tensor:
        weight: Tensor = numbers(op, "weight", width, 1.0 - op.given["weight_offset"]) + op.given["weight_offset"]
        return weight

    def constant(self, op: Op, c: Tensor) -> Tensor:
        weight = self._weight(op, len(c))
        nothing_left = (weight == 0) | (c == 0)
        if bool(c.isnan().any()) or op.given["eps"] is None:  # an eps of its own in every dtype
            return torch.where(nothing_left, torch.zeros_like(c), torch.nan)
        square = (c.square().sum() + op.given["removed_squares"]) / (len(c) + op.given["removed"])
        value: Tensor = weight * c / (square + op.given["eps"]).sqrt()
        return value


@rule("squeeze_release::std_norm")
class StdNorm(Statistics):
    """y_k = g_k x_k / sigma, sigma^2 the variance over all channels, removed ones included; x_k is not centred.

    Constant: y_k where g_k = 0 or x_k = 0, and everything if every x_k is constant.
    Known: a constant x_k = c gives y_k = g_k c / sigma, so one channel carries all of them.
    Absorb: count, mean and squared deviations of the constants that go (`CompensatedStdNorm`).
    Exact: the variance as that of a layer norm, over C - 1. A zero leaves without a carrier.
    """

    def span(self, op: Op, c: Tensor) -> list[Tensor]:
        return [torch.where(c.isnan(), c, 0.0), numbers(op, "weight", len(c), 1.0) * c]

    def constant(self, op: Op, c: Tensor) -> Tensor:
        weight = numbers(op, "weight", len(c), 1.0)
        if bool(c.isnan().any()):
            return torch.where((weight == 0) | (c == 0), torch.zeros_like(c), torch.nan)
        removed, mean = op.given["removed"], op.given["removed_mean"]
        total = len(c) + removed
        mu = (c.sum() + removed * mean) / total
        squares = ((c - mu) ** 2).sum() + op.given["removed_m2"] + removed * (mean - mu) ** 2
        value: Tensor = weight * c / (squares / (total - 1) + op.given["eps"]).sqrt()
        return value


@rule("layer_norm", "native_layer_norm")
class InlineLayerNorm(Rule):
    """A layer norm that is called as a function cannot be swapped for a compensated one.

    Exact: always, for nothing changes here.
    Keeps: all its channels; an nn.LayerNorm would let them go.
    """

    reason = "layer_norm called as a function inside a larger forward; make it an nn.LayerNorm to let channels go"


@rule("rms_norm")
class InlineRMSNorm(Rule):
    """An RMS norm that is called as a function cannot be swapped for a compensated one.

    Exact: always, for nothing changes here.
    Keeps: all its channels; an nn.RMSNorm would let them go.
    """

    reason = "rms_norm called as a function inside a larger forward; make it an nn.RMSNorm to let channels go"
