"""Which attributes of the user's modules hold widths, and what they become.

`num_heads` is what some reshape in the code of its module lays out. Which one is found by comparing all modules of a
class: an attribute follows a *slot* (this dimension of that op) only if it has the slot's old value in every one of
them. A stride of 4 has the value of 4 heads in one stage, but not in the next.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import modules
from ..analyse import Analysis, rule_of, widths
from ..analyse.blocks import inside, within
from ..labels import Live
from ..rules import Op
from ..rules.attention import Attention
from ..rules.shape import Move, Pieces
from .register import named_attributes, registered

# `layer_idx` and `q_stride` are no widths: another value only if nothing else will do
_WORDS = frozenset(
    "idx index id layer layers depth block blocks stage step seed stride window kernel patch padding dilation".split()
)

Number = int | tuple[int, ...] | list[int]
Slot = tuple[str, int, int, int]  # written or read, by which op of the module's own code, which tensor, which dimension
Widths = dict[Slot, tuple[int, int]]  # before and after
Key = tuple[type, tuple[str, ...], str]  # a class, the shape ops of its code, the name of an attribute


@dataclass(frozen=True)
class Option:
    """What an attribute becomes in every module of its class if it follows one slot, or none."""

    slots: tuple[Slot | None, ...]
    values: Mapping[str, Number]  # module -> value


Wishes = dict[Key, list[Option]]


def wishes(ctx: Analysis, live: Live, liked: Mapping[Key, tuple[Slot | None, ...]]) -> Wishes:
    """For every attribute that may be a width which changed: what it may become, the likeliest first.

    `liked` are the slots that proved right before.
    """
    found: Wishes = {}
    for (kind, code), places in _alike(ctx, live).items():
        modules = {path: _attributes(ctx, path) for path in places}
        for name in dict.fromkeys(itertools.chain.from_iterable(modules.values())):
            values = {path: module[name] for path, module in modules.items() if name in module}
            options = _options(name, values, places)
            if len(options) > 1:
                before = liked.get((kind, code, name))
                found[kind, code, name] = sorted(options, key=lambda option: option.slots != before)
    return found


def chosen(ctx: Analysis, live: Live, picked: Mapping[Key, Option]) -> dict[str, dict[str, Number]]:
    """The attributes to set, module by module: those that users named, and those that follow an option."""
    result: dict[str, dict[str, Number]] = {path: {**named} for path, named in named_attributes(ctx, live).items()}
    for (_, _, name), option in picked.items():
        for path, value in option.values.items():
            if value != operator.attrgetter(name)(ctx.model.get_submodule(path)):
                owner, _, attribute = f"{path}.{name}".rpartition(".")
                result.setdefault(owner.lstrip("."), {})[attribute] = value
    return result


def _attributes(ctx: Analysis, path: str) -> dict[str, Any]:
    """A module's own attributes, and those of modules that it holds and never calls: their methods are its code."""
    module, traces = ctx.model.get_submodule(path), {op.trace for op in ctx.ops[:1] + ctx.ops[-1:]}
    found = dict(vars(module))
    for name, child in module.named_children():
        below = f"{path}.{name}".lstrip(".")
        if not any(trace.calls[below].count for trace in traces if below in trace.calls):
            found |= {f"{name}.{attribute}": value for attribute, value in vars(child).items()}
    return found


def others(wishes: Wishes, picked: Mapping[Key, Option], module: str) -> Iterator[dict[Key, Option]]:
    """Changes of what may have to do with a failure in a module, one of them changed, then two."""
    caller = module.rpartition(".")[0]
    near = {
        key: [option for option in options if option is not picked[key]]
        for key, options in wishes.items()
        if any(within(path, caller) or within(module, path) for path in options[0].values)
    }
    # What is at fault itself first, then what is around it.
    order = sorted(near, key=lambda key: module not in wishes[key][0].values)
    for flips in (1, 2):
        for which in itertools.combinations(order, flips):
            for options in itertools.product(*(near[key] for key in which)):
                yield dict(zip(which, options, strict=True))


def follows_parameters(module: nn.Module) -> bool:
    """Layers of torch and of this package: `rewrite` sets their numbers together with their parameters."""
    return type(module).__module__.startswith(("torch.nn.", f"{modules.__name__}."))


def _alike(ctx: Analysis, live: Live) -> dict[tuple[type, tuple[str, ...]], dict[str, Widths]]:
    """The widths in the code of modules, by class; those of a class whose code took another path stand apart."""
    ops: dict[str, list[Op]] = {}
    for op in ctx.ops:
        if isinstance(rule_of(op), (Move, Pieces, Attention)) and not inside(op.module, ctx.dead):
            ops.setdefault(op.module, []).append(op)
    found: dict[tuple[type, tuple[str, ...]], dict[str, Widths]] = {}
    for path, mine in ops.items():
        module = ctx.model.get_submodule(path)
        if not follows_parameters(module) and registered(module) is None:
            # The same ops on more dimensions are other code: windows of tokens, or all of them.
            code = tuple(f"{op.name} {[len(fact.shape) for fact in op.outputs()]}" for op in mine)
            found.setdefault((type(module), code), {})[path] = _widths(mine, live)
    return found


def _widths(ops: list[Op], live: Live) -> Widths:
    found: Widths = {}
    for i, op in enumerate(ops):
        rule = rule_of(op)
        if isinstance(rule, Attention):  # other paths of the same code repeat each key head so often
            found |= {("written", i, j, 0): pair for j, pair in enumerate(rule.repeats(op, live))}
            continue
        for way, facts in (("written", op.outputs()), ("read", op.facts())):
            for j, fact in enumerate(facts):
                pairs = zip(fact.shape, widths(fact, live), strict=True)
                found |= {(way, i, j, d): pair for d, pair in enumerate(pairs)}
    return found


def _options(name: str, values: dict[str, Any], places: dict[str, Widths]) -> list[Option]:
    """One that has the value of a width that the module's code lays out mostly is that width. One that has the value of
    a width that it takes apart (`dim - partial_dim`), or that is a shape, is tried only if nothing else will do.
    """
    stay = Option((None,), values)
    first = next(iter(values.values()))
    if isinstance(first, (tuple, list)) and all(_is_shape(value, first) for value in values.values()):
        parts = [_follow({path: value[i] for path, value in values.items()}, places) for i in range(len(first))]
        slots = tuple(next((slot for slot, _ in part), None) for part in parts)
        moved = {
            path: type(first)(part[0][1][path] if part else value[i] for i, part in enumerate(parts))
            for path, value in values.items()
        }
        return [stay, Option(slots, moved)] if moved != values else [stay]
    if any(type(value) is not int for value in values.values()):
        return [stay]
    options = {way: [Option((slot,), new) for slot, new in _follow(values, places, way)] for way in ("written", "read")}
    if options["written"] and not _WORDS & set(name.split("_")):
        return [*options["written"], stay]
    return [stay, *(options["written"] or options["read"])]


def _is_shape(value: Any, like: Any) -> bool:
    return type(value) is type(like) in (tuple, list) and len(value) == len(like) and {*map(type, value)} == {int}


def _follow(
    values: dict[str, int], places: dict[str, Widths], way: str = "written"
) -> list[tuple[Slot, dict[str, int]]]:
    """The slots that have these values before, in every module, and others after: each outcome once."""
    found: list[tuple[Slot, dict[str, int]]] = []
    for slot in places[next(iter(values))]:
        if slot[0] == way and all(places[path].get(slot, (None,))[0] == value for path, value in values.items()):
            after = {path: places[path][slot][1] for path in values}
            if after != values and all(after != other for _, other in found):
                found.append((slot, after))
    return found
