"""Matrix products: the scores and weighted sums of attention that is written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..facts import Fact, compact, varying
from ..labels import Live
from ..modules import NarrowMultiheadAttention
from .attention import Contraction
from .base import RULES, Facts, Op, blank, rule
from .elementwise import Identity, _join, combine_layers
from .grouped import head_sizes, whole_rows
from .pool import keep_uniform

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


@rule("matmul", "bmm")
class Matmul(Contraction):
    """y[.., n, m] = sum_d a[.., n, d] b[.., d, m]: scores and weighted sums of attention written out.

    A softmax over the last dimension has rows that sum to 1, so a value channel that is the same for every token
    passes through the second product; and it does not see what all keys share, so a key channel that is the same for
    every token goes from the first. A value channel that is 0 passes under any weights. Where one side has a fixed
    width, the d stay, and of the other side whole heads may go.
    Exact: where only scaling by one number, adding, and identities lie between the product and its softmax.
    Keeps: constant keys and values where anything else lies between (a softcap, sinks, relu); vectors as operands; all
    of a head where a batch dimension has a fixed width on the other side.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        a, b = list(op.facts())[:2]
        out = blank(op)
        if not isinstance(out, Fact) or len(a.shape) < 2 or len(b.shape) < 2:
            return super().forward(op, ctx)
        layers = self.product(op, ctx, a, b, out.shape)
        rank = len(out.shape)
        value = keep_uniform(b.value, (len(b.shape) - 2,))
        if not sums_to_one(op):
            value = torch.where(value == 0, value, torch.nan)
        return Fact(
            out.shape, tuple(layers), value.reshape((1,) * (rank - value.dim()) + value.shape).expand(out.shape)
        )

    def product(self, op: Op, ctx: Analysis, a: Fact, b: Fact, shape: tuple[int, ...]) -> list[Tensor]:
        """The layers of the result."""
        layers: list[Tensor] = []
        summed = [*a.along(-1), *b.along(-2)]
        if summed:
            table, heads = self._scores(op, ctx, a, b)
            op.memo.update(table=table, heads=heads)
            if table is None:
                layers = self._fixed(op, ctx, a, b, shape)
            elif heads is not None:
                sizes = head_sizes([a, b], shape, len(heads))
                if sizes is None:
                    ctx.pin(heads, op, "heads that are nowhere to be seen in the result")
                else:
                    layers = [heads.reshape(*sizes, 1, 1).expand(shape)]
        self._pin_batch(op, ctx, a, b)
        for fact in (a, b):
            for layer in fact.layers:
                if not any(layer is t for t in summed):
                    layers = _join(op, ctx, layers, _laid(layer, shape))
        return layers

    def _scores(self, op: Op, ctx: Analysis, a: Fact, b: Fact) -> tuple[Tensor | None, Tensor | None]:
        flipped = Fact(
            (*b.shape[:-2], b.shape[-1], b.shape[-2]),
            tuple(layer.transpose(-1, -2) for layer in b.layers),
            b.value.transpose(-1, -2),
        )
        op.memo.update(left=a, flipped=flipped)
        return self.contract(op, ctx, a, -1, flipped, -1)

    def _fixed(self, op: Op, ctx: Analysis, a: Fact, b: Fact, shape: tuple[int, ...]) -> list[Tensor]:
        """The heads of operands whose summed dimension cannot shrink."""
        layers: list[Tensor] = []
        text = "is multiplied with a tensor of another layout or of fixed width"
        for fact, dim in ((a, len(a.shape) - 1), (b, len(b.shape) - 2)):
            for layer in fact.along(dim):
                heads = whole_rows(op, ctx, layer, {dim}, text)
                if heads is not None:
                    layers = _join(op, ctx, layers, _laid(heads, shape))
        return layers

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
        left, right = op.memo["left"], op.memo["flipped"]
        free = self.zero(left, -1, table) | self.zero(right, -1, table)
        if goes_into_softmax(op):
            free |= ~self.constant(right, -1, table).isnan()
        live.mark(table[alive[:, None] & ~free], op.where, "enters the product of a head that stays")

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        """nn.MultiheadAttention that returns its weights: what is left of it, for its stand-in."""
        module = ctx.model.get_submodule(op.module)
        if op not in ctx.wanted or not isinstance(module, (nn.MultiheadAttention, NarrowMultiheadAttention)):
            return
        scores = [
            o for o in ctx.ops if o.module == op.module and o.trace is op.trace and o.memo.get("table") is not None
        ]
        if not sums_to_one(op) or len(scores) != 1 or not list(op.facts())[-1].along(-1):
            return
        qk = torch.unique(scores[0].memo["table"], dim=0)
        values = compact(list(op.facts())[-1].along(-1)[0])
        values = torch.unique(values.reshape(-1, values.size(-1)), dim=0)
        if not plan.cuts(op.module):
            return
        plan.attention(
            op.module,
            count=int(live[qk].any(1).sum()),
            head_dim=int(live[qk].sum(1).max()),
            v_head_dim=int(live[values].sum(1).max()),
            scale=module.scale if isinstance(module, NarrowMultiheadAttention) else qk.size(1) ** -0.5,
        )


@rule("baddbmm")
class AddedProduct(Matmul):
    """y = m + a b: scores with their mask in one op.

    Exact: as the product, and what meets the mask is merged with it.
    Keeps: everything under other factors than 1.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        mask, a, b, out = op.given["self"], op.given["batch1"], op.given["batch2"], blank(op)
        if not isinstance(out, Fact) or op.given["beta"] != 1 or op.given["alpha"] != 1:
            return super(Contraction, self).forward(op, ctx)
        product = Fact(out.shape, tuple(self.product(op, ctx, a, b, out.shape)), out.value)
        return Fact(out.shape, combine_layers(op, ctx, [product, mask], out.shape), out.value)


def _laid(layer: Tensor, shape: tuple[int, ...]) -> Tensor:
    small = compact(layer)
    return small.reshape((1,) * (len(shape) - small.dim()) + small.shape).expand(shape)


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
