"""Does the user's code follow the new widths?

Many widths in user code are derived from shapes and follow by themselves. Others are attributes (`num_heads`), which
are set on the copy. Whether everything followed is seen by tracing the narrowed model: every op must have the shape that
the plan predicts. Where it does not, the module at fault keeps its channels, with that reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from .analyse import Analysis, rule_of, widths
from .blocks import inside
from .errors import ExportError, InputError
from .labels import Live
from .plan import Plan, make_plan
from .rules import Op, flat
from .rules.shape import Move, Pieces
from .trace import Trace, named_arguments, trace
from .verify import Call

_MOST_CHOICES = 16


@dataclass(frozen=True)
class Problem:
    module: str
    text: str


Wishes = dict[tuple[type, str, int], list[int]]  # class, attribute, value -> the values it may have to take


def fit(ctx: Analysis, calls: list[Call], build: Callable[[Plan], nn.Module]) -> tuple[nn.Module, Plan, Live]:
    """The largest plan that the user's code follows, and the narrowed model."""
    while True:
        live = ctx.settle()
        plan = make_plan(ctx, live)
        problem: Problem | None = None
        for attributes in choices(ctx, live):
            plan.attributes = attributes
            model = build(plan)
            found = check(ctx, live, plan, model, calls)
            if found is None:
                return model, plan, live
            problem = problem or found
        assert problem is not None
        if not ctx.refuse(problem.module, problem.text):
            raise ExportError(
                f"the code of the model does not follow its own widths: {problem.text}", where=problem.module or "the model",
                consequence="nothing was changed", remedy="name the module in keep=, and report this model")


def choices(ctx: Analysis, live: Live) -> Iterator[dict[str, dict[str, int]]]:
    """Ways to set the int attributes that look like a width which changed, the likeliest first."""
    wishes, places = _wishes(ctx, live)
    keys = sorted(wishes, key=str)
    for picked in itertools.islice(itertools.product(*(wishes[key] for key in keys)), _MOST_CHOICES):
        chosen = dict(zip(keys, picked, strict=True))
        result: dict[str, dict[str, int]] = {}
        for path, attribute, key in places:
            value = chosen[key]
            if isinstance(value, int) and value != key[2]:
                result.setdefault(path, {})[attribute] = value
            elif isinstance(value, dict) and value.get(path, key[2]) != key[2]:
                result.setdefault(path, {})[attribute] = value[path]
        yield result


def _wishes(ctx: Analysis, live: Live) -> tuple[dict[Any, list[Any]], list[tuple[str, str, Any]]]:
    """For every int attribute with the value of a width that changed: what that width became, module by module.

    A choice is made once for all modules of a class: "this attribute follows the n-th width that had its value".
    """
    seen: dict[str, dict[int, list[int]]] = {}
    for op in ctx.ops:
        if inside(op.module, ctx.dead) or not isinstance(rule_of(op), (Move, Pieces)):
            continue
        for fact in op.outputs():
            for old, new in zip(fact.shape, widths(fact, live), strict=True):
                values = seen.setdefault(op.module, {}).setdefault(old, [])
                if new not in values:
                    values.append(new)
    options: dict[Any, list[Any]] = {}
    places: list[tuple[str, str, Any]] = []
    for path, changed in seen.items():
        module = ctx.model.get_submodule(path)
        if type(module).__module__.startswith("torch.nn."):
            continue
        for attribute, value in vars(module).items():
            if type(value) is not int or changed.get(value, [value]) == [value]:
                continue
            key = (type(module), attribute, value)
            places.append((path, attribute, key))
            # The changed value first: an attribute that has the value of a width mostly is that width.
            ranked = sorted(changed[value], key=lambda new, old=value: new == old)
            known = options.setdefault(key, [{} for _ in ranked])
            while len(known) < len(ranked):
                known.append(dict(known[-1]))
            for i, choice in enumerate(known):
                choice[path] = ranked[min(i, len(ranked) - 1)]
    return options, places


def check(ctx: Analysis, live: Live, plan: Plan, model: nn.Module, calls: list[Call]) -> Problem | None:
    """Trace the narrowed model and compare every op with the prediction."""
    old_traces = list(dict.fromkeys(op.trace for op in ctx.ops))
    for old, call in zip(old_traces, calls, strict=True):
        try:
            new = trace(model, call)
        except InputError as error:
            return Problem(error.module, f"its code does not follow the new widths ({error.what})")
        except ExportError as error:
            return Problem("", f"the narrowed model cannot be traced ({error.what})")
        problem = _compare(ctx, live, plan, old, new)
        if problem is not None:
            return problem
    return None


def _compare(ctx: Analysis, live: Live, plan: Plan, old: Trace, new: Trace) -> Problem | None:
    by_node = {op.node: op for op in ctx.ops}
    facts = {op.node: op.out for op in ctx.ops}
    before, after = _plain(old, plan), _plain(new, plan)
    for was, now in itertools.zip_longest(before, after):
        place = old.module_of(was) if was is not None else new.module_of(now)
        if was is None or now is None or was.target != now.target:
            return Problem(place, "its code takes another path at the new widths")
        want = [widths(fact, live) for fact in flat(facts.get(was))]
        have = [tuple(int(s) for s in value.shape) for value in _tensors(now.meta.get("val"))]
        if want and want != have:
            return Problem(place, f"its code fixes a width: {_short(was)} gives {have} where {want} was planned")
        if _start(was) is not None and _start(now) != _moved_start(by_node[was], live):
            return Problem(place, f"its code fixes where a slice begins: {_short(was)}")
        if place not in plan.rescaled and _floats(was) != _floats(now):
            return Problem(place, f"a number in its code depends on a width: {_short(was)}")
    return None


def _plain(trace: Trace, plan: Plan) -> list[fx.Node]:
    """The ops outside the modules that were swapped for others."""
    swapped = {**plan.dead, **dict.fromkeys(plan.heads), **dict.fromkeys(plan.indices)}
    return [node for node in trace.nodes if node.op == "call_function" and not set(trace.paths[node]) & set(swapped)
            and trace.module_of(node) not in swapped]


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [value] if hasattr(value, "shape") else []


def _floats(node: fx.Node) -> list[float]:
    return [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)] if "squeeze_release" not in str(node.target) else []


def _start(node: fx.Node) -> int | None:
    """Where a slice, narrow or select begins."""
    if not _short(node).startswith(("aten.slice.", "aten.select.", "aten.narrow")):
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
        rows = live[layer.movedim(op.given["dim"], 0).flatten(1)[:start]]
        return int(rows.sum(0).max()) if start else 0
    return start


def _short(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")

