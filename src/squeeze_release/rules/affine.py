"""Linear layers and convolutions: y = W x + b over one channel dimension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..facts import Fact, compact, uniform, unknown, vector
from ..labels import Live
from ..pieces import constant_rows, matvec, read_columns, spans
from . import parts
from .base import Facts, Op, Rule, blank, contracted, passed_on, rule
from .carriers import Request, carried, known, offset_carried, request

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
    Need: x_k, where some living row j has W_jk != 0 and x_k is neither such a constant nor carried by others.
    Absorb: b_j += W_jk c_k for every constant x_k that goes; a missing bias is created, one that is put together from
    parameters takes it piece by piece (`rules/joined.py`). What a bias cannot hold goes into the columns of carriers
    (`rules/carriers.py`): all of it where the bias is shared, computed, or not used by the module's own forward.
    Unread coordinates of a model input are left out by an index.
    Exact: folds are computed in float64 and depend on no position, so they hold at every resolution.
    Keeps: a constant that is huge and cancels against others, or that calls of one module see differently, or where
    neither bias nor weight may change; everything where the weight is computed.
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
        columns, rows = self._columns(op, ctx, x, dim, name, geometry), self._rows(op, ctx, name, geometry)
        for d in range(2, len(op.given["weight"].shape)):
            ctx.pin_param(name, d, op, "taps of a convolution")
        op.memo.update(geometry=geometry, weight=name, columns=columns, rows=rows)
        table = known(x, dim, padded=geometry.padded, carriers="carriers" in ctx.options)
        ctx.constants.setdefault(name, []).append(table)
        c = torch.where((table[:, 1:] != 0).any(1), torch.nan, table[:, 0])
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
        rows, bias = ctx.param_labels(name, geometry.rows), op.param("bias")
        if rows is not None and geometry.rows == 1 and geometry.groups > 1:
            ctx.pin(rows, op, "a grouped transposed convolution shares its columns between groups")
            rows = ctx.labels.fresh(len(rows) * geometry.groups)
            ctx.pin(rows, op, "a grouped transposed convolution keeps its outputs")
        if bias is not None and rows is not None:
            mine = ctx.param_labels(bias, 0)
            if mine is not None:
                ctx.labels.merge(rows, mine)
        elif isinstance(op.given.get("bias"), Fact) and rows is not None:  # put together from pieces, as BEiT's is
            mine = contracted(op, ctx, op.given["bias"], 0)
            if mine is not None and geometry.groups == 1:
                ctx.labels.merge(rows, mine)
            else:
                ctx.pin(rows, op, "its bias is computed, and of fixed width")
        return rows

    def _bind_groups(self, op: Op, ctx: Analysis, labels: Tensor | None, mine: Tensor, geometry: Geometry) -> None:
        """Equally many columns leave every group, any ones, or whole groups leave on both sides."""
        groups = ctx.labels.fresh(geometry.groups)
        name = op.param("weight") or ""
        rows = ctx.param_labels(name, geometry.rows)
        if labels is None or rows is None or geometry.rows == 1:
            for fixed in (labels, mine, rows):
                if fixed is not None:
                    ctx.pin(fixed, op, "a grouped convolution on a fixed width")
            return
        ctx.pin(mine, op, "every group has columns of its own")  # which of them go, `absorb` says
        ctx.labels.merge(labels, ctx.group_columns(name, len(labels)))
        ctx.grid(op, labels.reshape(geometry.groups, -1), outer=groups)
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
        read = op.memo["read"] = self._read(op, ctx, alive)
        table = self._table(op, ctx)
        live.mark(columns[read & table.isnan().any(1)], op.where, "reads it")
        self._refuse(op, ctx, live, read, table)

    def _read(self, op: Op, ctx: Analysis, alive: Tensor | None) -> Tensor:
        """Which columns the living rows read."""
        return read_columns(self.matrix(ctx.tensor(op.memo["weight"]), op.memo["geometry"]), alive)

    def _table(self, op: Op, ctx: Analysis) -> Tensor:
        """What every call knows of the columns; constants that no bias takes are to be carried."""
        table, width = ctx.agreed(op.memo["weight"]), len(op.memo["columns"])
        if len(table) != width:
            return torch.full((width, 1), torch.nan, dtype=torch.float64)
        return offset_carried(table) if self._carries_all(op, ctx, table) else table

    def _carries_all(self, op: Op, ctx: Analysis, table: Tensor) -> bool:
        """Whether there is no bias to fold constants into, and the weight may change in its stead."""
        if "carriers" not in ctx.options or self._depthwise(op, ctx) or not self._can_carry(op, ctx, table):
            return False
        if "carries_all" not in op.memo:
            op.memo["carries_all"] = not any(map(ctx.can_fold, ctx.readers_of(op.memo["weight"])))
        return bool(op.memo["carries_all"])

    def _refuse(self, op: Op, ctx: Analysis, live: Live, read: Tensor, table: Tensor) -> None:
        """Keep the known channels that neither a bias nor a carrier can take over."""
        columns, constant = op.memo["columns"], read & (table.nan_to_num(0.0)[:, 0] != 0)
        if not ctx.can_fold(op):
            live.mark(columns[constant], op.where, "a constant, but there is no bias to fold it into")
        elif bool(constant.any()):
            matrix = self.matrix(ctx.tensor(op.memo["weight"]), op.memo["geometry"])
            bad = constant & self._ill_conditioned(matrix, table[:, 0])
            live.mark(columns[bad], op.where, "folding this constant would lose digits")
        carried = read & (table.nan_to_num(0.0)[:, 1:] != 0).any(1)
        if bool(carried.any()) and not self._can_carry(op, ctx, table):
            text = "not the same at every position, and its weight is read elsewhere too"
            live.mark(columns[carried], op.where, text)

    def _can_carry(self, op: Op, ctx: Analysis, table: Tensor) -> bool:
        """Whether the weight may change: nobody reads it otherwise. A depthwise output reads one channel only."""
        if self._depthwise(op, ctx) and (table.size(1) > 2 or not ctx.can_index(op)):
            return False
        return all(reader.memo.get("geometry") == op.memo["geometry"] for reader in ctx.readers_of(op.memo["weight"]))

    def _depthwise(self, op: Op, ctx: Analysis) -> bool:
        geometry: Geometry = op.memo["geometry"]
        return geometry.groups > 1 and ctx.param_labels(op.memo["weight"], geometry.columns) is None

    def _by_group(self, op: Op, ctx: Analysis) -> int:
        """Among how many sets of columns carriers are shared: a depthwise convolution gathers from all of them."""
        return 1 if self._depthwise(op, ctx) else op.memo["geometry"].groups

    def carriers(self, op: Op, ctx: Analysis, live: Live) -> Iterator[Request]:
        if "read" not in op.memo or op in ctx.cut:
            return
        table, read, columns = self._table(op, ctx), op.memo["read"], op.memo["columns"]
        if table.size(1) == 1:
            return
        groups = self._by_group(op, ctx)
        for part in zip(table.chunk(groups), columns.chunk(groups), read.chunk(groups), strict=True):
            yield from request(*part, live, op.where)

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

    def cuts(self, op: Op, ctx: Analysis) -> bool:
        return (
            "weight" in op.memo
            and isinstance(op.out, Fact)
            and not bool(compact(op.out.value).isnan().any())
            and ctx.can_fold(op)
            and (op.given.get("bias") is None or op.param("bias") is not None)
            and not ctx.shared(op.memo["weight"], op)
        )

    def absorb(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        if "weight" not in op.memo:
            return
        geometry: Geometry = op.memo["geometry"]
        if op in ctx.cut:
            assert isinstance(op.out, Fact)
            plan.constant_rows(op, uniform(op.out.value, geometry.channel))
        elif op.memo["columns"] is not None:
            offset = self._carry(op, ctx, live, plan)
            if bool((offset != 0).any()) and not self._depthwise(op, ctx):
                self._fold(op, ctx, offset, plan)
        if self._depthwise(op, ctx):
            self._gather(op, ctx, live, plan)
        elif geometry.groups > 1:
            self._regroup(op, live, plan)
        elif op.memo["columns"] is not None and op.given["input"].source == "input":
            keep = live[op.memo["columns"]]
            if not bool(keep.all()) and not op.given["input"].along(geometry.channel):
                plan.index(op.module, keep.nonzero().flatten())

    def _carry(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> Tensor:
        """Let carriers take over columns that go; returns what a bias must hold of each."""
        table, alive = self._table(op, ctx), live[op.memo["columns"]]
        read = op.memo.get("read", torch.zeros_like(alive))
        groups = self._by_group(op, ctx)
        offsets = torch.where(~alive, table[:, 0].nan_to_num(0.0), 0.0).reshape(groups, -1)
        parts = zip(table.chunk(groups), alive.chunk(groups), read.chunk(groups), strict=True)
        found = [carried(*part) for part in parts]
        for offset, own, each in zip(offsets, table.chunk(groups), found, strict=True):
            if each is not None:
                offset[each.gone] -= each.factors @ own[each.carriers, 0]
        if any(found):
            op.memo["carried"] = found
            if not self._depthwise(op, ctx):
                plan.carry(op.memo["weight"], op.memo["geometry"].columns, found)
        return offsets.flatten()

    def _fold(self, op: Op, ctx: Analysis, offset: Tensor, plan: Plan) -> None:
        matrix = self.matrix(ctx.tensor(op.memo["weight"]), op.memo["geometry"])
        offset = offset.reshape(len(matrix), 1, -1)
        used = (offset != 0).any(0).flatten()
        plan.fold(op, matvec(matrix[:, :, used], offset[:, :, used]))

    def _regroup(self, op: Op, live: Live, plan: Plan) -> None:
        """Grouped: how many groups are left, and which columns of each."""
        rows, columns, geometry = op.memo["rows"], op.memo["columns"], op.memo["geometry"]
        if rows is None or columns is None or geometry.rows == 1:
            return
        plan.groups[op.module] = int(live[rows].reshape(geometry.groups, -1).any(1).sum())
        alive = live[columns].reshape(geometry.groups, -1)
        if not bool(alive.all()):
            # The columns that stay come first; rows of groups that go are cut away, whatever their columns.
            plan.group_columns[op.memo["weight"]] = torch.argsort(~alive, dim=1, stable=True)[:, : alive.sum(1).max()]

    def _gather(self, op: Op, ctx: Analysis, live: Live, plan: Plan) -> None:
        """Depthwise: which kept input channel does each kept output channel read?"""
        rows, columns, geometry = op.memo["rows"], op.memo["columns"], op.memo["geometry"]
        if rows is None:
            return
        if bool((keep := live[rows]).all()) and (columns is None or bool(live[columns].all())):
            return
        source = torch.arange(geometry.groups).repeat_interleave(len(rows) // geometry.groups)
        here = live[columns] if columns is not None else torch.ones(geometry.groups, dtype=torch.bool)
        position = here.long().cumsum(0) - 1
        lost = keep & ~here[source]
        for found in op.memo.get("carried", ()):  # one carrier is gathered as often as it is needed
            factors = torch.ones(geometry.groups, dtype=torch.float64)
            factors[found.gone] = found.factors[:, 0]
            position[found.gone] = int(position[found.carriers[0]])
            plan.scale(op.memo["weight"], factors[source])
            lost &= ~torch.isin(source, found.gone)
        if bool(lost.any()) and op not in ctx.cut:  # its input went, so its output is a constant, or fills a width
            assert isinstance(op.out, Fact)
            plan.constant_rows(op, uniform(op.out.value, geometry.channel).nan_to_num(0.0), only=lost)
        index = position.clamp(min=0)[source][keep]
        plan.depthwise(op.module, index, int(here.sum()))


@rule("linear")
class Linear(Affine):
    """`F.linear`: y = W x + b over the last dimension. With a part of a parameter for its weight, see `parts`."""

    def geometry(self, op: Op) -> Geometry:
        return Geometry(channel=-1, rows=0, groups=1, padded=False)

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        return parts.forward(op, ctx) if parts.is_part(op) else super().forward(op, ctx)

    def need(self, op: Op, ctx: Analysis, live: Live) -> None:
        if "part" in op.memo:
            parts.need(op, ctx, live)
        else:
            super().need(op, ctx, live)


@rule("addmm")
class Addmm(Affine):
    """y = b + x W, the weight transposed: GPT-2's Conv1D.

    Exact: as every affine op.
    Keeps: everything under other factors than 1, with a bias that is no vector, or where either is no parameter.
    """

    def forward(self, op: Op, ctx: Analysis) -> Facts:
        plain = op.given["beta"] == 1 and op.given["alpha"] == 1 and len(op.given["self"].shape) == 1
        if plain and op.param("self") is not None and op.param("mat2") is not None:
            op.alias = {"input": "mat1", "weight": "mat2", "bias": "self"}
            op.given = {mine: op.given[theirs] for mine, theirs in op.alias.items()}
        return super().forward(op, ctx)

    def geometry(self, op: Op) -> Geometry:
        return Geometry(channel=-1, rows=1, groups=1, padded=False)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
class Convolution(Affine):
    """Convolutions: y_j = b_j + sum_k W_jk * x_k. A transposed one is like a padded one unless it is 1x1 with stride 1.

    Depthwise (one input channel a group): output k is a unit of its own that reads input k alone, so a stream may keep
    channel k while the convolution loses it; the convolution then gathers its inputs by an index.
    Grouped: equally many columns leave every group, each its own, or whole groups leave on both sides.
    Exact: in front of zero padding a constant is not one at the border, so it is no bias: carriers take it over.
    Keeps: taps; channels along a dimension it slides over; all of a transposed convolution with groups.
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
