"""What happened, for people: sizes, widths before and after, the error, and the reason for what stayed."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .analyse import Analysis
from .analyse.blocks import inside
from .copies import hollow
from .facts import Fact, compact
from .follow import Fit
from .labels import Live
from .masks import Counts, count
from .modules import PLACED, Constant, Passthrough, Shift
from .pieces import nonzero_columns, nonzero_rows
from .plan import Plan
from .rules.carriers import CARRIES
from .verify import Verification

STAND_INS = (Constant, Passthrough, Shift)  # with nothing of the old module inside


@dataclass(frozen=True)
class Layer:
    """One module that holds parameters of its own."""

    name: str
    before: str
    after: str
    params_before: int
    params_after: int


@dataclass(frozen=True)
class Kept:
    """Channels of a layer that looked dead but stayed, and why."""

    name: str
    what: str
    count: int
    reason: str


@dataclass(frozen=True)
class Width:
    """How many outputs a layer has, and why it has so many."""

    name: str
    before: int
    after: int
    alive: int
    """Outputs that the layer itself computes: rows of its weight that are not zero."""
    writers: int
    """Layers that write to these channels, itself included: more than one on a residual stream."""
    readers: int
    """Layers that read any of them."""
    why: tuple[tuple[str, int], ...]
    """Each reason why outputs stay, and of how many, the most frequent first."""


@dataclass(frozen=True)
class Report:
    """The outcome of one `squeeze`. Prints as a table."""

    before: Counts
    after: Counts
    layers: tuple[Layer, ...]
    kept: tuple[Kept, ...]
    verification: Verification | None
    seconds: float
    carriers: int
    """Channels that stay because they stand for others too: see `rules/carriers.py`."""
    slices: dict[str, dict[int, Tensor]]
    """Parameter -> dimension -> the indices that stayed, where some went."""
    group_columns: dict[str, Tensor]
    """Weight of a grouped convolution -> for each row that stayed the columns that did: every group has its own."""
    widths: tuple[Width, ...] = ()
    """All layers with a weight, those too that kept their width."""

    @property
    def params_before(self) -> int:
        return self.before.params

    @property
    def params_after(self) -> int:
        return self.after.params

    @property
    def mask_alive(self) -> int:
        """Non-zero entries of all parameters before: what pruning papers report."""
        return self.before.params_alive

    @property
    def weights_before(self) -> int:
        return self.before.weights

    @property
    def weights_after(self) -> int:
        return self.after.weights

    @property
    def weights_mask_alive(self) -> int:
        return self.before.weights_alive

    @property
    def max_error(self) -> float | None:
        """Largest relative difference in float64 between old and new; None with verify=False."""
        return self.verification.max_error if self.verification else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the indices of what stayed."""
        return {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "max_error": self.max_error,
            "variants": [name for name, _ in self.verification.variants] if self.verification else [],
            "seconds": self.seconds,
            "carriers": self.carriers,
            "layers": [asdict(layer) for layer in self.layers],
            "kept": [asdict(row) for row in self.kept],
            "widths": [asdict(width) for width in self.widths],
        }

    def __str__(self) -> str:
        console = Console(width=140, record=True, file=io.StringIO())
        for table in self.__rich_tables__():
            console.print(table)
        return console.export_text().rstrip()

    def __rich_tables__(self) -> list[Table | str]:
        parts: list[Table | str] = [_layer_table(self.layers)] if self.layers else ["nothing could be removed"]
        if self.kept:
            parts.append(_kept_table(self.kept))
        parts.append(_totals(self))
        return parts


def _layer_table(layers: tuple[Layer, ...]) -> Table:
    table = Table("layer", "width", "", "parameters", "", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for column in (3, 4):
        table.columns[column].justify = "right"
    for layer in layers:
        table.add_row(
            layer.name, layer.before, f"-> {layer.after}", f"{layer.params_before:,}", f"-> {layer.params_after:,}"
        )
    return table


def _kept_table(kept: tuple[Kept, ...]) -> Table:
    table = Table("looked dead, but stayed", "", "because", box=box.SIMPLE_HEAD)
    for row in kept:
        table.add_row(row.name, f"{row.count} {row.what}", row.reason)
    return table


def _totals(report: Report) -> Table:
    table = Table("", "before", "not zero", "after", "smaller", box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, total, alive, after in (
        ("all parameters", report.before.params, report.before.params_alive, report.after.params),
        ("prunable weights", report.before.weights, report.before.weights_alive, report.after.weights),
    ):
        table.add_row(name, f"{total:,}", f"{alive:,}", f"{after:,}", f"{total / max(after, 1):.2f}x")
    proof = (
        "not verified"
        if report.verification is None
        else (f"max error {report.verification.max_error:.1e} in float64, {len(report.verification.variants)} variants")
    )
    table.caption = f"{proof}; {report.seconds:.1f} s"
    return table


@dataclass(frozen=True)
class Outline:
    """What a report says of a model as it was, which may be gone by then."""

    counts: Counts
    model: nn.Module  # without weights


def outline(model: nn.Module) -> Outline:
    return Outline(count(model), hollow(model))


def make_report(
    ctx: Analysis,
    last: Fit,
    plans: list[Plan],
    old: Outline,
    new: nn.Module,
    proof: Verification | None,
    seconds: float,
) -> Report:
    sides = list(_sides(ctx, last.plan))
    kept, widths = _kept(sides, last.live), _widths(ctx, sides, last.live, old.model)
    carriers = sum(reason.text == CARRIES for reason in last.live.given_reasons())
    layers, slices, columns = _layers(old.model, new), _slices(plans), _group_columns(plans, old.model)
    return Report(old.counts, count(new), layers, kept, proof, seconds, carriers, slices, columns, widths)


def _slices(plans: list[Plan]) -> dict[str, dict[int, Tensor]]:
    """What stayed after all steps, in indices of the original."""
    total: dict[str, dict[int, Tensor]] = {}
    for plan in plans:
        rows = {f"{path}.{name}".lstrip("."): {0: i} for path, i in plan.placed.items() for name in ("weight", "bias")}
        for name, dims in [*plan.slices.items(), *rows.items()]:
            before = total.setdefault(name, {})
            before |= {dim: before[dim][index] if dim in before else index for dim, index in dims.items()}
        for path in plan.placed:  # made anew, not sliced
            total.pop(f"{path}.fill".lstrip("."), None)
    return total


def _group_columns(plans: list[Plan], old: nn.Module) -> dict[str, Tensor]:
    """The same for grouped convolutions, whose groups each keep columns of their own."""
    total: dict[str, Tensor] = {}
    for name in {name: None for plan in plans for name in plan.group_columns}:
        height, width = old.get_parameter(name).shape[:2]
        columns = torch.arange(width).expand(height, width)
        for plan in plans:
            kept, rows = plan.group_columns.get(name), plan.slices.get(name, {}).get(0)
            if kept is not None:
                columns = columns.gather(1, kept.repeat_interleave(len(columns) // len(kept), 0))
            columns = columns if rows is None else columns[rows]
        total[name] = columns
    return total


def _layers(old: nn.Module, new: nn.Module) -> tuple[Layer, ...]:
    """The modules that changed; what was inside a module that gave way to a stand-in counts with it."""
    rows = []
    now = dict(new.named_modules())
    for name, module in old.named_modules():
        other = now.get(name)
        if other is None:
            continue
        replaced = type(other) in STAND_INS and type(module) is not type(other)
        before, after = _size(module, replaced), _size(other, replaced)
        if before != after or replaced:
            rows.append(Layer(name or "(model)", _width(module), _width(other), before, after))
    return tuple(rows)


def _size(module: nn.Module, whole: bool) -> int:
    return sum(p.numel() for p in module.parameters(recurse=whole))


def _width(module: nn.Module) -> str:
    """Inputs and outputs of a layer, or the shapes of its parameters."""
    weight = getattr(module, "weight", None)
    for one, other in (("in_features", "out_features"), ("in_channels", "out_channels")):
        if hasattr(module, one) and isinstance(weight, Tensor):
            width = f"{getattr(module, one)} -> {getattr(module, other)}"
            return f"{width} of {len(module.place)}" if isinstance(module, tuple(PLACED.values())) else width  # type: ignore[arg-type]
    shapes = [f"{'x'.join(map(str, p.shape))}" for _, p in module.named_parameters(recurse=False)]
    kind = type(module).__name__
    return f"{kind} {shapes[0]}" if shapes else kind


@dataclass(frozen=True)
class _Side:
    """The outputs or inputs of a layer, as the last look at the model saw them."""

    module: str
    weight: str
    what: str
    dim: int
    labels: Tensor
    alive: Tensor  # rows or columns that are not zero


def _sides(ctx: Analysis, plan: Plan) -> Iterator[_Side]:
    seen: set[tuple[str, str]] = set()
    for op in ctx.ops:
        weight = op.memo.get("weight")
        if weight is None or inside(op.module, plan.dead) or not isinstance(op.out, Fact):
            continue
        tensor, geometry = ctx.tensor(weight), op.memo["geometry"]
        for what, dim, labels in (
            ("outputs", geometry.rows, op.memo["rows"]),
            ("inputs", geometry.columns, op.memo["columns"]),
        ):
            if labels is None or (weight, what) in seen:
                continue
            seen.add((weight, what))
            alive = torch.ones(len(labels), dtype=torch.bool)  # columns of groups are not looked at one by one
            if tensor.size(dim) == len(labels):
                alive = (nonzero_rows if dim == 0 else nonzero_columns)(tensor)
            yield _Side(op.module or "(model)", weight, what, dim, labels, alive)


def _kept(sides: list[_Side], live: Live) -> tuple[Kept, ...]:
    """Rows and columns of zeros, and constant outputs, that are still there."""
    found: Counter[tuple[str, str, str]] = Counter()
    for side in sides:
        for label in side.labels[~side.alive & live[side.labels]].tolist():
            found[side.module, side.what, str(live.reason(label))] += 1
    return tuple(Kept(name, what, number, reason) for (name, what, reason), number in found.items())


def _widths(ctx: Analysis, sides: list[_Side], live: Live, old: nn.Module) -> tuple[Width, ...]:
    users: dict[str, dict[int, set[str]]] = {"outputs": {}, "inputs": {}}  # channel -> weights that write or read it
    for side in sides:
        for root in live.root[side.labels[side.alive]].unique().tolist():
            users[side.what].setdefault(root, set()).add(side.weight)
    weights = {side.module: side.weight for side in sides}
    for op in ctx.ops:
        if op.module in weights and "weight" not in op.memo:  # a layer that gathers its inputs reads what it gathers
            for layer in (layer for fact in op.facts() if fact.source != "param" for layer in fact.layers):
                for root in live.root[compact(layer).unique()].tolist():
                    users["inputs"].setdefault(root, set()).add(weights[op.module])

    def count_users(what: str, roots: list[int]) -> int:
        return len(set().union(*(users[what].get(root, ()) for root in roots)))

    found, sizes = [], {name: p.shape for name, p in old.named_parameters(remove_duplicate=False)}
    for side in sides:
        if side.what == "outputs":
            roots, size = live.root[side.labels].unique().tolist(), len(side.labels)
            before = sizes[side.weight][side.dim] if side.weight in sizes else size
            writers, readers = count_users("outputs", roots), count_users("inputs", roots)
            alive, why = int(side.alive.sum()), _reasons(side.labels, live)
            found.append(Width(side.module, before, size, alive, writers, readers, why))
    return tuple(found)


def _reasons(labels: Tensor, live: Live) -> tuple[tuple[str, int], ...]:
    which = live.why[live.root[labels]]
    counts = Counter({str(live.reasons[i]): int((which == i).sum()) for i in which.unique().tolist() if i >= 0})
    return tuple(counts.most_common())
