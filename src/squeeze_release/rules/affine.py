"""Linear layers and convolutions: y = W x + b over one channel dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, uniform, unknown, vector
from ..labels import Live
from ..pieces import constant_rows, matvec, read_columns, spans
from .base import Facts, Op, Rule, blank, contracted, passed_on, rule

if TYPE_CHECKING:
    from ..analyse import Analysis
    from ..plan import Plan


_MOST_CANCELLATION = 1e5  # in float64 that leaves 11 digits


@dataclass(frozen=True)
class Geometry:
    """Where an affine op keeps its channels."""

    channel: int  # channel dimension of input and output, from the end
    rows: int  # dimension of the weight that holds the output channels
    groups: int
    padded: bool  # the border of a constant input is not constant

    @property
    def columns(self) -> int:
        return 1 - self.rows


class Affine(Rule):
    """y_j = b_j + sum_k W_jk x_k.

    Constant: y_j, where every x_k with W_jk != 0 is constant (in front of zero padding: is 0).
    Need: x_k, where some living row j has W_jk != 0 and x_k is not such a constant.
    Absorb: b_j += W_jk c_k for every constant x_k that goes. A missing bias is created.
    Unread coordinates of a model input are left out by an index.
    """

    def geometry(self, op: Op) -> Geometry:
        raise NotImplementedError

    def matrix(self, weight: Tensor, geometry: Geometry) -> Tensor:
        """The weight as (groups, rows a group, columns a group, taps)."""
        g = geometry.groups
        taps = weight.flatten(2) if weight.dim() > 2 else weight[..., None]
        if geometry.rows == 0:
            return taps.reshape(g, -1, taps.size(1), taps.size(2))
        return taps.reshape(g, -1, taps.size(1), taps.size(2)).transpose(1, 2)

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        name = op.param("weight")
        if name is None:
            return super().forward(op, ctx)
        geometry = self.geometry(op)
        x, out = op.given["input"], blank(op)
        assert isinstance(out, Fact)
        dim = len(x.shape) + geometry.channel
        columns = self._columns(op, ctx, x, dim, name, geometry)
        rows = self._rows(op, ctx, name, geometry)
        for d in range(2, len(op.given["weight"].shape)):
            ctx.pin_param(name, d, op, "taps of a convolution")
        op.memo.update(geometry=geometry, weight=name, columns=columns, rows=rows)
        c = uniform(x.value, dim)
        if geometry.padded:
            c = torch.where(c == 0, c, torch.nan)
        ctx.constants.setdefault(name, []).append(c)
        layers = [compact(layer).expand(out.shape) for layer in self._positions(op, ctx, x, dim)]
        value = self._value(op, ctx, c, out.shape, dim)
        if rows is not None:
            layers.append(vector(rows, out.shape, dim))
            ctx.constant_labels = torch.cat([ctx.constant_labels, rows[~uniform(value, dim).isnan()]])
        return Fact(out.shape, tuple(layers), value)

    def _positions(self, op: Op, ctx: Analysis, x: Fact, dim: int) -> list[Tensor]:
        return passed_on(x, (dim,))

    def _columns(self, op: Op, ctx: Analysis, x: Fact, dim: int, name: str, geometry: Geometry) -> Tensor | None:
        """Labels of the input channels, bound to the weight's columns."""
        labels = contracted(op, ctx, x, dim)
        mine = ctx.param_labels(name, geometry.columns)
        if geometry.groups > 1:
            if mine is None:
                self._bind_depthwise(op, ctx, labels, name, geometry)
                return labels
            self._bind_groups(op, ctx, labels, mine, geometry)
            return labels
        if labels is None and mine is not None and not (x.source == "input" and ctx.can_index(op)):
            ctx.pin(mine, op, "its input has a fixed width")
        if labels is not None and mine is not None:
            ctx.labels.merge(labels, mine)
        return labels if labels is not None else mine

    def _bind_depthwise(self, op: Op, ctx: Analysis, labels: Tensor | None, name: str, geometry: Geometry) -> None:
        """Each output channel reads an input channel of its own; where no index can sit between, they go together."""
        rows = ctx.param_labels(name, geometry.rows)
        if rows is None or ctx.can_index(op):
            return
        if labels is not None and len(labels) == len(rows):
            ctx.labels.merge(labels, rows)
            return
        for fixed in (labels, rows):
            if fixed is not None:
                ctx.pin(fixed, op, "a depthwise convolution with a forward of its own")

    def _rows(self, op: Op, ctx: Analysis, name: str, geometry: Geometry) -> Tensor | None:
        rows = ctx.param_labels(name, geometry.rows)
        if rows is not None and geometry.rows == 1 and geometry.groups > 1:
            ctx.pin(rows, op, "a grouped transposed convolution shares its columns between groups")
            rows = ctx.labels.fresh(len(rows) * geometry.groups)
            ctx.pin(rows, op, "a grouped transposed convolution keeps its outputs")
        bias = op.param("bias")
        if bias is not None and rows is not None:
            mine = ctx.param_labels(bias, 0)
            if mine is not None:
                ctx.labels.merge(rows, mine)
        elif isinstance(op.given.get("bias"), Fact):
            for layer in op.given["bias"].layers:
                ctx.pin(layer, op, "a bias that is computed, not stored")
            if rows is not None:
                ctx.pin(rows, op, "its bias is computed, not stored")
        return rows

    def _bind_groups(self, op: Op, ctx: Analysis, labels: Tensor | None, mine: Tensor, geometry: Geometry) -> None:
        """The same columns leave every group, or whole groups leave on both sides."""
        groups = ctx.labels.fresh(geometry.groups)
        rows = ctx.param_labels(op.param("weight") or "", geometry.rows)
        if labels is None or rows is None or geometry.rows == 1:
            for fixed in (labels, mine, rows):
                if fixed is not None:
                    ctx.pin(fixed, op, "a grouped convolution on a fixed width")
            return
        ctx.grid(op, labels.reshape(geometry.groups, -1), outer=groups, inner=mine, ragged=False)
        ctx.grid(op, rows.reshape(geometry.groups, -1), outer=groups)

    def _value(self, op: Op, ctx: Analysis, c: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
        matrix = self.matrix(ctx.tensor(op.memo["weight"]), op.memo["geometry"])
        values = constant_rows(matrix, c)
        if bool(values.isnan().all()):
            return unknown(shape)
        bias = op.given.get("bias")
        offset = uniform(bias.value, 0) if isinstance(bias, Fact) else torch.zeros((), dtype=torch.float64)
        return vector(values.reshape(-1) + offset, shape, dim)

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        columns = op.memo.get("columns")
        if columns is None:
            return
        rows = op.memo["rows"]
        alive = live.needed(rows) if rows is not None else None
        if "done" in op.memo and alive is not None and torch.equal(op.memo["done"], alive):
            return
        op.memo["done"] = alive
        geometry = op.memo["geometry"]
        matrix = self.matrix(ctx.tensor(op.memo["weight"]), geometry)
        read = read_columns(matrix, alive)
        if alive is not None and geometry.groups > 1 and matrix.size(2) == 1:
            read = alive.reshape(geometry.groups, -1).any(1)  # depthwise: an output stays paired with its input
        c = ctx.agreed(op.memo["weight"])
        if c.numel() != read.numel():
            c = torch.full_like(read, torch.nan, dtype=torch.float64)
        live.mark(columns[read & c.isnan()], op.where, self._refusal(op))
        constant = read & ~c.isnan() & (c != 0)
        if not ctx.can_fold(op):
            live.mark(columns[constant], op.where, "a constant, but there is no bias to fold it into")
        elif bool(constant.any()):
            live.mark(
                columns[constant & self._ill_conditioned(matrix, c)],
                op.where,
                "folding this constant would lose digits",
            )

    @staticmethod
    def _ill_conditioned(matrix: Tensor, c: Tensor) -> Tensor:
        """Columns whose constants are huge and cancel each other in some row."""
        groups, _, width, _ = matrix.shape
        c, found = c.nan_to_num(0.0).reshape(groups, 1, width), torch.zeros((groups, width), dtype=torch.bool)
        for span in spans(matrix, 1):
            terms = matrix[:, span].double().sum(3) * c
            bad = terms.abs().sum(2) > _MOST_CANCELLATION * terms.sum(2).abs().clamp(min=1.0)
            found |= (bad[:, :, None] & (terms != 0)).any(1)
        return found.reshape(-1)

    def _refusal(self, op: Op) -> str:
        if op.memo["geometry"].padded:
            return "reads it (a constant other than 0 counts too: zero padding makes its border differ)"
        return "reads it"

    def cuts(self, op: Op, ctx: Analysis) -> bool:
        return (
            "weight" in op.memo
            and isinstance(op.out, Fact)
            and not bool(compact(op.out.value).isnan().any())
            and ctx.can_fold(op)
            and not ctx.shared(op.memo["weight"], op)
        )

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        if "weight" not in op.memo:
            return
        geometry, name = op.memo["geometry"], op.memo["weight"]
        if op in ctx.cut:
            assert isinstance(op.out, Fact)
            plan.constant_rows(op, uniform(op.out.value, geometry.channel))
        else:
            self._fold(op, ctx, live, plan)
        if geometry.groups > 1 and ctx.param_labels(name, geometry.columns) is None:
            self._gather(op, ctx, live, plan)
        elif geometry.groups > 1:
            if op.memo["rows"] is not None and geometry.rows == 0:
                plan.groups[op.module] = int(live[op.memo["rows"]].reshape(geometry.groups, -1).any(1).sum())
        elif op.memo["columns"] is not None and op.given["input"].source == "input":
            keep = live[op.memo["columns"]]
            if not bool(keep.all()) and not op.given["input"].along(geometry.channel):
                plan.index(op.module, keep.nonzero().flatten())

    def _fold(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        geometry, name, columns = op.memo["geometry"], op.memo["weight"], op.memo["columns"]
        if columns is None:
            return
        c = ctx.agreed(name)
        gone = ~live[columns] & ~c.isnan() & (c != 0)
        if not bool(gone.any()):
            return
        matrix = self.matrix(ctx.tensor(name), geometry)
        groups, _, width, _ = matrix.shape
        gone, c = gone.reshape(groups, width), torch.where(gone, c, 0.0).reshape(groups, 1, width)
        used = gone.any(0)
        plan.fold(op, matvec(matrix[:, :, used], c[:, :, used]))

    def _gather(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        """Depthwise: which kept input channel does each kept output channel read?"""
        rows, columns, geometry = op.memo["rows"], op.memo["columns"], op.memo["geometry"]
        if rows is None:
            return
        keep = live[rows]
        if bool(keep.all()) and (columns is None or bool(live[columns].all())):
            return
        source = torch.arange(geometry.groups).repeat_interleave(len(rows) // geometry.groups)
        here = live[columns] if columns is not None else torch.ones(geometry.groups, dtype=torch.bool)
        position = here.long().cumsum(0) - 1
        lost = keep & ~here[source]
        if bool(lost.any()):  # its input went, so its output is a constant
            assert isinstance(op.out, Fact)
            plan.constant_rows(op, uniform(op.out.value, geometry.channel), only=lost)
        index = torch.where(here[source], position[source], 0)[keep]
        plan.depthwise(op.module, index, int(here.sum()))


@rule("linear")
class Linear(Affine):
    """`F.linear` over the last dimension."""

    def geometry(self, op: Op) -> Geometry:
        return Geometry(channel=-1, rows=0, groups=1, padded=False)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
class Convolution(Affine):
    """Convolutions. A transposed one is like a padded one unless it is 1x1 with stride 1.

    Depthwise (one input channel a group): output k is a unit of its own that reads input k alone, so a stream may keep
    channel k while the convolution loses it; the convolution then gathers its inputs by an index.
    """

    def geometry(self, op: Op) -> Geometry:
        taps = op.given["weight"].shape[2:]
        transposed = "transpose" in op.name
        groups = op.given["groups"]
        point = all(t == 1 for t in taps)
        if transposed:
            plain = point and all(s == 1 for s in _list(op.given["stride"])) and not any(_list(op.given["padding"]))
            padded = not plain or any(_list(op.given["output_padding"]))
        else:
            padding = op.given["padding"]
            padded = padding == "same" and not point if isinstance(padding, str) else any(_list(padding))
        return Geometry(channel=-len(taps) - 1, rows=int(transposed), groups=groups, padded=padded)

    def _positions(self, op: Op, ctx: Analysis, x: Fact, dim: int) -> list[Tensor]:
        spatial = tuple(range(dim + 1, len(x.shape)))
        for d in spatial:
            for layer in x.along(d):
                ctx.pin(layer, op, "a convolution slides over it")
        return passed_on(x, (dim, *spatial))


def _list(value: object) -> list[int]:
    return list(value) if isinstance(value, (list, tuple)) else [int(value)]  # type: ignore[call-overload]
