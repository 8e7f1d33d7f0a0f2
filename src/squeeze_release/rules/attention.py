"""Attention: sums over the channels of a head, and scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..facts import Fact, compact, varying
from ..labels import Live
from ..modules import NarrowMultiheadAttention
from ..trace import named_arguments
from .base import Facts, Op, Rule, blank, rule
from .carriers import Carried, Request, carried, request
from .grouped import copied, head_sizes
from .masked import leaves_every_query_a_key
from .pool import keep_uniform
from .shape import origin

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


class Contraction(Rule):
    """What both kinds of attention share: a sum over d of a[h, d] * b[h, d], one for every head h.

    a_hd and b_hd are merged. Head h of the result is a label of its own that stands for the row (a_h1 .. a_hD).
    Where b has fewer heads than a (grouped queries), each of its heads is read by several of a; see `copied`.
    Need: a_hd for every living head h, but not where a_hd or b_hd is the constant 0.
    Exact: a term of a sum that is 0 for every input is left out.
    Keeps: the width of heads where the two do not have the same heads of the same width. Heads stay equally wide.
    """

    def contract(
        self, op: Op, ctx: Analysis, a: Fact, a_dim: int, b: Fact, b_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Merge two operands along the dimensions they are summed over; (table heads x d, head labels)."""
        left, right = self.row(op, ctx, a, a_dim), self.row(op, ctx, b, b_dim)
        if left is not None and right is not None and left.size(1) == right.size(1):
            left, right = self.as_many(op, ctx, left, right), self.as_many(op, ctx, right, left)
        if left is None or right is None or left.shape != right.shape:
            return None, None
        ctx.labels.merge(left, right)
        if "heads" not in ctx.options:
            ctx.pin(left, op, "this rule set leaves attention as it is")
        if left.size(0) == 1:
            return left, None
        heads = ctx.grid(op, left)
        ctx.labels.merge(heads, ctx.grid(op, right))
        return left, heads

    def as_many(self, op: Op, ctx: Analysis, table: Tensor, other: Tensor) -> Tensor:
        """A table with as many heads as the other one, if it can be: one head is read by all."""
        if len(table) == 1 < len(other):
            return copied(op, ctx, table, len(other))
        return table

    def row(self, op: Op, ctx: Analysis, fact: Fact, dim: int) -> Tensor | None:
        """The channels along `dim`, head by head."""
        dim %= len(fact.shape)
        for layer in fact.along(dim):
            if varying(layer)[-1] != dim or set(varying(layer)) & (self._sequence(fact) - {dim}):
                continue
            table = compact(layer).reshape(-1, layer.size(dim))
            copies = self.batch_layers(fact)
            if len(table) == 1 and len(copies) == 1:  # one head, expanded to many
                names = compact(copies[0]).reshape(-1)
                return copied(op, ctx, table, len(names), names)
            return table if not copies else None
        return None

    def batch_layers(self, fact: Fact) -> list[Tensor]:
        """Layers in front of the two dimensions that a product is over."""
        return [layer for layer in fact.layers if varying(layer)[-1] < min(self._sequence(fact))]

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
        small = small.expand([layer.size(d) if d in varying(layer) else 1 for d in range(layer.dim())])
        small = small.reshape(-1, like.size(1))
        return small.repeat_interleave(len(like) // len(small), 0)


@rule("scaled_dot_product_attention")
class Attention(Contraction):
    """softmax(s q k^T + m) v, head by head.

    Constant: a value channel that is the same for every token passes through. Where a mask comes in from outside only 0
    does, for a row that is masked throughout gives 0.
    Need: head h of q and k if any channel of v in it lives; of those not the d where q_d = 0, nor where k_d is the
    same for every token, for then the softmax cancels it; of the d where q_d is the same number c_d for every token one
    is enough, d0.
    Absorb: k_d0 += k_d c_d / c_d0 for constant queries. Where s is the default 1/sqrt(D), a smaller D is made good by
    the factor sqrt(D'/D) on the rows of q.
    Grouped queries: a head of k and v goes with the last of the heads of q that read it; one head of q alone goes where
    as many go from every group. A mask with a number for every head binds them where it has labels (a table of relative
    positions), and fixes them where it has none.
    Channels for tokens (cross-covariance): where the labels of q, k and v lie along the tokens, whole heads go. A query
    is written and read by itself; keys and values all count in its softmax, even those that are 0.
    Exact: under any mask for what is 0 or unread; for constant values where every row has a key it may look at, which
    a mask from outside does not promise; one that code makes from finite tables does (`rules/masked.py`).
    Keeps: tokens; constant values under a mask from outside; dimensions of q and k where s is the default and q does
    not come straight from a Linear that takes the factor; all where the heads of q, k and v do not line up, or an
    nn.MultiheadAttention adds keys of its own.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        q, k, v, out = (op.given["query"], op.given["key"], op.given["value"], blank(op))
        assert isinstance(out, Fact)
        if (crossed := self._channels_for_tokens(op, ctx)) is not None:
            return crossed
        qk, heads = self.contract(op, ctx, q, -1, k, -1)
        values = self.row(op, ctx, v, -1)
        if qk is not None and values is not None:
            values = self.as_many(op, ctx, values, qk)
        mask = op.given.get("attn_mask")
        module = ctx.model.get_submodule(op.module)
        if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
            values = None  # its stand-in knows no keys of its own
        self._bind_mask(op, ctx, mask, q, heads, values)
        for fact in (q, k, v):
            for layer in fact.along(-2):
                ctx.pin(layer, op, "tokens of an attention")
        lined_up = values is not None and (len(values) == 1 if qk is None else len(qk) == len(values))
        sizes = head_sizes([q, k, v], out.shape, len(values)) if values is not None and lined_up else None
        if values is None or sizes is None:
            for layer in (*q.layers, *k.layers, *v.layers):
                ctx.pin(layer, op, "heads of query, key and value do not line up")
            return out
        if qk is None:
            for layer in (*q.layers, *k.layers):
                ctx.pin(layer, op, "query and key do not line up")
        if heads is not None:
            ctx.grid(op, values, outer=heads)
            ctx.labels.merge(heads, ctx.grid(op, values))
        op.memo.update(qk=qk, heads=heads, values=values)
        value = keep_uniform(v.value, (len(v.shape) - 2,))
        if mask is not None and not leaves_every_query_a_key(op, ctx):
            value = torch.where(value == 0, value, torch.nan)
        if len(v.shape) > 2 and 1 < value.size(-3) < out.shape[-3]:
            value = value.repeat_interleave(out.shape[-3] // value.size(-3), -3)
        return Fact(out.shape, (values.reshape(*sizes, 1, -1).expand(out.shape),), value.expand(out.shape))

    def _channels_for_tokens(self, op: Op, ctx: Analysis) -> Fact | None:
        """Cross-covariance: channels lie where tokens do, head by head, and positions are summed over."""
        q, k, v = facts = [op.given[name] for name in ("query", "key", "value")]
        if (
            op.given.get("attn_mask") is not None
            or op.given["is_causal"]
            or not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        ):
            return None
        if any([varying(layer) for layer in fact.layers] != [(len(q.shape) - 3, len(q.shape) - 2)] for fact in facts):
            return None
        tables = [compact(fact.layers[0]).reshape(q.shape[-3], -1) for fact in facts]
        heads = ctx.grid(op, tables[0])
        for table in tables[1:]:  # every key and value counts in the softmax of every query that is left
            ctx.labels.merge(heads, ctx.grid(op, table, rigid=True))
        if "heads" not in ctx.options:
            ctx.pin(heads, op, "this rule set leaves attention as it is")
        shape = tuple(op.node.meta["val"].shape)
        value = keep_uniform(v.value, (len(v.shape) - 2,)).expand(shape)
        return Fact(shape, (q.layers[0][..., :1].expand(shape),), value)

    def as_many(self, op: Op, ctx: Analysis, table: Tensor, other: Tensor) -> Tensor:
        if op.given["enable_gqa"] and len(table) < len(other) and len(other) % len(table) == 0:
            return copied(op, ctx, table, len(other) // len(table))
        return super().as_many(op, ctx, table, other)

    def _bind_mask(
        self, op: Op, ctx: Analysis, mask: Any, q: Fact, heads: Tensor | None, values: Tensor | None
    ) -> None:
        if not isinstance(mask, Fact):
            return
        rows = q.along(-1)
        at = [d - len(q.shape) for d in varying(rows[0])[:-1]] if rows and heads is not None else []
        bound = False
        for layer in mask.layers:
            mine = [d - len(mask.shape) for d in varying(layer)]
            if heads is not None and mine == at and compact(layer).numel() == len(heads):
                ctx.labels.merge(heads, compact(layer).reshape(-1))
                bound = True
            else:
                ctx.pin(layer, op, "the attention mask has a fixed size")
        counted = [d for d in (at or range(-len(mask.shape) + 1, -2)) if -d <= len(mask.shape) and mask.shape[d] > 1]
        if counted and not bound:
            for labels in (heads, values):
                if labels is not None:
                    ctx.pin(labels, op, "the attention mask has a fixed number of heads")

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        qk, heads, values = (op.memo.get(name) for name in ("qk", "heads", "values"))
        if qk is None or values is None:
            return
        alive = live[values].any(1) if heads is None else live[heads]
        q, k = op.given["query"], op.given["key"]
        free = self.zero(q, -1, qk) | ~self.constant(k, -1, qk).isnan() | self._mixed(op, ctx)
        if op.given.get("scale") is None and not self._can_scale(op, ctx):
            free = torch.zeros_like(free)
        live.mark(qk[alive[:, None] & ~free], op.where, "enters the scores of a head that stays")

    def _mixed(self, op: Op, ctx: Analysis) -> Tensor:
        """Which d hold a q that is the same for every token: one carries the others, if rows of k may change."""
        q, k, qk = op.given["query"], op.given["key"], op.memo["qk"]
        if "mixed" not in op.memo:
            rows = k.along(-1)
            may = bool(rows) and "carriers" in ctx.options and not op.memo.get("sources")
            may = may and _only_reader(op, ctx, compact(rows[0]).unique(), "key")
            same = ~self.constant(q, -1, qk).isnan() & self.constant(k, -1, qk).isnan()
            op.memo["mixed"] = same if may else torch.zeros_like(same)
        mixed: Tensor = op.memo["mixed"]
        return mixed

    def carriers(self, op: Op, ctx: Analysis, live: Live) -> Iterator[Request]:
        for head, table, read in self._constant_queries(op, ctx, live):
            yield from request(table, op.memo["qk"][head], read, live, op.where)

    def _constant_queries(self, op: Op, ctx: Analysis, live: Live) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Per living head what is known of q (`carriers.known`), and which of it counts."""
        if op.memo.get("qk") is None or op.memo.get("values") is None or not bool(self._mixed(op, ctx).any()):
            return
        values, heads, mixed = op.memo["values"], op.memo["heads"], self._mixed(op, ctx)
        numbers = self.constant(op.given["query"], -1, op.memo["qk"])
        alive = live[values].any(1) if heads is None else live[heads]
        for head in (alive & mixed.any(1)).nonzero().flatten().tolist():
            c = numbers[head]
            yield head, torch.stack([torch.where(c.isnan(), c, 0.0), c], 1), mixed[head]

    def _mix(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        """Rows of k that go are added to the row of their carrier. (Its bias cancels in the softmax.)"""
        mine = self.row(op, ctx, op.given["key"], -1)
        for head, table, read in self._constant_queries(op, ctx, live):
            found = carried(table, live[op.memo["qk"][head]], read)
            if found is not None and mine is not None:
                ((name, _),) = (owner for owner in ctx.owners(mine[head]) if owner is not None)
                rows = ctx.param_labels(name, 0)
                assert rows is not None
                place = mine[head] - rows[0]
                plan.carry(name, 0, [Carried(place[found.gone], place[found.carriers], found.factors)], head)

    def _can_scale(self, op: Op, ctx: Analysis) -> bool:
        """Whether q comes straight from a Linear that nobody else reads, or a stand-in has a scale of its own."""
        if isinstance(ctx.model.get_submodule(op.module), nn.MultiheadAttention):
            return True
        if "can_scale" not in op.memo:
            rows = op.given["query"].along(-1)
            op.memo["can_scale"] = bool(rows) and _only_reader(op, ctx, compact(rows[0]).unique(), "query")
        return bool(op.memo["can_scale"])

    def repeats(self, op: Op, live: Live) -> list[tuple[int, int]]:
        """How many query heads read each key head, before and after."""
        heads, sources = op.memo.get("heads"), op.memo.get("sources")
        if heads is None or not sources:
            return []
        groups = int(live[sources[0]].any(1).sum())
        return [(len(heads) // len(sources[0]), int(live[heads].sum()) // max(groups, 1))]

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        qk, values = op.memo.get("qk"), op.memo.get("values")
        if qk is None or values is None or op not in ctx.wanted:
            return
        self._mix(op, ctx, live, plan)
        width = int(live[qk].sum(1).max())
        scale = op.given.get("scale")
        if isinstance(ctx.model.get_submodule(op.module), (nn.MultiheadAttention, NarrowMultiheadAttention)):
            if plan.cuts(op.module):  # torch's own takes the width of its input for that of all heads
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


def _only_reader(op: Op, ctx: Analysis, rows: Tensor, argument: str) -> bool:
    """Between the Linear that writes these rows and this op there are shape ops only, and nobody else reads them."""
    mine = [f for name, f in op.given.items() if isinstance(f, Fact) and name != argument]
    alone = not any(bool(torch.isin(rows, compact(layer).reshape(-1)).any()) for fact in mine for layer in fact.layers)
    straight = origin(named_arguments(op.node)[argument]).target is torch.ops.aten.linear.default
    return alone and straight and ctx.written_by_linear(rows) and ctx.sole_reader(op, rows)
