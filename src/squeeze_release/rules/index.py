"""Lookups: embeddings, and the gather that an indexed layer does on its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..facts import Fact, compact, vector
from ..labels import Live
from ..pieces import constant_columns
from .base import Facts, Op, Rule, blank, contracted, passed_on, rule

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


@rule("embedding")
class Embedding(Rule):
    """y = W[i]. Columns are channels; a column that holds one number is a constant."""

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        name, out = op.param("weight"), blank(op)
        if name is None or not isinstance(out, Fact):
            return super().forward(op, ctx)
        ctx.pin_param(name, 0, op, "rows of an embedding")
        columns = ctx.param_labels(name, 1)
        weight = ctx.tensor(name)
        value = torch.where(constant_columns(weight), weight[0].double(), torch.nan)
        layers = () if columns is None else (vector(columns, out.shape, len(out.shape) - 1),)
        return Fact(out.shape, layers, vector(value, out.shape, len(out.shape) - 1))


@rule("index_select")
class IndexSelect(Rule):
    """y_k = x_index[k]: output k is a unit of its own that reads one input.

    Need: x_index[k] for every living k. Absorb: the stored indices follow what is left of x.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        name, out, x = op.param("index"), blank(op), op.given["self"]
        if name is None or not isinstance(out, Fact):
            return super().forward(op, ctx)
        dim = op.given["dim"] % len(x.shape)
        index = ctx.tensor(name)
        labels, mine = contracted(op, ctx, x, dim), ctx.param_labels(name, 0)
        op.memo.update(labels=labels, mine=mine, index=index, name=name)
        layers = [compact(layer).expand(out.shape) for layer in passed_on(x, (dim,))]
        if mine is not None:
            layers.append(vector(mine, out.shape, dim))
        value = compact(x.value)
        value = value.index_select(dim, index) if value.size(dim) > 1 else value
        return Fact(out.shape, tuple(layers), value.expand(out.shape))

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        labels, mine = op.memo.get("labels"), op.memo.get("mine")
        if labels is not None:
            index = op.memo["index"]
            if ctx.shared(op.memo["name"], op):
                live.mark(labels, op.where, "its index is read elsewhere too")
            live.mark(labels[index if mine is None else index[live[mine]]], op.where, "reads it by index")

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        labels = op.memo.get("labels")
        if labels is not None and not bool(live[labels].all()):
            position = live[labels].long().cumsum(0) - 1
            plan.values(op.memo["name"], position[op.memo["index"]].clamp(min=0))
