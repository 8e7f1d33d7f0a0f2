"""Labels and constants forward over the graph, liveness backward: what can go, and for what stays, why."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..facts import Fact, compact, nothing, varying, vector
from ..labels import Grid, Labels, Live
from ..modules import can_index
from ..rehearse import Call
from ..rules import RULES, UNKNOWN, Op, Rule, carriers, flat, joined
from ..trace import Trace, named_arguments
from ..trace.sizes import takes_other_sizes
from . import blocks
from .biases import can_take_bias
from .readers import count_readers

# What each rule set may do beyond folding constants, dropping the unread and removing dead blocks.
RULE_SETS: dict[str, frozenset[str]] = {
    "A": frozenset(),
    "AB": frozenset({"norms"}),
    "paper": frozenset({"norms", "heads"}),
    "all": frozenset({"norms", "heads", "head_dims", "streams", "carriers", "computed"}),
}


class Analysis:
    """Everything known about one model. Rules read and extend it; `plan` and `rewrite` read it."""

    def __init__(
        self,
        model: nn.Module,
        options: Collection[str],
        keep: Collection[str] = (),
        numbers: nn.Module | None = None,
    ) -> None:
        self.model, self.options, self.keep = model, options, tuple(keep)
        self.labels = Labels()
        self.calls: list[Call] = []
        self.ops: list[Op] = []
        self.outputs: list[Fact] = []
        self.pins: list[tuple[Tensor, str, str]] = []
        self.grids: list[Grid] = []
        self.constants: dict[str, list[Tensor]] = {}  # reader -> the constants it saw, one vector a call
        self.param_dims: dict[str, list[Tensor | None]] = {}
        self.readers: dict[str, list[Op]] = {}
        self.constant_labels = torch.zeros(0, dtype=torch.int64)  # channels written as constants
        self.refused: dict[str, int] = {}  # module whose code did not follow -> how many steps it was let less go
        self.blamed: dict[type, set[str]] = {}  # the modules that were found at fault, by class
        self.rehearsed = False  # whether trials of the user's code go to the CPU first
        self.tied: dict[str, int] = {}  # modules whose code takes widths that were equal for one, see `refuse.tie`
        self.stiffened: dict[str, list[Grid]] = {}  # module -> grids of which only whole rows go, for want of better
        self.whole: set[str] = set()  # modules that are not replaced
        self.cut: set[Op] = set()
        self.wanted: set[Op] = set()
        self.dead: dict[str, blocks.Replacement] = {}
        self._tensors, self._canonical = _tensors(model if numbers is None else numbers)
        self._owned: dict[int, tuple[str, int]] = {}  # first label of a parameter's dimension -> whose they are
        self._read: tuple[Tensor, Tensor] | None = None
        self._uses: dict[str, set[fx.Node]] = {}  # parameter -> the nodes it goes into
        self._other_sizes: bool | None = None
        self._takes_bias: dict[str, bool] = {}  # module without a bias -> whether it would use one
        self._rows: dict[Any, Tensor] = {}  # table -> the labels that stand for its rows
        self._laid_out: set[Any] = set()  # the grids there are

    # ------------------------------------------------------------------ what rules ask and say

    def tensor(self, name: str) -> Tensor:
        """The numbers of a parameter or buffer; the analysis runs on the CPU, wherever the model is."""
        return self._tensors[self._canonical[name]].detach().cpu()

    def param_labels(self, name: str, dim: int) -> Tensor | None:
        """Labels of a parameter along one dimension, the same at every use; None where it is 1 wide."""
        name = self._canonical[name]
        dims = self.param_dims.setdefault(name, [None] * self._tensors[name].dim())
        if dims[dim] is None and self._tensors[name].size(dim) > 1:
            self._owned[len(self.labels.parent)] = (name, dim)
            dims[dim] = self.labels.fresh(self._tensors[name].size(dim))
        return dims[dim]

    def group_columns(self, name: str, count: int) -> Tensor:
        """Labels of the columns of a grouped weight, each group's own, the same at every use."""
        key = ("columns", self._canonical[name])
        if key not in self._rows:
            self._rows[key] = self.labels.fresh(count)
        return self._rows[key]

    def owners(self, labels: Tensor) -> set[tuple[str, int] | None]:
        """The parameters that hold these labels, and along which dimension; None if there is one that none holds."""
        starts = torch.tensor(sorted(self._owned))
        nearest = torch.searchsorted(starts, labels.reshape(-1), right=True) - 1
        found: set[tuple[str, int] | None] = set()
        for i in nearest.unique().tolist():
            start = int(starts[i]) if i >= 0 else -1
            name, dim = self._owned.get(start, ("", 0))
            end = start + self._tensors[name].size(dim) if name else 0
            found.add((name, dim) if name and int(labels.reshape(-1)[nearest == i].max()) < end else None)
        return found

    def pin(self, labels: Tensor, op: Op, text: str) -> None:
        self.pins.append((compact(labels).unique(), op.where, text))

    def pin_param(self, name: str, dim: int, op: Op, text: str) -> None:
        labels = self.param_labels(name, dim)
        if labels is not None:
            self.pin(labels, op, text)

    def grid(
        self,
        op: Op,
        table: Tensor,
        *,
        outer: Tensor | None = None,
        inner: Tensor | None = None,
        ragged: bool = True,
        rigid: bool = False,
    ) -> Tensor:
        """Keep the rows of a table equally long; returns the labels that stand for its rows."""
        key = _key(table)
        if outer is None:  # the same rows have the same labels wherever they turn up
            if key not in self._rows:
                _, place = torch.unique(table, dim=0, return_inverse=True)  # a head stands there once for every sample
                self._rows[key] = self.labels.fresh(int(place.max()) + 1)[place]
            outer = self._rows[key]
        known = (op.module, ragged, rigid, key, _key(outer), _key(inner))
        if known not in self._laid_out:
            self._laid_out.add(known)
            rigid = rigid or (ragged and "head_dims" not in self.options)
            self.grids.append(Grid(table, op.where, outer, inner, ragged, rigid, op.module))
        return outer

    def pin_outputs(self, places: Collection[str | tuple[int, ...]], text: str) -> None:
        """Fix the widths of what these modules hand on, and of every tensor with one of these shapes."""
        for border in blocks.borders(self) if places else ():
            exits = [border.exit(place) for place in places if isinstance(place, str)]
            for op in border.ops.values():
                for fact in op.outputs():
                    if op.node in exits or fact.shape in places:
                        self.pins += [(compact(layer).unique(), op.where, text) for layer in fact.layers]

    def agreed(self, reader: str) -> Tensor:
        """What every call of a reader knows alike of its channels; NaN elsewhere."""
        first, *others = self.constants[reader]
        for other in others:
            if len(first) != len(other):
                return torch.full_like(first, torch.nan)
            if first.dim() == 2:  # fewer functions in one call: the others' factors are 0 there
                wide = max(first.size(1), other.size(1))
                first, other = (torch.nn.functional.pad(table, (0, wide - table.size(1))) for table in (first, other))
            first = torch.where(first == other, first, torch.nan)
        return first

    def can_fold(self, op: Op) -> bool:
        """Whether the op has a bias of its own, or a module that takes one."""
        bias = op.param("bias")
        if bias is not None:
            weight = op.param("weight")
            return all(reader.param("weight") == weight for reader in self.readers[self._canonical[bias]])
        if op.given.get("bias") is not None:
            return joined.pieces(op, self) is not None
        if op.module not in self._takes_bias:
            shape = self.tensor(op.memo["weight"]).shape
            self._takes_bias[op.module] = can_take_bias(self.model.get_submodule(op.module), shape)
        return self._takes_bias[op.module]

    def readers_of(self, name: str) -> list[Op]:
        return self.readers[self._canonical[name]]

    def uses_of(self, name: str) -> set[fx.Node]:
        """The nodes of all traces that a parameter goes into, whatever they are."""
        return self._uses[self._canonical[name]]

    def is_saved(self, name: str) -> bool:
        """Whether a parameter or buffer is part of the state that a model is saved as."""
        path, _, attribute = name.rpartition(".")
        return attribute not in self.model.get_submodule(path)._non_persistent_buffers_set

    def takes_other_sizes(self) -> bool:
        """Whether the model runs on inputs of another size than the example's, as far as one can try."""
        if self._other_sizes is None:
            self._other_sizes = takes_other_sizes(self.model, self.calls)
        return self._other_sizes

    def shared(self, name: str, op: Op) -> bool:
        """Whether another op of the same call reads this parameter too."""
        return any(reader is not op and reader.trace is op.trace for reader in self.readers[self._canonical[name]])

    def can_index(self, op: Op) -> bool:
        return can_index(self.model.get_submodule(op.module))

    def written_by_linear(self, labels: Tensor) -> bool:
        """Whether these labels are rows of weights that only linear ops read."""
        return all(
            owner is not None
            and owner[1] == 0
            and len(self.param_dims[owner[0]]) == 2
            and all(
                op.name == "aten.linear.default" and self._scales(op, labels) for op in self.readers.get(owner[0], [])
            )
            for owner in self.owners(labels)
        )

    def _scales(self, op: Op, labels: Tensor) -> bool:
        """Whether rows can be scaled along with their bias: not if that is computed, or a piece of it never saved."""
        if op.given.get("bias") is None or op.param("bias") is not None:
            return True
        pieces, rows = joined.pieces(op, self), op.memo.get("rows")
        if pieces is None or rows is None:
            return False
        return not any(piece.name is None and bool(torch.isin(rows[piece.rows], labels).any()) for piece in pieces)

    def sole_reader(self, op: Op, labels: Tensor) -> bool:
        """Whether no other op computes with these labels; those that merely hand them on do not count."""
        readers = self.sole_readers(labels)
        return readers is not None and all(reader is op for reader in readers)

    def sole_readers(self, labels: Tensor) -> list[Op] | None:
        """The ops that compute with these labels, if each of these has one reader at most."""
        if self._read is None:
            self._read = count_readers(self)
        first, several = (reader[labels] for reader in self._read)
        return None if bool(several.any()) else [self.ops[i] for i in first.unique().tolist() if i >= 0]

    # ------------------------------------------------------------------ forward

    def read(self, trace: Trace) -> None:
        """Labels and constants of every tensor of a traced call."""
        facts: dict[fx.Node, Any] = {}

        def look(value: Any) -> Any:
            return facts.get(value) if isinstance(value, fx.Node) else value

        for node in trace.nodes:
            if node.op == "placeholder":
                facts[node] = self._source(node, trace)
            elif node.op == "output":
                self.outputs += flat(fx.node.map_arg(node.args, look))
            elif node.target is operator.getitem:
                whole = look(node.args[0])
                facts[node] = whole[int(node.args[1])] if isinstance(whole, list) else None  # type: ignore[arg-type]
            elif node.op == "call_function":
                given = fx.node.map_arg(named_arguments(node), look)
                facts[node] = self._apply(Op(node, trace, dict(given)))

    def _source(self, node: fx.Node, trace: Trace) -> Fact | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        shape = tuple(int(s) for s in value.shape)
        name = trace.params.get(node.name)
        if name is None:
            return nothing(shape, "input")
        self._uses.setdefault(self._canonical[name], set()).update(node.users)
        if len(node.users) == 0:
            return nothing(shape, "param")
        labels = [(d, self.param_labels(name, d)) for d in range(len(shape))]
        layers = tuple(vector(label, shape, d) for d, label in labels if label is not None)
        return Fact(shape, layers, lambda: self.tensor(name).double(), "param")

    def _apply(self, op: Op) -> Any:
        for argument in op.given:
            name = op.param(argument)
            if name is not None:
                self.readers.setdefault(self._canonical[name], []).append(op)
        op.out = rule_of(op).forward(op, self)
        self.ops.append(op)
        return op.out

    # ------------------------------------------------------------------ backward

    def settle(self) -> Live:
        """The smallest set of classes that must stay."""
        self.grids.sort(key=_coarseness, reverse=True)
        borders = blocks.borders(self)
        self.dead = found = blocks.find(self, borders)
        self.cut, self.wanted, read = blocks.wanted(self, borders)
        self.dead = {name: found[name] for name in read}
        self.dead |= blocks.unread(self, borders)
        self.dead = blocks.outermost({**found, **self.dead})
        live = Live(self.labels)
        for op in self.ops:
            for stale in ("done", "read", "carried"):
                op.memo.pop(stale, None)
        self.mark_fixed(live)
        for grid in self.grids:  # the finest last, so that it counts
            if grid.outer is not None and grid.ragged:
                live.row_of[grid.labels] = grid.outer[:, None].expand_as(grid.labels)
            if grid.inner is not None:
                live.in_grid[grid.inner] = True
        live.grown = True
        while live.grown:
            live.grown = False
            for op in reversed(self.ops):
                if op in self.wanted:
                    rule_of(op).need(op, self, live)
            for grid in self.grids if not live.grown else ():
                grid.enter(live)
            # A coarse grid has a choice of what to revive: it must see what all the finer ones want.
            for _, level in itertools.groupby(reversed(self.grids), key=_coarseness):
                if not live.grown:
                    for grid in level:
                        grid.settle(live)
            if not live.grown:
                carriers.settle(
                    [r for op in self.ops if op in self.wanted for r in rule_of(op).carriers(op, self, live)], live
                )
            if not live.grown:
                self._keep_one(live)
        return live

    def mark_fixed(self, live: Live) -> None:
        """Let stay what may never go: outputs, what no rule understands, what the user keeps."""
        for fact in self.outputs:
            for layer in fact.layers:
                live.mark(compact(layer).unique(), "output", "an output of the model")
        for labels, where, text in self.pins:
            live.mark(labels, where, text)
        for name, canonical in self._canonical.items():
            if any(blocks.within(name, kept) for kept in self.keep):
                for mine in self.param_dims.get(canonical, ()):
                    if mine is not None:
                        live.mark(mine, name, "named in keep=")

    def _keep_one(self, live: Live) -> None:
        """No width is ever 0: convolutions with 0 channels return a wrong shape without an error."""
        for grid in self.grids:
            grid.settle(live, least=1)
            if live.grown:
                return
        vectors = [
            (name, labels)
            for name, dims in self.param_dims.items()
            if not blocks.inside(name, self.dead)
            for labels in dims
        ]
        vectors += [(name, replacement.labels) for name, replacement in self.dead.items()]
        for name, labels in vectors:
            if labels is not None and not bool(live[labels].any()):
                # A constant needs nothing and is exact, which matters if its readers would have folded it.
                constant = labels[torch.isin(live.root[labels], live.root[self.constant_labels])]
                pick = constant[:1] if len(constant) else labels[:1]
                live.mark(pick, name, "a layer keeps at least one channel", filler=not len(constant))
                return  # one may do for many: look again before marking another


def analyse(
    model: nn.Module, traces: list[Trace], rules: str, keep: Collection[str], numbers: nn.Module | None = None
) -> Analysis:
    """Facts of all traced calls, in one space of labels; `numbers` may be a more exact copy of the model."""
    ctx = Analysis(model, RULE_SETS[rules], keep, numbers)
    ctx.calls = [trace.call for trace in traces]
    for trace in traces:
        ctx.read(trace)
    return ctx


def rule_of(op: Op) -> Rule:
    return RULES.get(op.node.target, UNKNOWN)


def _coarseness(grid: Grid) -> tuple[int, int]:
    """Long rows leave more to choose; of equally long ones, a table of several must see what each of these wants."""
    return grid.labels.size(1), grid.labels.size(0)


def _key(labels: Tensor | None) -> object:
    return None if labels is None else (tuple(labels.shape), tuple(labels.reshape(-1).tolist()))


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and buffers by the first of their names, and every name's first one: tied tensors are one."""
    tensors: dict[str, Tensor] = {}
    canonical: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        canonical[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(canonical[name], tensor)
    return tensors, canonical


def widths(fact: Fact, live: Live) -> tuple[int, ...]:
    """The shape that a tensor has once the dead channels are gone."""
    shape = list(fact.shape)
    for layer in fact.layers if 0 not in fact.shape else ():  # labels of nothing say nothing
        dims = varying(layer)
        alive = live[
            layer.permute(*dims, *[d for d in range(layer.dim()) if d not in dims]).reshape(
                *[layer.size(d) for d in dims], -1
            )[..., 0]
        ]
        for i, d in enumerate(dims[:-1]):
            shape[d] = int(alive.transpose(0, i).flatten(1).any(1).sum())
        shape[dims[-1]] = int(alive.flatten(0, -2).sum(1).max()) if len(dims) > 1 else int(alive.sum())
    return tuple(shape)
