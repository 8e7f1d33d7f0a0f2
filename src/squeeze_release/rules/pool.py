"""Reductions over positions: pooling, mean, softmax, resampling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, scaled_one, unknown, varying
from .base import Facts, Op, Rule, blank, passed_on, rule

if TYPE_CHECKING:
    from ..analyse import Analysis


def keep_uniform(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Numbers that are the same along `dims`, with size 1 there; NaN where they are not."""
    small = compact(value)
    for d in dims:
        if small.size(d) > 1:
            first = small.narrow(d, 0, 1)
            small = torch.where((small == first).all(d, keepdim=True), first, torch.nan)
        else:
            small = small.narrow(d, 0, 1)
    return small


@rule(
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "max_pool2d_with_indices",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_linear1d",
    "upsample_trilinear3d",
    "upsample_nearest3d",
    "_upsample_nearest_exact2d",
)
class Pool(Rule):
    """Windows over the trailing dimensions. A constant stays itself, but average pooling that counts its zero padding
    (or divides by a number of its own) keeps only 0.

    Known: there, a constant times a function of the position that all channels share (`rules/carriers.py`). What was
    known in this sense is known of its average too.
    Exact: no channel sees another one.
    Keeps: channels along a dimension that a window slides over.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, outs = next(op.facts()), blank(op)
        spatial = tuple(range(len(x.shape) - self._rank(op), len(x.shape)))
        for layer in x.layers:
            if set(varying(layer)) & set(spatial):
                ctx.pin(layer, op, "a window slides over it")
        value = keep_uniform(x.value, spatial)
        layers = [compact(layer) for layer in passed_on(x, spatial)]
        borders = bool(op.given.get("count_include_pad") and any(op.given["padding"]))

        def fact(out: Fact) -> Fact:
            labels, numbers = tuple(layer.expand(out.shape) for layer in layers), value.expand(out.shape)
            if op.given.get("divisor_override") or borders:
                zeros = torch.where(value == 0, value, torch.nan).expand(out.shape)
                return Fact(out.shape, labels, zeros, span=scaled_one(numbers, labels))
            mean = x.moved(lambda t: keep_uniform(t, spatial).expand(out.shape)) if "avg_pool" in op.name else None
            return Fact(out.shape, labels, numbers, span=mean)

        if isinstance(outs, list):  # values, and the places they were found at
            return [fact(outs[0]), *(replace(fact(o), numbers=unknown(o.shape)) for o in outs[1:])]
        return fact(outs)  # type: ignore[arg-type]

    def _rank(self, op: Op) -> int:
        return next(int(c) for c in op.name if c.isdigit())


@rule(
    "mean.dim",
    "amax",
    "amin",
    "var.dim",
    "var.correction",
    "std.dim",
    "std.correction",
    "norm.ScalarOpt_dim",
    "argmax",
    "argmin",
    "max.dim",
    "min.dim",
    "any.dim",
    "all.dim",
    "prod.dim_int",
    "logsumexp",
    "cumsum",
    "softmax.int",
    "log_softmax.int",
    "_softmax",
)
class Reduce(Rule):
    """Over positions, channels pass. Over channels, all of them are needed. The mean of a constant is that constant.

    Where channels spread over several dimensions and only some of those are summed over (split attention over its
    radix, the mean of each group of channels), those that enter one sum go together.
    Constant: a sum of such constants, and their softmax, where all that enter it are.
    Exact: over positions no channel sees another one. How many positions there are depends on the input, so their sum
    is no constant.
    Keeps: all channels that are summed over, a softmax over channels included; what has several outputs (`max.dim`).
    Other numbers than those of mean, amax, amin, sum and softmax are not followed, but that a sum of zeros is 0.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, outs = next(op.facts()), blank(op)
        rank = len(x.shape)
        given = op.given.get("dim")
        dims = (
            tuple(range(rank))
            if given is None or given == []
            else tuple(d % rank for d in (given if isinstance(given, (list, tuple)) else [given]))
        )
        if not isinstance(outs, Fact):
            return self._blank_with_pins(op, ctx, x)
        layers = [self.bind(op, ctx, layer, dims) for layer in x.layers]
        same = outs.shape == x.shape  # a softmax or a running sum
        kept = [compact(x.layers[i] if same else layer) for i, layer in enumerate(layers) if layer is not None]
        value = self._value(op, x, dims)

        def fit(numbers: Tensor) -> Tensor:
            if len(outs.shape) < rank:  # keepdim=False
                numbers = numbers.reshape([numbers.size(d) for d in range(rank) if d not in dims])
            return numbers.expand(outs.shape)

        mean = x.moved(lambda t: fit(keep_uniform(t, dims))) if op.name.startswith("aten.mean") else None
        return Fact(outs.shape, tuple(map(fit, kept)), fit(value), span=mean)

    def _value(self, op: Op, x: Fact, dims: tuple[int, ...]) -> Tensor:
        """The numbers of the result, with size 1 along `dims` or none of them known there."""
        if op.name.startswith(("aten.mean", "aten.amax", "aten.amin")):
            return keep_uniform(x.value, dims)
        # How many positions there are depends on the input; parts of a channel are as many as there are.
        parts = any(set(dims) <= set(varying(layer)) for layer in x.layers)
        wide = x.value.expand(x.shape)
        for d in range(len(x.shape)):
            if d not in dims and d not in varying(x.value):
                wide = wide.narrow(d, 0, 1)
        if parts and op.name.startswith("aten.sum"):
            return wide.sum(dims, keepdim=True)
        if parts and op.name.startswith(("aten.softmax", "aten._softmax")):
            return wide.softmax(dims[0])
        zeros = keep_uniform(x.value, dims)  # however many
        return torch.where((zeros == 0) & op.name.startswith("aten.sum"), zeros, torch.nan)

    def bind(self, op: Op, ctx: Analysis, layer: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        return bind_along(op, ctx, layer, dims)

    def _blank_with_pins(self, op: Op, ctx: Analysis, x: Fact) -> Facts:
        for layer in x.layers:
            ctx.pin(layer, op, "a reduction with several outputs")
        return blank(op)


def bind_along(op: Op, ctx: Analysis, layer: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """Let channels go together that differ along `dims` only; the labels of what is left without these dimensions."""
    summed = [d for d in varying(layer) if d in dims]
    if not summed:
        return layer
    first = layer
    for d in summed:
        first = first.narrow(d, 0, 1)
    first = first.expand(layer.shape)
    if not varying(first):
        ctx.pin(layer, op, "a reduction over channels needs all of them")
        return None
    ctx.labels.merge(*torch.broadcast_tensors(compact(first), compact(layer)))
    return first
