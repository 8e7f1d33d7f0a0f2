"""Sums and norms over channels: the length of a query in cosine attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import compact, varying
from ..labels import Live
from .base import Op, rule
from .pool import Reduce, keep_uniform

if TYPE_CHECKING:
    from ..analyse import Analysis


@rule("linalg_vector_norm", "sum.dim_IntList")
class Total(Reduce):
    """y_h = sum_d x_hd, or (sum_d |x_hd|^p)^(1/p), over the channels d of each head h.

    Need: x_hd for every living head h, but not where it is the constant 0.
    Exact: a term that is 0 for every input adds nothing. Over positions no channel sees another one.
    Keeps: other constants; all under a norm of order 0 or less. Where the channels of one sum do not lie together
    (split attention over its radix), they go together.
    """

    def bind(self, op: Op, ctx: Analysis, layer: Tensor, dims: tuple[int, ...]) -> Tensor | None:
        mine = varying(layer)
        heads = [d for d in mine if d not in dims]
        if heads == list(mine) or list(mine[: len(heads)]) != heads or op.given.get("ord", 2) <= 0:
            return super().bind(op, ctx, layer, dims)
        small = compact(layer)
        shape = [small.size(d) if d in heads else 1 for d in range(small.dim())]
        table = small.reshape(torch.Size(shape).numel(), -1)
        names = ctx.grid(op, table) if heads else None
        zero = keep_uniform(next(op.facts()).value, tuple(d for d in range(layer.dim()) if d not in mine)) == 0
        op.memo.setdefault("terms", []).append((table, names, zero.expand(small.shape).reshape(table.shape)))
        return None if names is None else names.reshape(shape).expand(layer.shape)

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        for table, names, zero in op.memo.get("terms", ()):
            alive = torch.ones(len(table), dtype=torch.bool) if names is None else live[names]
            live.mark(table[alive[:, None] & ~zero], op.where, "enters a sum over channels that stays")
