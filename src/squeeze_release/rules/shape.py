"""Shape ops: run the op itself on the labels and on the constants.

Concat, flatten into a Linear, packed qkv, window partition and rotary halves need no code of their own.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..facts import MIXED, Fact, Span, collapse, compact, known_offset, scaled_one, varying
from ..labels import Live
from .base import RULES, Facts, Op, Rule, blank, rule
from .elementwise import Identity, combine_layers
from .grouped import copies_along, keep_unbound, product, whole_rows
from .pool import keep_uniform

if TYPE_CHECKING:
    from ..analyse import Analysis

MOVES = """view.default reshape _unsafe_view flatten.using_ints unflatten.int permute transpose.int t unsqueeze
squeeze.default squeeze.dim squeeze.dims expand slice.Tensor select.int narrow movedim.int movedim.intlist swapaxes
swapdims mT expand_as view_as reshape_as numpy_T repeat tile repeat_interleave.self_int""".split()


class Move(Rule):
    """One tensor in, its elements moved. What stays must stay rectangular along every new dimension (`Grid`).

    Exact: the op itself is run on labels and constants. Whether its sizes follow the new widths is tried (`follow/`).
    Keeps: channels of which every n-th is taken, or that end up alone along a dimension; positions of a parameter that
    is cut, for other inputs may reach further.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x = self._source(op, ctx, next(op.facts()))
        layers = [self.run(op, layer) for layer in x.layers]
        for before, after in zip(x.layers, layers, strict=True):
            register(op, ctx, after, reordered=self._reorders(op, before))
        value = self.run(op, x.value)
        layers = _apart(op, ctx, layers + self._copies(op, ctx, x, tuple(value.shape)))
        kept = []
        for layer in layers:
            if varying(layer):
                kept.append(layer)
            else:
                ctx.pin(layer, op, "a width of 1 cannot shrink")
        return Fact(tuple(value.shape), tuple(kept), value, x.source, x.moved(lambda t: self.run(op, t)))

    def _source(self, op: Op, ctx: Analysis, x: Fact) -> Fact:
        """What a slice may assume of the tensor it cuts."""
        if not op.name.startswith(("aten.slice", "aten.select", "aten.narrow")):
            return x
        dim = op.given["dim"]
        if op.given.get("step", 1) != 1:
            for layer in x.along(dim):
                whole_rows(op, ctx, layer, {dim % len(x.shape)}, "every n-th channel is taken")
        if x.source != "param":
            return x
        # Where a parameter is cut may depend on the example: other inputs reach positions that this one does not.
        for layer in x.along(dim):
            ctx.pin(layer, op, "other inputs may reach other positions of this parameter")
        return Fact(x.shape, x.layers, keep_uniform(x.value, (dim % len(x.shape),)).expand(x.shape), x.source)

    def run(self, op: Op, t: Tensor) -> Tensor:
        return collapse(call(op, t))

    def _copies(self, op: Op, ctx: Analysis, x: Fact, shape: tuple[int, ...]) -> list[Tensor]:
        """Where one index is expanded to many, each copy may go: a mask for each head, a key head for each query."""
        if not op.name.startswith("aten.expand"):
            return []
        before = (1,) * (len(shape) - len(x.shape)) + x.shape
        return copies_along(op, ctx, shape, [d for d in range(1, len(shape)) if before[d] == 1])

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        keep_unbound(op, live)

    def _reorders(self, op: Op, layer: Tensor) -> bool:
        """Whether the channels' dimensions change places: then rows of different length would not line up."""
        dims = varying(layer)
        if len(dims) < 2 or not op.name.startswith(
            ("aten.permute", "aten.transpose", "aten.t", "aten.movedim", "aten.swap")
        ):
            return False
        marks = torch.zeros((1,) * layer.dim()).expand(layer.shape)
        order = []
        for d in dims:
            line = (
                torch.arange(layer.size(d))
                .reshape([-1 if i == d else 1 for i in range(layer.dim())])
                .expand(marks.shape)
            )
            order.append(varying(call(op, line))[0])
        return order != sorted(order)


def call(op: Op, t: Tensor) -> Any:
    """Run the op of this node on another tensor of the same shape."""
    given = dict(op.given)
    given[next(iter(given))] = t
    if op.name.startswith(("aten.view.", "aten._unsafe_view")):
        return t.reshape(given["size"])
    if op.name.startswith(("aten.expand_as", "aten.view_as", "aten.reshape_as")):
        return t.expand(given["other"].shape) if "expand" in op.name else t.reshape(given["other"].shape)
    names = list(given)
    return op.node.target(
        *[given[n] for n in names[: len(op.node.args)]],  # type: ignore[operator]
        **{k: given[k] for k in op.node.kwargs},
    )


rule(*MOVES)(Move)


def _apart(op: Op, ctx: Analysis, layers: list[Tensor]) -> list[Tensor]:
    """Layers along different dimensions: two that a reshape laid along the same one become one."""
    result: list[Tensor] = []
    for layer in layers:
        touching = [other for other in result if set(varying(other)) & set(varying(layer))]
        if touching:
            joint = product(op, ctx, touching[0], layer) if len(touching) == 1 else None
            result = [other for other in result if not any(other is t for t in touching)]
            if joint is not None:
                register(op, ctx, joint)
                result.append(joint)
                continue
            for each in (*touching, layer):
                ctx.pin(each, op, "two kinds of channels meet along one dimension")
        else:
            result.append(layer)
    return result


@rule("unbind", "chunk", "split.Tensor", "split_with_sizes", "tensor_split.sections")
class Pieces(Rule):
    """One tensor in, several out. Equal pieces of one row of channels must stay equally long.

    Exact: the op itself is run on labels and constants.
    Keeps: a piece of one channel; of equal pieces, what makes them equally long.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x = next(op.facts())
        dim = op.given.get("dim", 0) % len(x.shape)
        values = [collapse(v) for v in call(op, x.value)]
        spans = [x.moved(lambda t, i=i: collapse(call(op, t)[i])) for i in range(len(values))]  # type: ignore[misc]
        pieces = [[collapse(piece) for piece in call(op, layer)] for layer in x.layers]
        for layer, parts in zip(x.layers, pieces, strict=True):
            if dim in varying(layer) and not op.name.startswith("aten.unbind"):
                self._equal(op, ctx, parts, dim)
            for part in parts:
                register(op, ctx, part)
                if not varying(part):
                    ctx.pin(part, op, "a width of 1 cannot shrink")
        return [
            Fact(tuple(v.shape), tuple(p[i] for p in pieces if varying(p[i])), v, x.source, spans[i])
            for i, v in enumerate(values)
        ]

    def _equal(self, op: Op, ctx: Analysis, parts: list[Tensor], dim: int) -> None:
        if len({part.size(dim) for part in parts}) > 1 or any(len(varying(part)) != 1 for part in parts):
            return
        table = torch.stack([compact(part).reshape(-1) for part in parts])
        rows = ctx.labels.fresh(1).expand(len(parts)).clone()
        ctx.grid(op, table, outer=rows)


@rule("cat", "concat", "concatenate")
class Cat(Rule):
    """Along the dimension of the concat, labels stand side by side; along the others they meet and are merged.

    Known: each piece up to functions of its own, which the others have none of (`rules/carriers.py`).
    Exact: a channel that goes, goes from its own piece.
    Keeps: pieces of fixed width.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        out = blank(op)
        assert isinstance(out, Fact)
        dim = op.given.get("dim", 0) % len(out.shape)
        facts = [fact for fact in op.facts() if fact.shape[dim:] and fact.shape[dim] > 0]
        return self.join(op, ctx, facts, dim, out)

    def join(self, op: Op, ctx: Analysis, facts: list[Fact], dim: int, out: Fact) -> Fact:
        across = [
            Fact(
                self._one(fact.shape, dim),
                tuple(self._thin(layer, dim) for layer in fact.layers if dim not in varying(layer)),
                fact.value,
                fact.source,
            )
            for fact in facts
        ]
        layers = [
            compact(layer).expand(out.shape) for layer in combine_layers(op, ctx, across, self._one(out.shape, dim))
        ]
        layers += self._side_by_side(op, ctx, facts, dim, out.shape)
        value = collapse(self._cat([fact.value for fact in facts], dim).expand(out.shape))
        source = facts[0].source if len({fact.source for fact in facts}) == 1 else "activation"
        return Fact(out.shape, tuple(layers), value, source, self._span(facts, dim, out.shape))

    def _span(self, facts: list[Fact], dim: int, shape: tuple[int, ...]) -> Span | None:
        """Side by side along the channels, each piece brings functions of its own, which the others have none of."""
        if not any(fact.span for fact in facts) or any(fact.span and fact.span.dim != dim for fact in facts):
            return None

        def joined(column: list[Tensor]) -> Tensor:
            return collapse(
                self._cat([t.expand(f.shape) for t, f in zip(column, facts, strict=True)], dim).expand(shape)
            )

        none = torch.zeros((1,) * len(shape), dtype=torch.float64)
        parts = [
            joined([part if other == place else none for other in range(len(facts))])
            for place, fact in enumerate(facts)
            for part in (fact.span.parts if fact.span else ())
        ]
        return Span(dim, joined([known_offset(fact) for fact in facts]), tuple(parts))

    @staticmethod
    def _one(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        return tuple(1 if d == dim else s for d, s in enumerate(shape))

    @staticmethod
    def _thin(layer: Tensor, dim: int) -> Tensor:
        return layer.narrow(dim, 0, 1)

    def _side_by_side(self, op: Op, ctx: Analysis, facts: list[Fact], dim: int, shape: tuple[int, ...]) -> list[Tensor]:
        rows = [fact.along(dim) for fact in facts]
        if not any(rows):
            return []
        parts = []
        for fact, layers in zip(facts, rows, strict=True):
            if layers:
                parts.append(layers[0])
            else:  # a piece of fixed width: labels that never go
                fixed = ctx.labels.fresh(fact.shape[dim])
                ctx.pin(fixed, op, "a piece of fixed width")
                parts.append(fixed.reshape([-1 if d == dim else 1 for d in range(len(shape))]).expand(fact.shape))
        layer = collapse(self._cat(parts, dim).expand(shape))
        register(op, ctx, layer)
        return [layer]

    @staticmethod
    def _cat(parts: list[Tensor], dim: int) -> Tensor:
        """Concatenate without spreading out what no part varies along."""
        rank = parts[0].dim()
        for d in range(rank):
            if d != dim and all(d not in varying(part) for part in parts):
                parts = [part.narrow(d, 0, 1) for part in parts]
        return torch.cat(parts, dim)


@rule("stack")
class Stack(Rule):
    """Labels of the parts stand side by side along the new dimension.

    Exact: what stays is rectangular (`Grid`): the parts lose equally many channels each.
    Keeps: everything where the parts carry channels along different dimensions.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        facts = list(op.facts())
        dim = op.given.get("dim", 0) % (len(facts[0].shape) + 1)
        value = collapse(torch.stack([fact.value for fact in facts], dim))
        if any(
            len(fact.layers) != len(facts[0].layers)
            or [varying(a) for a in fact.layers] != [varying(b) for b in facts[0].layers]
            for fact in facts
        ):
            return super().forward(op, ctx)
        layers = [
            collapse(torch.stack(list(parts), dim)) for parts in zip(*(fact.layers for fact in facts), strict=True)
        ]
        for layer in layers:
            register(op, ctx, layer)
        return Fact(tuple(value.shape), tuple(layers), value)


@rule("roll", "flip")
class Turn(Rule):
    """Turned over positions, channels pass; turned over channels, their order is fixed.

    Exact: no channel sees another one.
    Keeps: channels that are turned over.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x = next(op.facts())
        dims = {d % len(x.shape) for d in (op.given["dims"] or range(len(x.shape)))}
        for layer in x.layers:
            if dims & set(varying(layer)):
                ctx.pin(layer, op, "channels change their order here")

        def run(t: Tensor) -> Tensor:
            return collapse(call(op, t))

        return Fact(x.shape, x.layers, run(x.value), span=x.moved(run))


@rule("pad", "constant_pad_nd")
class Pad(Rule):
    """Zero padding keeps only the constant it pads with; reflect, replicate and circular padding keep any.

    Channels that are padded (the shortcut of a ResNet for CIFAR) stand beside constants of fixed width.
    Known: behind zero padding a constant times the padded 1 (`rules/carriers.py`).
    Exact: the numbers that are padded with are constants of the op. Padding by 0 is padding still, for code that pads
    to a multiple may add something at another size; unless the model refuses every other size (`trace/sizes.py`).
    Keeps: the pads themselves; all channels where they are cut, or padded together with positions, or reflected.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, out = next(op.facts()), blank(op)
        assert isinstance(out, Fact)
        pads = op.given["pad"]  # two for each dimension, the last dimension first; a negative one cuts
        moved = {len(x.shape) - 1 - i // 2 for i, pad in enumerate(pads) if pad != 0}
        constant = op.given.get("mode", "constant") == "constant"
        if any(moved & set(varying(layer)) for layer in x.layers):
            return self._beside(op, ctx, x, out, moved) if constant else super().forward(op, ctx)
        if not moved and _is_known(x) and not ctx.takes_other_sizes():
            return x
        layers = tuple(compact(layer).expand(out.shape) for layer in x.layers)
        value, span = keep_uniform(x.value, tuple(moved)), None
        if constant and max(pads) >= 0:  # 0 too: code that pads to a multiple may add something at another resolution
            filled = op.given.get("value") or 0.0
            span = None if filled else scaled_one(value.expand(out.shape), layers)
            value = torch.where(value == filled, value, torch.nan)
        if constant and x.span is not None and x.span.dim != MIXED and min(pads) >= 0 and not op.given.get("value"):
            span = self._padded(x, x.span, tuple(moved), out.shape)
        return Fact(out.shape, layers, value.expand(out.shape), span=span)

    @staticmethod
    def _padded(x: Fact, span: Span, moved: tuple[int, ...], shape: tuple[int, ...]) -> Span:
        """What was known up to functions of the position still is: the padded 1 is one more."""
        offset, *parts = (keep_uniform(t, moved).expand(shape) for t in (known_offset(x), *span.parts))
        return Span(span.dim, torch.where(offset.isnan(), offset, 0.0), (offset, *parts))

    def _beside(self, op: Op, ctx: Analysis, x: Fact, out: Fact, moved: set[int]) -> Facts:
        """Padded along channels and nothing else: a concat with pieces that hold one number."""
        (dim, *others), rank = sorted(moved), len(x.shape)
        counts = op.given["pad"][2 * (rank - 1 - dim) :][:2]
        if others or min(counts) < 0:
            return super().forward(op, ctx)
        number = torch.full((1,) * rank, float(op.given.get("value") or 0.0), dtype=torch.float64)
        shapes = [tuple(count if d == dim else s for d, s in enumerate(x.shape)) for count in counts]
        before, after = (Fact(shape, self._stand_in(x, dim, shape), number.expand(shape)) for shape in shapes)
        return Cat().join(op, ctx, [fact for fact in (before, x, after) if fact.shape[dim]], dim, out)

    @staticmethod
    def _stand_in(x: Fact, dim: int, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Along the other dimensions the pads are as wide as what they pad."""
        return tuple(compact(layer).expand(shape) for layer in x.layers if dim not in varying(layer))


def _is_known(x: Fact) -> bool:
    """Whether there is a number to be lost."""
    small = compact(x.value)
    return x.span is not None or bool((~small.isnan() & (small != 0)).any())


def origin(node: fx.Node) -> fx.Node:
    """The node that wrote what shape ops alone hand on: nothing else was laid beside it on the way."""
    while isinstance(RULES.get(node.target), (Move, Pieces, Identity)) or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def register(op: Op, ctx: Analysis, layer: Tensor, *, reordered: bool = False) -> None:
    """Ask that what stays of a layer with several dimensions is rectangular."""
    dims = varying(layer)
    if len(dims) < 2 or not layer.numel():  # an empty slice lays out nothing
        return
    table = compact(layer)
    table = table.reshape([layer.size(d) for d in dims])
    while table.dim() > 1:
        outer = ctx.grid(op, table.reshape(-1, table.size(-1)), ragged=not reordered)
        table = outer.reshape(table.shape[:-1])
        reordered = True  # above the innermost dimension only whole indices go
