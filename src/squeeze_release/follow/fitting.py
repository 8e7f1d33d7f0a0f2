"""Does the user's code follow the new widths?

Many widths in user code are derived from shapes and follow by themselves. Others are attributes (`num_heads`), which
are set on the copy. Whether everything followed is seen by tracing the narrowed model: every op must have the shape
that the plan predicts. Where it does not, the module at fault keeps its channels, with that reason.

Shapes are all that counts here, so the trial is a hollow copy that holds no weights: a trace never depends on theirs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from ..analyse import Analysis, rule_of, widths
from ..analyse.blocks import read_nodes
from ..copies import borrowed, emptied, hollow
from ..errors import ExportError, InputError
from ..facts import Fact
from ..labels import Live
from ..plan import Plan, make_plan
from ..rehearse import Call, Rehearsal
from ..rewrite import rewrite
from ..rules import RULES, Op, flat
from ..rules.affine import Affine
from ..rules.elementwise import Identity
from ..rules.groupnorm import GroupNorm
from ..rules.index import SliceScatter
from ..rules.shape import Move, Pieces
from ..trace import Trace, named_arguments, rehearse, trace
from .attributes import Key, Option, Slot, chosen, others, wishes
from .refuse import refuse, tie
from .scales import make_good

_MOST_TRIALS = 16
_TAKE_WIDTHS = (Move, Pieces, Affine, GroupNorm, SliceScatter)  # ops whose int arguments follow the widths


@dataclass(frozen=True)
class Problem:
    module: str
    text: str
    progress: tuple[int, int] = (2, 0)  # how far the code got: calls of modules, or ops that are as predicted


@dataclass(frozen=True)
class Fit:
    """A plan, what it saves, and the traces of the narrowed model."""

    plan: Plan
    live: Live
    saved: int  # parameters
    traces: list[Trace]


@dataclass
class Memory:
    """What trials taught about the user's code, for the next look at the narrowed model."""

    liked: dict[Key, tuple[Slot | None, ...]] = field(default_factory=dict)  # which attributes follow which widths
    tied: dict[str, int] = field(default_factory=dict)  # modules whose code takes several widths for one
    _tried: set[object] = field(default_factory=set)
    _rehearsed: bool | None = None

    def rehearsed(self, model: nn.Module, calls: list[Call]) -> bool:
        """Whether trials go to the CPU first; the first model tells for all that come of it."""
        if self._rehearsed is None:
            self._rehearsed = Rehearsal(model, calls).ready
        return self._rehearsed

    def like(self, picked: dict[Key, Option]) -> None:
        """These options got the code further: they come first from now on."""
        self.liked.update({key: option.slots for key, option in picked.items()})

    def is_new(self, ctx: Analysis, problem: Problem, what: object) -> bool:
        """Whether this was not tried yet for a problem of that class; now it is."""
        kind = type(ctx.model.get_submodule(problem.module))
        key = (kind, ctx.tied.get(problem.module), ctx.refused.get(problem.module), repr(what))
        new = key not in self._tried
        self._tried.add(key)
        return new


def fit(ctx: Analysis, calls: list[Call], memory: Memory) -> Fit:
    """The largest plan that the user's code follows."""
    ctx.rehearsed = memory.rehearsed(ctx.model, calls)
    for path, level in memory.tied.items():
        tie(ctx, path, level)
    while True:
        live = ctx.settle()
        plan = make_plan(ctx, live)
        if plan.empty:
            return Fit(plan, live, 0, [])
        found = _search(ctx, live, plan, calls, memory)
        if isinstance(found, Fit):
            memory.tied = ctx.tied
            return found
        if not refuse(ctx, found.module, found.text):
            return Fit(Plan(), live, 0, [])  # everything stays, for that reason


def _search(ctx: Analysis, live: Live, plan: Plan, calls: list[Call], memory: Memory) -> Problem | Fit:
    """Set the attributes that look like a width which changed, so that the code gets as far as it can."""
    every = wishes(ctx, live, memory.liked)
    picked, left = {key: options[0] for key, options in every.items()}, _MOST_TRIALS

    def tried(picks: dict[Key, Option], *, real: bool = False) -> Problem | Fit:
        plan.attributes = chosen(ctx, live, picks)
        return attempt(ctx, live, plan, calls, real=real)

    best, stuck = tried(picked), False
    while isinstance(best, Problem) and not stuck:
        stuck = True
        for change in others(every, picked, best.module):
            if left and memory.is_new(ctx, best, [(key, option.slots) for key, option in change.items()]):
                left -= 1
                found = tried(picked | change)
                if isinstance(found, Fit) or found.progress > best.progress:
                    best, picked, stuck = found, picked | change, False
                    memory.like(change)  # also where a later problem makes the analysis let less go
                    break
    if isinstance(best, Problem) and memory.is_new(ctx, best, "real weights"):
        best = tried(picked, real=True)
    if isinstance(best, Fit):
        memory.like(picked)
    return best


def attempt(ctx: Analysis, live: Live, plan: Plan, calls: list[Call], *, real: bool = False) -> Problem | Fit:
    """Carry out a plan on a copy and look. A hollow one does, but where it gives trouble."""
    if real:
        with borrowed(ctx.model) as copy:
            model = rewrite(copy, plan)
            found = check(ctx, live, plan, model, calls)
            saved = _size(ctx.model) - _size(model)
    else:
        model = emptied(rewrite(hollow(ctx.model), plan))
        found = check(ctx, live, plan, model, calls)
        saved = _size(ctx.model) - _size(model)
    return found if isinstance(found, Problem) else Fit(plan, live, saved, found)


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check(ctx: Analysis, live: Live, plan: Plan, model: nn.Module, calls: list[Call]) -> Problem | list[Trace]:
    """Trace the narrowed model and compare every op with the prediction."""
    traces = []
    plan.forget_made_good()
    old_traces = list(dict.fromkeys(op.trace for op in ctx.ops))
    for old, call in zip(old_traces, calls, strict=True):
        try:
            if ctx.rehearsed:
                rehearse(model, call)
            new = trace(model, call)
        except InputError as error:
            text = f"its code does not follow the new widths ({error.what})"
            return Problem(error.module, text, (0, error.progress))
        except ExportError as error:
            return Problem("", f"the narrowed model cannot be traced ({error.what})", (1, 0))
        problem = _compare(ctx, live, plan, old, new)
        if problem is not None:
            return problem
        traces.append(new)
    return traces


def _compare(ctx: Analysis, live: Live, plan: Plan, old: Trace, new: Trace) -> Problem | None:
    by_node = {op.node: op for op in ctx.ops}
    before = [node for node in _plain(old, plan) if not _cuts_nothing(by_node.get(node), live)]
    after = [node for node in _plain(new, plan) if not _is_whole(node)]
    if len(after) < len(before):  # torch.export may leave out what nobody reads any more
        read = read_nodes(old, plan.dead) | read_nodes(new, {})
        before, after = ([node for node in nodes if node in read] for nodes in (before, after))
    if len(after) < len(before):
        idle = _copies_once(by_node, live)
        before = [node for node in before if node not in idle]
    for i, (was, now) in enumerate(itertools.zip_longest(before, after)):
        place = old.module_of(was) if was is not None else new.module_of(now)
        if was is None or now is None or was.target != now.target:
            return Problem(place, "its code takes another path at the new widths", (2, i))
        if by_node.get(was) not in ctx.wanted:
            continue  # nobody reads its numbers
        text = _differs(by_node[was], now, live)
        same = text is not None or _numbers(was, old) == _numbers(now, new, plan.rescaled.get(place))
        if not same and not make_good(ctx, by_node, by_node[was], now, live, plan):
            text = f"a number in its code depends on a width: {_short(was)}"
        if text is not None:
            return Problem(place, text, (2, i))
    if _shapes(old.nodes[-1]) != _shapes(new.nodes[-1]):
        return Problem("", "an output of the model would change its shape", (2, len(before)))
    return None


def _differs(op: Op, now: fx.Node, live: Live) -> str | None:
    """What of an op of the narrowed model is not as the plan predicts."""
    want = [widths(fact, live) for fact in flat(op.out)]
    have = [tuple(int(s) for s in value.shape) for value in _tensors(now.meta.get("val"))]
    if want and want != have and 0 not in want[0]:
        return f"its code fixes a width: {_short(op.node)} gives {have} where {want} was planned"
    if _start(op.node) is not None and _start(now) != _moved_start(op, live):
        return f"its code fixes where a slice begins: {_short(op.node)}"
    if isinstance(rule := rule_of(op), GroupNorm) and now.args[1] != rule.groups_left(op, live):
        return f"its code fixes a number of groups: {_short(op.node)}"
    return None


def _cuts_nothing(op: Op | None, live: Live) -> bool:
    """A slice that covers everything at the new width: torch.export leaves it out."""
    if op is None or not op.name.startswith(("aten.slice.", "aten.alias.")) or not isinstance(op.out, Fact):
        return False
    return widths(op.out, live) == widths(next(op.facts()), live)


def _copies_once(by_node: dict[fx.Node, Op], live: Live) -> set[fx.Node]:
    """Ops that lay copies of heads side by side, where one copy is left: code may well leave them out then."""
    idle: set[fx.Node] = set()
    for node, op in by_node.items():
        copies = op.memo.get("copies")
        if copies and all(int(live[labels].sum()) == 1 for labels in copies):
            idle |= _round_trip(node, by_node, live)
    return idle


def _round_trip(node: fx.Node, by_node: dict[fx.Node, Op], live: Live) -> set[fx.Node]:
    """The shape ops around a node, from one tensor to the next with the same shape; nothing where there is none."""

    def shape(at: Any) -> tuple[int, ...] | None:
        out = by_node[at].out if at in by_node else None
        return widths(out, live) if isinstance(out, Fact) else None

    chain = [node]
    while isinstance(first := chain[0].args[0], fx.Node) and _unsqueezes(first) and len(first.users) == 1:
        chain.insert(0, first)
    while shape(chain[-1]) != shape(chain[0].args[0]):
        (user, *others) = chain[-1].users or (node,)
        if others or user is node or user not in by_node or not isinstance(rule_of(by_node[user]), (Move, Identity)):
            return set()
        chain.append(user)
    return set(chain)


def _unsqueezes(node: fx.Node) -> bool:
    return str(node.target).startswith(("aten.unsqueeze.", "aten.slice.", "aten.alias."))


def _is_whole(node: fx.Node) -> bool:
    """The same for a node of the new trace, where it may be an alias."""
    if str(node.target) == "aten.alias.default":
        return True
    if not str(node.target).startswith("aten.slice."):
        return False
    return bool(node.meta["val"].shape == node.args[0].meta["val"].shape)  # type: ignore[union-attr]


def _shapes(output: fx.Node) -> list[tuple[int, ...]]:
    return [
        tuple(int(s) for s in value.shape)
        for node in output.all_input_nodes
        for value in _tensors(node.meta.get("val"))
    ]


def _plain(trace: Trace, plan: Plan) -> list[fx.Node]:
    """The ops outside the modules that were swapped for others, and without those that only touch memory.

    Whether a tensor is laid out anew may depend on its widths: one head is contiguous as it is.
    """
    swapped = {**plan.dead, **dict.fromkeys(plan.heads), **dict.fromkeys(plan.indices)}
    return [
        node
        for node in trace.nodes
        if node.op == "call_function"
        and not str(node.target).startswith(("aten.contiguous.", "aten.clone."))
        and not set(trace.paths[node]) & set(swapped)
        and trace.module_of(node) not in swapped
    ]


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [value] if hasattr(value, "shape") else []


def _numbers(node: fx.Node, trace: Trace, rescaled: tuple[float, float] | None = None) -> list[object]:
    """What an op computes with beside its tensors: floats, ints that are no widths, and tensors made in the code."""
    if "squeeze_release" in str(node.target):  # statistics of a norm change on purpose
        return []
    kinds = (float,) if isinstance(RULES.get(node.target), _TAKE_WIDTHS) else (int, float)
    numbers: list[object] = []
    for a in (*node.args, *node.kwargs.values()):
        if isinstance(a, fx.Node) and a.name in trace.constants:
            numbers.append(trace.constants[a.name].tolist())
        elif isinstance(a, kinds) and not isinstance(a, bool):
            numbers.append(rescaled[0] if rescaled and abs(a - rescaled[1]) < 1e-12 else a)
    return numbers


def _start(node: fx.Node) -> int | None:
    """Where a slice, narrow or select begins."""
    if not _short(node).startswith(("aten.slice.", "aten.slice_scatter", "aten.select.", "aten.narrow")):
        return None
    given = named_arguments(node)
    size = node.args[0].meta["val"].shape[given["dim"]]  # type: ignore[union-attr]
    start = given.get("start") if "start" in given else given["index"]
    start = 0 if start is None else int(start)
    return max(0, min(start + int(size) if start < 0 else start, int(size)))


def _moved_start(op: Op, live: Live) -> int:
    """Where it has to begin once dead channels in front of it are gone."""
    start, x = _start(op.node) or 0, next(op.facts())
    for layer in x.along(op.given["dim"]):
        rows = live[layer.movedim(op.given["dim"], 0).reshape(layer.size(op.given["dim"]), -1)[:start]]
        return int(rows.sum(0).max()) if start else 0
    return start


def _short(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")
