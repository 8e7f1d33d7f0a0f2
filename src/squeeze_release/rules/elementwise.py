"""Elementwise ops: constants stay constants, and channels that meet live or die together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..facts import Fact, Span, compact, unknown, varying
from .base import Facts, Op, Rule, blank, rule
from .grouped import whole_rows

if TYPE_CHECKING:
    from ..analyse import Analysis

UNARY = """relu gelu silu selu elu celu tanh sigmoid hardswish hardsigmoid hardtanh relu6 leaky_relu softplus mish
hardshrink softshrink softsign log_sigmoid threshold exp expm1 log log1p log2 sqrt rsqrt square abs neg reciprocal
sin cos tan atan asin acos sinh cosh asinh acosh atanh erf erfc clamp.default clamp_min.default clamp_max.default
floor ceil round trunc frac sign sgn nan_to_num pow.Tensor_Scalar square logit
relu_ gelu_ silu_ selu_ elu_ celu_ tanh_ sigmoid_ hardswish_ hardsigmoid_ hardtanh_ relu6_ leaky_relu_ mish_
clamp_.default neg_ exp_ sqrt_ abs_ square_""".split()

IDENTITY = """dropout alpha_dropout feature_dropout feature_alpha_dropout dropout_ clone contiguous alias detach detach_
lift_fresh_copy lift_fresh to.dtype to.device to.dtype_layout to.other _to_copy type_as""".split()

BINARY = """add.Tensor sub.Tensor mul.Tensor div.Tensor add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor
add.Scalar sub.Scalar mul.Scalar div.Scalar add_.Scalar sub_.Scalar mul_.Scalar div_.Scalar rsub.Scalar rsub.Tensor
div.Tensor_mode pow.Tensor_Tensor maximum minimum lerp addcmul addcdiv prelu atan2 fmod remainder
true_divide.Tensor multiply.Tensor subtract.Tensor divide.Tensor
clamp.Tensor clamp_.Tensor clamp_min.Tensor clamp_max.Tensor""".split()

# Combined by place like the others, but their numbers are not followed.
OPAQUE = """eq ne lt le gt ge logical_and logical_or logical_not bitwise_and.Tensor
bitwise_or.Tensor bitwise_not zeros_like ones_like full_like empty_like bernoulli floor_divide isnan isinf isfinite
erfinv zero copy fill.Scalar fill.Tensor __and__ __or__ __xor__ bitwise_xor.Tensor logical_xor pow.Scalar""".split()


def numbers(argument: Any) -> Any:
    return compact(argument.value) if isinstance(argument, Fact) else argument


@rule(*UNARY)
class Unary(Rule):
    """y = f(x), element by element: a constant c becomes f(c).

    Exact: f(c) is computed by the op itself, in float64.
    Keeps: everything where it has a second tensor, but for the bounds of a clamp: these are combined with x.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        facts = list(op.facts())
        x = facts[0]
        if len(facts) > 1:  # clamp with a tensor bound and the like
            return super().forward(op, ctx)
        given = [numbers(a) for a in op.given.values()]
        functional = getattr(torch.ops.aten, op.name.split(".")[1].rstrip("_"))
        value = functional(*given[: len(op.node.args)], **{k: numbers(op.given[k]) for k in op.node.kwargs})
        value = torch.where(compact(x.value).isnan(), torch.nan, value)
        return Fact(x.shape, x.layers, value.expand(x.shape))


@rule(*IDENTITY)
class Identity(Rule):
    """y = x in eval mode. Casts between float types are identities here: verification lifts them to float64 too.

    Exact: up to the rounding of such a cast, which the original has as well.
    Keeps: everything under a dropout that was exported in train mode; a cast to integers forgets constants.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        x, out = next(op.facts()), blank(op)
        assert isinstance(out, Fact)
        if op.given.get("train") or out.shape != x.shape:
            return super().forward(op, ctx)
        floating = op.node.meta["val"].dtype.is_floating_point
        return Fact(
            x.shape, x.layers, x.value if floating else unknown(x.shape), x.source, x.span if floating else None
        )


@rule(
    "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"
)
class Assertion(Rule):
    """Checks that torch.export adds, in front of casts for one. They compute nothing.

    Exact: always.
    Keeps: nothing.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        return None


@rule(*BINARY)
class Combine(Rule):
    """y = f(x, z) with broadcasting: labels that meet are merged.

    Along a dimension of size 1 an operand is read by all and binds nothing. An operand that has one of the dimensions
    over which the other's channels spread, and broadcasts over the rest, binds that index in all of them (`Grid`).
    An operand of fixed extent fixes the channels it meets. 0 * x = 0; 0 / x = 0 where x = max(z, eps) with eps > 0.
    Constant: where all operands are, and where a factor is 0. 0 + x is x: a zero that meets a living channel stays.
    Known: what is known up to shared functions (`rules/carriers.py`), and scaled or shifted by constants.
    Exact: channels that meet go together or not at all, so what is left meets what it met before.
    Keeps: channels that meet a fixed width, or a layout of channels that cannot be bound to theirs; under the paper's
    rule sets, residual streams.
    """

    follow_numbers = True

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        out = blank(op)
        assert isinstance(out, Fact)
        facts = list(op.facts())
        if "prelu" in op.name and facts[1].shape != (1,):
            dim = min(1, len(facts[0].shape) - 1)
            shape = tuple(facts[1].shape[0] if d == dim else 1 for d in range(len(facts[0].shape)))
            layers = tuple(layer.reshape(shape) for layer in facts[1].layers)
            facts[1] = Fact(shape, layers, facts[1].value.reshape(shape), "param")
        layers = combine_layers(op, ctx, facts, out.shape)
        value = self._value(op, facts, out.shape) if self.follow_numbers else unknown(out.shape)
        return Fact(out.shape, layers, value, span=scaled_span(op, facts, out.shape))

    def _value(self, op: Op, facts: list[Fact], shape: tuple[int, ...]) -> Tensor:
        values = [compact(f.value) for f in facts]
        known = iter(values)
        given = {k: next(known) if isinstance(v, Fact) else v for k, v in op.given.items()}
        functional = getattr(torch.ops.aten, op.name.split(".")[1].rstrip("_"))
        if "prelu" in op.name:
            result = torch.where(values[0] > 0, values[0], values[0] * values[1])
        else:
            names = list(given)
            result = functional(
                *[given[n] for n in names[: len(op.node.args)]], **{k: given[k] for k in op.node.kwargs}
            )
        varies = torch.zeros((), dtype=torch.bool)
        for value in values:
            varies = varies | value.isnan()
        result = torch.where(varies, torch.nan, result)
        if op.name.startswith(("aten.mul", "aten.multiply")):
            for value in values:
                result = torch.where(value == 0, 0.0, result)
        if op.name.startswith(("aten.div", "aten.true_divide")) and isinstance(op.given["self"], Fact):
            divisor = op.given["other"]
            if isinstance(divisor, Fact) and never_zero(op.node.args[1]):
                result = torch.where(values[0] == 0, 0.0, result)
        return result.expand(shape)


def never_zero(node: Any) -> bool:
    """Whether a tensor is at least some eps > 0, as the length is that `F.normalize` divides by."""
    moves = ("aten.expand", "aten.unsqueeze.", "aten.view.", "aten.reshape.", "aten.alias.")
    while str(node.target).startswith(moves):
        node = node.args[0]
    least = node.args[1] if len(node.args) > 1 else None
    return str(node.target).startswith("aten.clamp_min.default") and isinstance(least, (int, float)) and least > 0


@rule(*OPAQUE)
class CombineOpaque(Combine):
    """y = f(x, z) as above, for comparisons and the like: the numbers are not followed.

    Exact: labels are merged as above.
    Keeps: what it kept above; a constant that comes out is not known to be one.
    """

    follow_numbers = False


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "masked_fill", "masked_fill_")
class Choice(Combine):
    """y = x where a condition holds, z elsewhere; `masked_fill` likewise. Labels are merged as above.

    Constant: where x and z are the same number, for then it does not matter which of them it is.
    Exact: as above.
    Keeps: what it kept above; two constants that differ are not known to be one.
    """

    def _value(self, op: Op, facts: list[Fact], shape: tuple[int, ...]) -> Tensor:
        filled = "masked_fill" in op.name
        x, z = (op.given["self"], op.given["value"]) if filled else (op.given["self"], op.given["other"])
        a, b = (torch.as_tensor(numbers(side), dtype=torch.float64) for side in (x, z))
        return torch.where(a == b, a, torch.nan).expand(shape)


def scaled_span(op: Op, facts: list[Fact], shape: tuple[int, ...]) -> Span | None:
    """Where a tensor that is known up to shared functions is scaled or shifted by constants, it is known still."""
    kind = op.name.split(".")[1].rstrip("_")
    known = [fact for fact in facts if fact.span is not None and fact.shape == shape]
    arguments = list(op.given.values())[:2]
    if kind not in ("add", "sub", "rsub", "mul", "div") or len(known) != 1 or len(arguments) < 2:
        return None
    if op.given.get("alpha", 1) != 1 or op.given.get("rounding_mode"):
        return None
    first = arguments[0] is known[0]
    other = arguments[1] if first else arguments[0]
    numbers = (
        compact(other.value.reshape((1,) * (len(shape) - len(other.shape)) + other.shape))
        if isinstance(other, Fact)
        else other
    )
    assert known[0].span is not None
    if kind == "mul":
        return known[0].span.scaled(numbers, 0.0)
    if kind == "div":
        return known[0].span.scaled(1.0 / numbers, 0.0) if first else None
    if kind == "add":
        return known[0].span.scaled(1.0, numbers)
    minus = 1.0 if first == (kind == "sub") else -1.0  # the sign of x: sub is x - other, rsub other - x
    return known[0].span.scaled(minus, -minus * numbers)


def combine_layers(op: Op, ctx: Analysis, facts: list[Fact], shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Merge the layers of operands that are broadcast together."""
    aligned = [_align(fact, shape) for fact in facts]
    fixed = _fixed_dims(facts, aligned, shape)
    aligned = [
        [free for layer in layers if (free := _unfixed(op, ctx, layer, fixed)) is not None] for layers in aligned
    ]
    _pin_streams(op, ctx, facts, aligned)
    result: list[Tensor] = []
    for layers in aligned:
        for layer in layers:
            result = _join(op, ctx, result, layer)
    return tuple(result)


def _align(fact: Fact, shape: tuple[int, ...]) -> list[Tensor]:
    return [
        layer.reshape((1,) * (len(shape) - layer.dim()) + layer.shape).expand(shape) if layer.shape != shape else layer
        for layer in fact.layers
    ]


def _fixed_dims(facts: list[Fact], aligned: list[list[Tensor]], shape: tuple[int, ...]) -> set[int]:
    """Dimensions along which some operand has an extent that cannot change."""
    fixed: set[int] = set()
    for fact, layers in zip(facts, aligned, strict=True):
        padded = (1,) * (len(shape) - len(fact.shape)) + fact.shape
        fixed |= {d for d in range(len(shape)) if padded[d] > 1} - {d for layer in layers for d in varying(layer)}
    return fixed


def _unfixed(op: Op, ctx: Analysis, layer: Tensor, fixed: set[int]) -> Tensor | None:
    """What is left of a layer that meets a fixed width: a rotary table fixes the width of heads, not their number."""
    if not fixed & set(varying(layer)):
        return layer
    heads = whole_rows(op, ctx, layer, fixed, "meets a tensor of fixed width")
    return None if heads is None else layer


def _pin_streams(op: Op, ctx: Analysis, facts: list[Fact], aligned: list[list[Tensor]]) -> None:
    """The paper never narrows a residual stream: two activations that meet keep their width under its rule sets."""
    if "streams" not in ctx.options and sum(fact.source == "activation" and bool(fact.layers) for fact in facts) > 1:
        for layers in aligned:
            for layer in layers:
                ctx.pin(layer, op, "this rule set leaves residual streams as they are")


def _join(op: Op, ctx: Analysis, result: list[Tensor], layer: Tensor) -> list[Tensor]:
    dims = set(varying(layer))
    if not dims:  # one channel, read by all: a width of 1 cannot shrink
        ctx.pin(layer, op, "a width of 1 cannot shrink")
        return result
    touching = [other for other in result if dims & set(varying(other))]
    if not touching:
        return [*result, layer]
    if len(touching) == 1:
        other = touching[0]
        if varying(other) == varying(layer):
            ctx.labels.merge(*torch.broadcast_tensors(compact(other), compact(layer)))
            return result
        wide, narrow = (other, layer) if len(varying(other)) > len(dims) else (layer, other)
        if _link(op, ctx, wide, narrow):
            return [wide if kept is other else kept for kept in result]
        heads = _heads_only(op, ctx, other, layer)
        if heads is not None:
            return [heads if kept is other else kept for kept in result]
    for each in (*touching, layer):
        ctx.pin(each, op, "channels meet along different dimensions")
    return result


def _heads_only(op: Op, ctx: Analysis, one: Tensor, other: Tensor) -> Tensor | None:
    """Two tables that share their heads but not the dimensions inside (scores between channels): whole heads may go."""
    shared = set(varying(one)) & set(varying(other))
    text = "channels meet along different dimensions"
    inside = (set(varying(one)) | set(varying(other))) - shared
    if any(set(varying(layer)[: len(shared)]) != shared for layer in (one, other)):
        return None
    first, second = (whole_rows(op, ctx, layer, inside, text) for layer in (one, other))
    assert first is not None and second is not None
    ctx.labels.merge(*torch.broadcast_tensors(compact(first), compact(second)))
    return first


def _link(op: Op, ctx: Analysis, wide: Tensor, narrow: Tensor) -> bool:
    """`narrow` stands for whole rows (leading dimensions) or whole columns (trailing ones) of `wide`."""
    dims, part = varying(wide), varying(narrow)
    table, names = compact(wide), compact(narrow).reshape(-1)
    if dims[: len(part)] == part:
        ctx.grid(op, table.reshape(len(names), -1), outer=names)
    elif dims[-len(part) :] == part:
        ctx.grid(op, table.reshape(-1, len(names)), inner=names, ragged=False)
    else:
        return False
    return True
