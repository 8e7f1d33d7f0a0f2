"""Attention: scaled_dot_product_attention, and the matmuls of those who write it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..facts import Fact, compact, varying
from ..labels import Live
from ..modules import NarrowMultiheadAttention
from .base import RULES, Facts, Op, Rule, blank, rule
from .elementwise import Identity, _join
from .pool import keep_uniform

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


class Contraction(Rule):
    """What both kinds of attention share: a sum over d of a[h, d] * b[h, d], one for every head h.

    a_hd and b_hd are merged. Head h of the result is a label of its own that stands for the row (a_h1 .. a_hD).
    Need: a_hd for every living head h, but not where a_hd or b_hd is the constant 0.
    """

    def contract(
        self, op: Op, ctx: Analysis, a: Fact, a_dim: int, b: Fact, b_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Merge two operands along the dimensions they are summed over; (table heads x d, head labels)."""
        left, right = self._row(op, ctx, a, a_dim), self._row(op, ctx, b, b_dim)
        if left is None or right is None or left.shape != right.shape:
            for fact, dim in ((a, a_dim), (b, b_dim)):
                for layer in fact.along(dim):
                    ctx.pin(layer, op, "is multiplied with a tensor of another layout or of fixed width")
            return None, None
        ctx.labels.merge(left, right)
        if "heads" not in ctx.options:
            ctx.pin(left, op, "this rule set leaves attention as it is")
        if left.size(0) == 1:
            return left, None
        return left, ctx.grid(op, left)

    def _row(self, op: Op, ctx: Analysis, fact: Fact, dim: int) -> Tensor | None:
        dim %= len(fact.shape)
        for layer in fact.along(dim):
            if varying(layer)[-1] == dim and not set(varying(layer)) & (self._sequence(fact) - {dim}):
                return compact(layer).reshape(-1, layer.size(dim))
        return None

    @staticmethod
    def _sequence(fact: Fact) -> set[int]:
        return {len(fact.shape) - 1, len(fact.shape) - 2}

    def zero(self, fact: Fact, dim: int, like: Tensor) -> Tensor:
        """Which (head, d) of an operand are 0 everywhere."""
        return self.constant(fact, dim, like) == 0

    def constant(self, fact: Fact, dim: int, like: Tensor) -> Tensor:
        """The number that every token has at (head, d), or NaN."""
        dim %= len(fact.shape)
        layer = fact.along(dim)[0]
        others = tuple(d for d in range(len(fact.shape)) if d not in varying(layer))
        small = keep_uniform(fact.value, others)
        return small.expand([layer.size(d) if d in varying(layer) else 1 for d in range(layer.dim())]).reshape(
            like.shape
        )


@rule("scaled_dot_product_attention")
class Attention(Contraction):
    """softmax(s q k^T) v, head by head.

    Constant: a value channel that is the same for every token passes through (without a mask; a row that is masked
    throughout gives 0).
    Need: head h of q and k if any channel of v in it lives; of those not the d where q_d = 0, nor where k_d is the
    same for every token, for then the softmax cancels it.
    Absorb: where s is the default 1/sqrt(D), a smaller D is made good by the factor sqrt(D'/D) on the rows of q.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        q, k, v, out = (op.given["query"], op.given["key"], op.given["value"], blank(op))
        assert isinstance(out, Fact)
        qk, heads = self.contract(op, ctx, q, -1, k, -1)
        values = self._row(op, ctx, v, -1)
        mask = op.given.get("attn_mask")
        module = ctx.model.get_submodule(op.module)
        if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
            values = None  # its stand-in knows no keys of its own
        self._bind_mask(op, ctx, mask, qk, heads, values)
        for fact in (q, k, v):
            for layer in fact.along(-2):
                ctx.pin(layer, op, "tokens of an attention")
        if values is None or (qk is None and values.size(0) > 1) or (qk is not None and qk.size(0) != values.size(0)):
            for fact in (q, k, v):
                for layer in fact.layers:
                    ctx.pin(layer, op, "heads of query, key and value do not line up")
            return out
        if heads is not None:
            ctx.grid(op, values, outer=heads)
        op.memo.update(qk=qk, heads=heads, values=values)
        value = keep_uniform(v.value, (len(v.shape) - 2,)) if mask is None else compact(out.value)
        layers = [layer for layer in v.along(-1)]
        return Fact(out.shape, tuple(compact(layer).expand(out.shape) for layer in layers), value.expand(out.shape))

    def _bind_mask(self, op: Op, ctx: Analysis, mask: Any, *tables: Tensor | None) -> None:
        """A mask with one entry for every head, or with channels of its own, fixes the heads."""
        if isinstance(mask, Fact) and (mask.layers or any(s > 1 for s in mask.shape[1:-2])):
            for labels in (*tables, *mask.layers):
                if labels is not None:
                    ctx.pin(labels, op, "the attention mask has a fixed number of heads")

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        qk, heads, values = (op.memo.get(name) for name in ("qk", "heads", "values"))
        if qk is None or values is None:
            return
        alive = live[values].any(1) if heads is None else live[heads]
        q, k = op.given["query"], op.given["key"]
        free = self.zero(q, -1, qk) | ~self.constant(k, -1, qk).isnan()
        if op.given.get("scale") is None and not self._can_scale(op, ctx):
            free = torch.zeros_like(free)
        live.mark(qk[alive[:, None] & ~free], op.where, "enters the scores of a head that stays")

    def _can_scale(self, op: Op, ctx: Analysis) -> bool:
        """Whether q comes straight from a Linear and nobody else reads those rows."""
        if "can_scale" not in op.memo:
            rows = op.given["query"].along(-1)
            op.memo["can_scale"] = bool(rows) and _only_reader(op, ctx, compact(rows[0]).unique())
        return bool(op.memo["can_scale"])

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        qk, values = op.memo.get("qk"), op.memo.get("values")
        if qk is None or values is None or op not in ctx.wanted:
            return
        width = int(live[qk].sum(1).max())
        scale = op.given.get("scale")
        if isinstance(ctx.model.get_submodule(op.module), (nn.MultiheadAttention, NarrowMultiheadAttention)):
            if not bool(live[qk].all() & live[values].all()):
                plan.attention(
                    op.module,
                    count=int(live[qk].any(1).sum()),
                    head_dim=width,
                    v_head_dim=int(live[values].sum(1).max()),
                    scale=scale or qk.size(1) ** -0.5,
                )
        elif scale is None and 0 < width < qk.size(1):
            rows = compact(op.given["query"].along(-1)[0]).unique()
            plan.scale_rows(ctx, rows, (width / qk.size(1)) ** 0.5)
            plan.rescale_attribute(op.module, qk.size(1) ** -0.5, width**-0.5)


def _only_reader(op: Op, ctx: Analysis, rows: Tensor) -> bool:
    """Between the Linear that writes these rows and this op there are shape ops only, and nobody else reads them."""
    mine = [f for name, f in op.given.items() if isinstance(f, Fact) and name != "query"]
    alone = not any(bool(torch.isin(rows, compact(layer)).any()) for fact in mine for layer in fact.layers)
    return alone and ctx.written_by_linear(rows) and ctx.sole_reader(op, rows)


@rule("matmul", "bmm")
class Matmul(Contraction):
    """y[.., n, m] = sum_d a[.., n, d] b[.., d, m]: scores and weighted sums of attention written out.

    A softmax over the last dimension has rows that sum to 1, so a value channel that is the same for every token
    passes through the second product; and it does not see what all keys share, so a key channel that is the same for
    every token goes from the first.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        a, b = list(op.facts())[:2]
        out = blank(op)
        if not isinstance(out, Fact) or len(a.shape) < 2 or len(b.shape) < 2:
            return super().forward(op, ctx)
        rank = len(out.shape)
        layers: list[Tensor] = []
        if a.along(-1) or b.along(-2):
            table, heads = self._scores(op, ctx, a, b)
            op.memo.update(table=table, heads=heads)
            if heads is not None:
                rows = a.along(-1)[0]
                shape = [rows.size(d) if d in varying(rows) and d != rows.dim() - 1 else 1 for d in range(rows.dim())]
                layers.append(heads.reshape([1] * (rank - rows.dim()) + shape).expand(out.shape))
        self._pin_batch(op, ctx, a, b)
        for fact, summed in ((a, -1), (b, -2)):
            touched = fact.along(summed)
            for layer in fact.layers:
                if not any(layer is t for t in touched):
                    small = compact(layer)
                    layers = _join(
                        op, ctx, layers, small.reshape((1,) * (rank - small.dim()) + small.shape).expand(out.shape)
                    )
        value = keep_uniform(b.value, (len(b.shape) - 2,)) if sums_to_one(op) else compact(out.value)
        return Fact(
            out.shape, tuple(layers), value.reshape((1,) * (rank - value.dim()) + value.shape).expand(out.shape)
        )

    def _scores(self, op: Op, ctx: Analysis, a: Fact, b: Fact) -> tuple[Tensor | None, Tensor | None]:
        flipped = Fact(
            (*b.shape[:-2], b.shape[-1], b.shape[-2]),
            tuple(layer.transpose(-1, -2) for layer in b.layers),
            b.value.transpose(-1, -2),
        )
        op.memo["flipped"] = flipped
        return self.contract(op, ctx, a, -1, flipped, -1)

    def _pin_batch(self, op: Op, ctx: Analysis, a: Fact, b: Fact) -> None:
        """Along a batch dimension both sides must carry channels, or one of them be 1 wide."""
        for one, other in ((a, b), (b, a)):
            for layer in one.layers:
                for d in varying(layer):
                    back = d - len(one.shape)
                    if back < -2 and -back <= len(other.shape) and other.shape[back] > 1 and not other.along(back):
                        ctx.pin(layer, op, "is multiplied with a tensor of fixed width")

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        table = op.memo.get("table")
        if table is None:
            return
        heads = op.memo["heads"]
        alive = live[heads] if heads is not None else torch.ones(len(table), dtype=torch.bool)
        left, right = op.given[next(iter(op.given))], op.memo["flipped"]
        free = self.zero(left, -1, table) | self.zero(right, -1, table)
        if goes_into_softmax(op):
            free |= ~self.constant(right, -1, table).isnan()
        live.mark(table[alive[:, None] & ~free], op.where, "enters the product of a head that stays")


def goes_into_softmax(op: Op) -> bool:
    """Whether the result is only scaled and shifted on its way into a softmax over its last dimension."""
    node = op.node
    while len(node.users) == 1:
        (user,) = node.users
        if is_softmax(user):
            return True
        scales = (
            str(user.target).startswith(("aten.mul.", "aten.div."))
            and user.args[0] is node
            and not (isinstance(user.args[1], fx.Node) and user.args[1].meta["val"].numel() > 1)
        )
        shifts = str(user.target).startswith(("aten.add.Tensor", "aten.sub.Tensor")) and user.args[0] is node
        if not (scales or shifts or isinstance(RULES.get(user.target), Identity)):
            return False
        node = user
    return False


def is_softmax(node: Any) -> bool:
    """A softmax over the last dimension."""
    if not str(getattr(node, "target", "")).startswith(("aten.softmax.int", "aten._softmax")):
        return False
    return node.args[1] in (-1, len(node.meta["val"].shape) - 1)


def sums_to_one(op: Op) -> bool:
    """Whether the left operand is a softmax over its last dimension."""
    node = op.node.args[0]
    while isinstance(node, fx.Node) and isinstance(RULES.get(node.target), Identity):
        node = node.args[0]
    return is_softmax(node)
