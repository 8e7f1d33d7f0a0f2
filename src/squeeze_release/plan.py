"""What goes, what stays and why: the analysis turned into plain data that `rewrite` carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .analyse import Analysis, rule_of
from .analyse.blocks import Replacement, inside, within
from .labels import Live
from .rules import Op
from .rules.carriers import Carried
from .trace.norms import Norm


@dataclass(frozen=True)
class Fold:
    """Constants that an affine module takes into its bias, which is created where there is none."""

    module: str
    weight: str
    bias: str | None
    rows: int  # dimension of the weight that holds the outputs
    delta: Tensor


@dataclass(frozen=True)
class ConstantRows:
    """Rows that become 0, their bias the constant they computed."""

    fold: Fold
    only: Tensor  # which rows


@dataclass(frozen=True)
class Carry:
    """Columns of a weight that other columns take over, group by group of its rows; or the other way round."""

    columns: int  # the dimension that loses them
    groups: tuple[Carried | None, ...]


@dataclass(frozen=True)
class Heads:
    """What is left of an attention module."""

    count: int
    head_dim: int
    v_head_dim: int
    scale: float


@dataclass(frozen=True)
class Plain:
    """A convolution with the weight that it used to compute."""

    kind: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]
    weight: Tensor
    arguments: dict[str, Any]


@dataclass
class Plan:
    """Edits by name. Everything here is about the model as it was before any edit."""

    slices: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # parameter -> dimension -> indices that stay
    folded: dict[str, Fold] = field(default_factory=dict)  # by bias, or by module where there is none yet
    constant: dict[str, ConstantRows] = field(default_factory=dict)  # by module
    scaled: dict[str, Tensor] = field(default_factory=dict)  # parameter -> a factor for every row
    made_good: set[str] = field(default_factory=set)  # those whose factors undo a scale that follows a width
    carried: dict[str, dict[object, Carry]] = field(default_factory=dict)  # weight -> columns that go into others
    replaced_values: dict[str, Tensor] = field(default_factory=dict)
    indices: dict[str, Tensor] = field(default_factory=dict)  # module -> input channels it gathers
    placed: dict[str, Tensor] = field(default_factory=dict)  # module -> rows it computes, the others being constant
    groups: dict[str, int] = field(default_factory=dict)
    group_columns: dict[str, Tensor] = field(default_factory=dict)  # grouped weight -> columns that stay, by group
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # module -> attributes that a rule sets
    unread_norms: dict[str, int] = field(
        default_factory=dict
    )  # module -> its width, where its numbers no longer matter
    norms: dict[str, tuple[Norm, Tensor]] = field(default_factory=dict)  # module -> the constants that it loses
    heads: dict[str, Heads] = field(default_factory=dict)
    rescaled: dict[str, tuple[float, float]] = field(default_factory=dict)  # module -> float attribute, old and new
    attributes: dict[str, dict[str, int | tuple[int, ...] | list[int]]] = field(default_factory=dict)
    dead: dict[str, Replacement] = field(default_factory=dict)
    plain: dict[str, Plain] = field(default_factory=dict)  # module -> the convolution that takes its place

    @property
    def empty(self) -> bool:
        return not (self.slices or self.placed or self.dead or self.plain)

    def cuts(self, module: str) -> bool:
        """Whether any parameter of a module, or inside it, is sliced."""
        return any(within(name, module) for name in self.slices)

    # What rules say in `absorb`:

    def fold(self, op: Op, delta: Tensor) -> None:
        whole = _fold(op, delta)
        if op.given.get("bias") is None or whole.bias is not None:
            self.folded[whole.bias or op.module] = whole
            return
        # A bias that is put together. One that cannot change has nothing to take: only rows that go read it.
        for piece in op.memo.get("pieces") or ():
            if piece.name is not None:
                self.folded[piece.name] = replace(whole, bias=piece.name, delta=delta[piece.rows])

    def constant_rows(self, op: Op, values: Tensor, only: Tensor | None = None) -> None:
        which = torch.ones(len(values), dtype=torch.bool) if only is None else only
        self.constant[op.module] = ConstantRows(_fold(op, values), which)

    def index(self, module: str, index: Tensor) -> None:
        self.indices[module] = index

    def carry(self, weight: str, columns: int, groups: Sequence[Carried | None], key: object = None) -> None:
        """The same again for another call of the module changes nothing; another key is another change."""
        self.carried.setdefault(weight, {})[columns, key] = Carry(columns, tuple(groups))

    def scale(self, name: str, factors: Tensor) -> None:
        self.scaled[name] = factors

    def depthwise(self, module: str, index: Tensor, inputs: int) -> None:
        """Each output channel reads the input channel that `index` names, out of `inputs`."""
        self.groups[module] = len(index)
        if not torch.equal(index, torch.arange(inputs)):
            self.indices[module] = index

    def compensate(self, module: str, norm: Norm, constants: Tensor) -> None:
        self.norms[module] = (norm, constants)

    def values(self, name: str, values: Tensor) -> None:
        self.replaced_values[name] = values

    def make_good(self, ctx: Analysis, labels: Tensor, factor: float) -> bool:
        """Scale rows whose product the code scales otherwise than before; False if they are scaled already."""
        mine = Plan()
        mine.scale_rows(ctx, labels, factor)
        if any(name in self.scaled and name not in self.made_good for name in mine.scaled):
            return False
        for name, factors in mine.scaled.items():  # q and k may be parts of one weight
            self.scaled[name] = self.scaled.get(name, torch.ones_like(factors)) * factors
        self.made_good |= set(mine.scaled)
        return True

    def forget_made_good(self) -> None:
        """For a new trial, in which the code may scale as before."""
        for name in self.made_good:
            del self.scaled[name]
        self.made_good = set()

    def scale_rows(self, ctx: Analysis, labels: Tensor, factor: float) -> None:
        """Scale the rows of the weights that carry these labels, and their biases."""
        for name in [owner[0] for owner in ctx.owners(labels) if owner is not None and owner[1] == 0]:
            mine = ctx.param_labels(name, 0)
            assert mine is not None
            factors = torch.where(torch.isin(mine, labels), torch.tensor(factor, dtype=torch.float64), 1.0)
            biases = {op.param("bias") for op in ctx.readers.get(name, []) if op.param("weight") == name} - {None}
            for each in (name, *map(str, biases)):
                self.scaled[each] = factors
            for piece in (piece for op in ctx.readers.get(name, []) for piece in op.memo.get("pieces") or ()):
                if piece.name is not None:
                    self.scaled[piece.name] = factors[piece.rows]

    def rescale_attribute(self, module: str, old: float, new: float) -> None:
        self.rescaled[module] = (old, new)

    def attention(self, module: str, *, count: int, head_dim: int, v_head_dim: int, scale: float) -> None:
        self.heads[module] = Heads(count, head_dim, v_head_dim, scale)


def _fold(op: Op, delta: Tensor) -> Fold:
    return Fold(op.module, op.memo["weight"], op.param("bias"), op.memo["geometry"].rows, delta)


def make_plan(ctx: Analysis, live: Live) -> Plan:
    """Slice every parameter along the dimensions its labels name, and ask every rule what it absorbs."""
    plan = Plan(dead={path: _narrowed(replacement, live) for path, replacement in ctx.dead.items()})
    for name, dims in ctx.param_dims.items():
        if inside(name, plan.dead):
            continue
        kept = {d: live[labels] for d, labels in enumerate(dims) if labels is not None}
        kept = {d: alive for d, alive in kept.items() if not bool(alive.all())}
        if kept:
            plan.slices[name] = {d: alive.nonzero().flatten() for d, alive in kept.items()}
    for op in ctx.ops:
        if not inside(op.module, plan.dead):
            rule_of(op).absorb(op, ctx, live, plan)
    return plan


def _narrowed(replacement: Replacement, live: Live) -> Replacement:
    """The numbers of a stand-in for the channels that stay."""
    if replacement.value is None or replacement.labels is None:
        return replacement
    return replace(replacement, value=replacement.value[live[replacement.labels]], labels=None)
