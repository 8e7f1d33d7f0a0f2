"""Linear ops on a part of a parameter: the query rows of a packed projection (cross-attention)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, uniform, unknown, vector
from ..labels import Live
from .base import Facts, Op, blank, contracted, passed_on

if TYPE_CHECKING:
    from ..analyse import Analysis


def is_part(op: Op) -> bool:
    """Whether the weight was cut out of a parameter, by shape ops alone."""
    weight = op.given["weight"]
    return op.param("weight") is None and weight.source == "param" and len(weight.shape) == 2


def forward(op: Op, ctx: Analysis) -> Facts:
    """y = W x + b where W and b are rows of larger parameters: bound to their labels, so they are sliced with them.

    Constant: y_j, where every x_k with W_jk != 0 is constant.
    Exact: rows go with the rows of the parameter they are cut from.
    Keeps: a constant that is not 0 and is read: nothing is folded, for the bias is a part too.
    """
    x, weight, bias, out = op.given["input"], op.given["weight"], op.given.get("bias"), blank(op)
    assert isinstance(out, Fact)
    columns = _bound(op, ctx, contracted(op, ctx, x, -1), contracted(op, ctx, weight, 1))
    rows = contracted(op, ctx, weight, 0)
    if isinstance(bias, Fact):
        rows = _bound(op, ctx, rows, contracted(op, ctx, bias, 0))
    c = uniform(x.value, -1)
    op.memo["part"] = (columns, rows, weight.value.expand(weight.shape), c)
    layers = [compact(layer).expand(out.shape) for layer in passed_on(x, (-1,))]
    if rows is not None:
        layers.append(vector(rows, out.shape, len(out.shape) - 1))
    return Fact(out.shape, tuple(layers), _value(op, c, out.shape))


def need(op: Op, ctx: Analysis, live: Live) -> None:
    columns, rows, weight, c = op.memo["part"]
    if columns is None:
        return
    read = weight != 0 if rows is None else (weight != 0) & live.needed(rows)[:, None]
    live.mark(
        columns[read.any(0) & (c != 0)], op.where, "reads it (into a bias that is part of another one, nothing folds)"
    )


def _bound(op: Op, ctx: Analysis, one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is not None and other is not None:
        ctx.labels.merge(one, other)
        return one
    for fixed in (one, other):
        if fixed is not None:
            ctx.pin(fixed, op, "meets a tensor of fixed width")
    return None


def _value(op: Op, c: Tensor, shape: tuple[int, ...]) -> Tensor:
    _, _, weight, _ = op.memo["part"]
    varies = ((weight != 0) & c.isnan()).any(1)
    if bool(varies.all()):
        return unknown(shape)
    bias = op.given.get("bias")
    offset = uniform(bias.value, 0) if isinstance(bias, Fact) else 0.0
    values = (weight.double() * c.nan_to_num(0.0)).sum(1) + offset
    return vector(torch.where(varies, torch.nan, values), shape, len(shape) - 1)
