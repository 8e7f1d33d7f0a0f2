"""Whole modules that no longer depend on their input (the paper's Mode C).

A module whose output is its input plus a constant becomes `Shift`; one whose output is constant becomes `Constant`;
one whose output nobody reads any more is passed through.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from ..facts import Fact, compact, uniform, varying
from ..modules import Passthrough
from ..rules import RULES, Op
from ..rules.affine import Convolution
from ..rules.elementwise import Identity, Unary
from ..rules.pool import Pool, Reduce
from ..rules.shape import Pad
from ..rules.window import Blocks

if TYPE_CHECKING:
    from ..trace import ModuleCall, Trace
    from .analysis import Analysis


@dataclass(frozen=True)
class Replacement:
    kind: str  # "shift", "constant" or "passthrough"
    value: Tensor | None = None  # a number for every channel
    channel_dim: int = -1
    labels: Tensor | None = None  # of those channels
    outputs: int = 0  # a tuple of so many, or 0 for a tensor

    def same(self, other: Replacement | None) -> bool:
        if other is None or (self.kind, self.channel_dim, self.outputs) != (
            other.kind,
            other.channel_dim,
            other.outputs,
        ):
            return False
        return self.value is None or other.value is None or torch.equal(self.value, other.value)


def within(name: str, module: str) -> bool:
    """Whether a dotted name is that module or in it; "" is the model."""
    return not module or name == module or name.startswith(f"{module}.")


def inside(name: str, modules: Container[str]) -> bool:
    """Whether a dotted name is one of these modules or in one of them."""
    return any(prefix in modules for prefix in _prefixes(name))  # as many looks as the name has parts


def _prefixes(name: str) -> Iterator[str]:
    """The module of that name and those around it, the model ("") among them."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def outermost(modules: dict[str, Replacement]) -> dict[str, Replacement]:
    return {name: r for name, r in modules.items() if not inside(name.rpartition(".")[0], modules)}


class Borders:
    """Where the modules of a traced call begin and end."""

    def __init__(self, trace: Trace, ctx: Analysis) -> None:
        self.trace = trace
        self.ops = {op.node: op for op in ctx.ops if op.trace is trace}
        copies = [labels for op in self.ops.values() for labels in op.memo.get("copies", ())]
        self.copies = torch.cat(copies) if copies else torch.empty(0, dtype=torch.int64)
        self.inner: dict[str, list[fx.Node]] = {}
        for node in trace.nodes:
            for path in trace.paths[node]:
                self.inner.setdefault(path, []).append(node)

    def exit(self, name: str) -> fx.Node | None:
        """The one node of a module that is used outside it."""
        paths = self.trace.paths
        out = [node for node in self.inner.get(name, ()) if any(name not in paths[user] for user in node.users)]
        return out[0] if len(out) == 1 else None

    def entry(self, name: str) -> fx.Node | None:
        """The one node outside a module that it reads."""
        read = {source for node in self.inner.get(name, ()) for source in node.all_input_nodes}
        read = {s for s in read if name not in self.trace.paths[s] and s.name not in self.trace.params}
        return read.pop() if len(read) == 1 else None


def borders(ctx: Analysis) -> list[Borders]:
    return [Borders(trace, ctx) for trace in dict.fromkeys(op.trace for op in ctx.ops)]


def find(ctx: Analysis, every: list[Borders]) -> dict[str, Replacement]:
    """The outermost modules that can become a shift or a constant, the same in every traced call."""
    found: dict[str, Replacement] = {}
    for name, module in ctx.model.named_modules():
        if not name or inside(name, found) or not any(True for _ in module.parameters()) or _kept(name, ctx):
            continue
        if isinstance(module, Passthrough):  # a stand-in already
            continue
        options = [_replacement(border, name, module) for border in every if border.trace.calls[name].count]
        first = options[0] if options else None
        if first is not None and all(first.same(other) for other in options):
            found[name] = first
    return found


def wanted(ctx: Analysis, every: list[Borders]) -> tuple[set[Op], set[Op], set[str]]:
    """Ops cut off from their input because their output is constant; ops, and replaced modules, that still matter."""
    by_node = {op.node: op for op in ctx.ops}
    cut: set[Op] = set()
    needed: set[Op] = set()
    read: set[str] = set()
    for border in every:
        exits = {border.exit(name): name for name in ctx.dead}
        reached: set[fx.Node | None] = set()
        for node in reversed(border.trace.nodes):
            if node.op == "output":
                reached.update(node.all_input_nodes)
            if node not in reached:
                continue
            op, name = by_node.get(node), exits.get(node)
            if name is not None:
                read.add(name)
                if ctx.dead[name].kind != "constant":
                    reached.add(border.entry(name))
                continue
            if op is not None:
                needed.add(op)
                if node.target in RULES and RULES[node.target].cuts(op, ctx):
                    cut.add(op)
                    continue
            reached.update(node.all_input_nodes)
    return cut, needed, read


def read_nodes(trace: Trace, dead: dict[str, Replacement]) -> set[fx.Node]:
    """What a call computes that its outputs depend on, once these modules are replaced: a constant reads nothing."""
    read: set[fx.Node] = set()
    for node in reversed(trace.nodes):
        if node.op == "output" or node in read:
            home = next((path for path in trace.paths[node] if path in dead), None)
            if home is None or dead[home].kind != "constant":
                read.update(node.all_input_nodes)
    return read


def unread(ctx: Analysis, every: list[Borders]) -> dict[str, Replacement]:
    """The outermost modules none of whose numbers matter any more."""
    found: dict[str, Replacement] = {}
    busy = {path for op in ctx.wanted for path in op.trace.paths[op.node]}
    holders = {path for name in ctx.dead for path in _prefixes(name)}
    # Last first: whether a module may change the width it hands on depends on those after it.
    for name, module in reversed(list(ctx.model.named_modules())):
        if (
            not name
            or name in busy
            or name in holders
            or inside(name, ctx.dead)
            or not any(True for _ in module.parameters())
            or _kept(name, ctx)
        ):
            continue
        calls = [border for border in every if border.trace.calls[name].count]
        options = [_unread(border, name, {**ctx.dead, **found}) for border in calls]
        first = options[0] if options else None
        if first is not None and isinstance(module, Passthrough) and first.kind == "constant":
            continue  # it is one already
        if first is not None and all(first.same(other) for other in options):
            found = {other: r for other, r in found.items() if not inside(other, {name: r})}
            found[name] = first
    return found


def _unread(border: Borders, name: str, replaced: dict[str, Replacement]) -> Replacement | None:
    """Hand on the input as it is if nobody looks at its width, else zeros of the right width."""
    call, node = border.trace.calls[name], border.exit(name)
    op = border.ops.get(node) if node is not None else None
    if call.count != 1 or node is None or op is None or call.shape_in is None or not isinstance(op.out, Fact):
        return None
    if call.shape_in != call.shape_out and not _only_width_differs(call.shape_in, op):
        return None
    if not _keeps_positions(border, name):
        return None
    if _widthless(border, node, replaced):
        return Replacement("passthrough", outputs=call.outputs)
    return _by_channel("constant", torch.zeros((), dtype=torch.float64).expand(op.out.shape), call, op, border)


def _only_width_differs(shape: tuple[int, ...], op: Op | None) -> bool:
    """Whether an output has its input's shape but for one dimension, and channels along that one."""
    if op is None or not isinstance(op.out, Fact) or len(shape) != len(op.out.shape):
        return False
    differ = [d for d in range(len(shape)) if shape[d] != op.out.shape[d]]
    affine = op.memo.get("geometry")  # one channel has no labels, but an affine op says where its channels are
    if len(differ) != 1:
        return False
    return bool(op.out.along(differ[0])) or (affine is not None and affine.channel % len(shape) == differ[0])


def _widthless(border: Borders, node: fx.Node, replaced: dict[str, Replacement]) -> bool:
    """Whether all that reads a node works on any width: constants, what is passed through, elementwise functions."""
    for user in node.users:
        home = next((path for path in border.trace.paths[user] if path in replaced), None)
        if home is not None and replaced[home].kind == "constant":
            continue
        after = border.exit(home) if home is not None else user
        if after is None or (home is None and not _takes_any_width(user)):
            return False
        if not _widthless(border, after, replaced):
            return False
    return True


def _takes_any_width(node: fx.Node) -> bool:
    moves = ("aten.flatten", "aten.permute", "aten.transpose", "aten.unsqueeze", "aten.squeeze.dim", "aten.select")
    return isinstance(RULES.get(node.target), (Identity, Unary, Pool, Reduce)) or str(node.target).startswith(moves)


def _kept(name: str, ctx: Analysis) -> bool:
    return name in ctx.whole or any(within(name, kept) or within(kept, name) for kept in ctx.keep)


def _replacement(border: Borders, name: str, module: nn.Module) -> Replacement | None:
    call, node = border.trace.calls[name], border.exit(name)
    if call.count != 1 or node is None or call.shape_in is None or call.shape_out != tuple(node.meta["val"].shape):
        return None
    entry = border.entry(name)
    first = entry is not None and call.alone and tuple(entry.meta["val"].shape) == call.shape_in
    if entry is not None and first and type(module) is not nn.Sequential:
        shift = _shift(node, entry, border)
        if shift is not None:
            return _by_channel("shift", shift, call, border.ops[node], border)
    op = border.ops.get(node)
    if op is None or not isinstance(op.out, Fact) or not _keeps_positions(border, name):
        return None
    return _by_channel("constant", op.out.value, call, op, border)


def _keeps_positions(border: Borders, name: str) -> bool:
    """Whether as many positions come out as go in at every resolution: what strides down and up again may lose some."""
    for op in (border.ops[node] for node in border.inner.get(name, ()) if node in border.ops):
        x, steps = next(op.facts(), None), op.given.get("stride") or op.given.get("kernel_size") or ()
        if any(step > 1 for step in (steps if isinstance(steps, (list, tuple)) else [steps])):
            return False
        if not isinstance(RULES.get(op.node.target), (Convolution, Pad, Pool, Blocks)) or x is None:
            continue
        resized = any(out.shape[2:] != x.shape[2:] for out in op.outputs()) or op.given.get("output_size")
        if resized and any(size > 1 for out in op.outputs() for size in out.shape[2:]):
            return False
    return True


def _by_channel(kind: str, value: Tensor, call: ModuleCall, op: Op, border: Borders) -> Replacement | None:
    """A number for every channel, last or first, if the module keeps the other dimensions."""
    shape_in, out = call.shape_in, op.out
    if not isinstance(out, Fact) or shape_in is None:
        return None
    rank, affine = len(out.shape), op.memo.get("geometry")
    for dim in (-1, 1):
        if len(shape_in) != rank or rank < (1 if dim == -1 else 3):
            continue
        if shape_in != out.shape and not _only_width_differs(shape_in, op):
            continue
        if any(shape_in[d] != out.shape[d] for d in range(rank) if d != dim % rank):
            continue
        numbers = uniform(value, dim)
        if not bool(numbers.isnan().any()):
            if kind == "shift" and not bool(numbers.any()):
                return Replacement("passthrough", outputs=call.outputs)
            written = affine is not None and affine.channel % rank == dim % rank
            own = any(not bool(torch.isin(compact(layer), border.copies).any()) for layer in out.along(dim))
            if rank > 2 and not own and not written:
                continue  # these may be positions, of which there are others at another resolution
            return Replacement(kind, numbers.clone(), dim, _channel_labels(out, dim), call.outputs)
    return None


def _channel_labels(out: Fact, dim: int) -> Tensor | None:
    layers = [layer for layer in out.along(dim) if varying(layer) == (dim % len(out.shape),)]
    return compact(layers[0]).reshape(-1) if layers else None


def _shift(node: fx.Node, entry: fx.Node, border: Borders) -> Tensor | None:
    """The constant c if this node is entry + c."""
    total: Tensor | None = None
    while node is not entry:
        if isinstance(RULES.get(node.target), Identity):
            node = node.args[0]  # type: ignore[assignment]
            continue
        if not str(node.target).startswith(("aten.add.Tensor", "aten.add_.Tensor")) or node.kwargs.get("alpha", 1) != 1:
            return None
        sides = [(side, border.ops.get(side)) for side in node.args if isinstance(side, fx.Node)]
        values = [(side, op.out.value) for side, op in sides if op is not None and isinstance(op.out, Fact)]
        constant = [(side, value) for side, value in values if not bool(compact(value).isnan().any())]
        if len(constant) != 1 or len(sides) != 2:
            return None
        value = constant[0][1]
        if value.shape != node.meta["val"].shape:
            return None
        total = value if total is None else compact(total) + compact(value)
        node = next(side for side, _ in sides if side is not constant[0][0])
    return None if total is None else total.expand(tuple(entry.meta["val"].shape))
