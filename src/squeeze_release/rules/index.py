"""Lookups: embeddings, and the gather that an indexed layer does on its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, varying, vector
from ..labels import Live
from ..pieces import constant_columns
from .base import Facts, Op, Rule, blank, contracted, flat, passed_on, rule
from .elementwise import combine_layers
from .pool import keep_uniform

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


@rule("embedding")
class Embedding(Rule):
    """y = W[i]. Columns are channels; a column that holds one number is a constant.

    Exact: a column is known for every index there is.
    Keeps: its rows, for any of them may be looked up; everything where the weight is computed.
    """

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

    Need: x_index[k] for every living k.
    Absorb: the stored indices follow what is left of x.
    Exact: elements are moved and nothing else.
    Keeps: everything where the index is computed; all of x where another op reads the same index.
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

        def gather(numbers: Tensor) -> Tensor:
            numbers = compact(numbers)
            return (numbers.index_select(dim, index) if numbers.size(dim) > 1 else numbers).expand(out.shape)

        return Fact(out.shape, tuple(layers), gather(x.value), span=x.moved(gather))

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


@rule("index.Tensor")
class Index(Rule):
    """y[i, k] = x[index[i], k]: positions are looked up, channels pass (relative position tables, the last token).

    Constant: what is the same at every place that may be looked up.
    Exact: channels that pass are not moved.
    Keeps: channels along a dimension that is looked up, whatever the index is made of, and everything under a mask.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, indices, out = op.given["self"], op.given["indices"], blank(op)
        dims = [d for d, index in enumerate(indices) if index is not None]
        if not isinstance(out, Fact) or any(not isinstance(indices[d], Fact) for d in dims) or _masks(op):
            return super().forward(op, ctx)
        for fact in flat(indices):
            for layer in fact.layers:
                ctx.pin(layer, op, "an index")
        for layer in x.layers:
            if set(varying(layer)) & set(dims):
                ctx.pin(layer, op, "channels are picked by an index")

        def moved(t: Tensor) -> Tensor:
            """From size 1 along the dimensions that are looked up to the places where the index puts its own."""
            rest = [d for d in range(t.dim()) if d not in dims]
            adjacent = dims == list(range(dims[0], dims[-1] + 1))
            first = dims[0] if adjacent else 0
            sizes = [t.size(d) for d in rest]
            own = [1] * (len(out.shape) - len(rest))
            return t.reshape(sizes[:first] + own + sizes[first:]).expand(out.shape)

        layers = [moved(compact(layer)) for layer in passed_on(x, tuple(dims))]
        return Fact(out.shape, tuple(layers), moved(keep_uniform(x.value, tuple(dims))))


def _masks(op: Op) -> bool:
    """Whether something is picked by a mask, whose dimensions are not those of its result."""
    return any(index is not None and index.meta["val"].dtype == torch.bool for index in op.node.args[1])  # type: ignore


@rule("slice_scatter")
class SliceScatter(Rule):
    """x[a:b] = y, once torch.export has made it functional: x with a slice replaced. Labels that meet are merged.

    Constant: nothing is known of the result.
    Exact: what meets goes together.
    Keeps: what is replaced, where y has a fixed width; everything under a step, or where the slice is cut short.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, src, out = op.given["self"], op.given["src"], blank(op)
        dim = op.given["dim"] % len(x.shape)
        start, stop, _ = slice(op.given["start"], op.given["end"]).indices(x.shape[dim])
        if not isinstance(out, Fact) or op.given["step"] != 1 or stop - start != src.shape[dim]:
            return super().forward(op, ctx)
        part = Fact(src.shape, tuple(layer.narrow(dim, start, stop - start) for layer in x.layers), src.value)
        combine_layers(op, ctx, [part, src], src.shape)
        return Fact(out.shape, x.layers, out.value)
