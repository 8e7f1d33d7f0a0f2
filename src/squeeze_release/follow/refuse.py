"""The code of a module did not follow the new widths: it keeps more, step by step, until it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..analyse import Analysis, rule_of
from ..analyse.blocks import within
from ..facts import Fact, compact
from ..labels import Grid
from ..rules.shape import Move, Pieces

_LAST = 5  # the step at which nothing of a module goes
_ENOUGH = 3  # modules of a class that do not follow, to think the same of all of them


def refuse(ctx: Analysis, module: str, text: str) -> bool:
    """Let less go from a module; False if there is nothing left that could stay.

    From the third module of a class on, all of that class are refused with it: otherwise a deep model would be tried
    once for every layer.
    """
    every = dict(ctx.model.named_modules())
    kind = type(every.get(module))
    blamed = ctx.blamed.setdefault(kind, set())
    blamed.add(module)
    possible = _let_less_go(ctx, module, text)
    if len(blamed) >= _ENOUGH and not kind.__module__.startswith("torch.nn."):
        step = min(ctx.refused.get(module, 0), _LAST)
        for path in [path for path, other in every.items() if type(other) is kind]:
            while ctx.refused.get(path, 0) < step:
                _let_less_go(ctx, path, text)
    return possible


def _let_less_go(ctx: Analysis, module: str, text: str) -> bool:
    """Whole modules stay first. Then widths that were equal stay equal, if that lets some of them go; then only whole
    heads go; then equal widths stay equal all the same; then no heads go; then nothing of this module; then nothing."""
    swapped = {path for path in ctx.dead if within(path, module) or within(module, path)}
    if swapped - ctx.whole:
        ctx.whole |= swapped
        return True
    if _tie_more(ctx, module):
        return True
    step = ctx.refused[module] = ctx.refused.get(module, 0) + 1
    grids = [grid for grid in ctx.grids if grid.module == module]
    if step == 1 and any(grid.ragged and not grid.rigid for grid in grids):
        ctx.stiffened[module] = [grid for grid in grids if grid.ragged and not grid.rigid]
        for grid in ctx.stiffened[module]:
            grid.rigid = True
    elif step <= 3 and _tie_regardless(ctx, module, max(step, 2)):
        pass
    elif step <= 4 and grids:
        ctx.refused[module] = 4
        ctx.pins += [(grid.labels.unique(), module, text) for grid in grids]
    elif step <= _LAST:
        ctx.refused[module] = _LAST
        ctx.pins += [(compact(layer).unique(), module, text) for fact in _around(ctx, module) for layer in fact.layers]
    elif module:  # the fault is not there but in the code that calls it
        return refuse(ctx, _caller(ctx, module), text)
    elif step == _LAST + 1:
        ctx.pins.append((torch.arange(len(ctx.labels.parent)), module, text))
        ctx.whole |= {path for path, _ in ctx.model.named_modules()}
    return step <= _LAST + 1


def _tie_regardless(ctx: Analysis, module: str, first: int) -> bool:
    """Whole heads did not do. What the ties bind may have to stay, but the rest of the module need not stay with it."""
    for grid in ctx.stiffened.pop(module, ()):
        grid.rigid = False
    for level in range(first, len(_TIES) + 1):
        ctx.refused[module] = level
        ctx.tied[module] = 0 if level == 2 else level - 1
        if tie(ctx, module, level):
            return True
    return False


def _tie_more(ctx: Analysis, module: str) -> bool:
    """Tie widths of a module; of all of its class if it is not the first of them, for their code is the same."""
    kind = type(ctx.model.get_submodule(module))
    alike = [path for path, other in ctx.model.named_modules() if type(other) is kind]
    others = max((ctx.tied.get(path, 0) for path in alike if path != module), default=0)
    several = others > 0 and not kind.__module__.startswith("torch.nn.")
    level = max(ctx.tied.get(module, 0), others - 1) if several else ctx.tied.get(module, 0)
    while level < len(_TIES):
        level, before = level + 1, list(ctx.grids)
        if any([tie(ctx, path, level) for path in (alike if several else [module])]):
            live = ctx.settle()
            if not all(bool(live[grid.labels].all()) for grid in ctx.grids if not any(grid is old for old in before)):
                return True
            ctx.grids = before  # nothing would go any more: whole heads alone may do better
    return False


def tie(ctx: Analysis, module: str, level: int) -> bool:
    """Tie the widths of a module up to this level; whether that binds anything new."""
    start, ctx.tied[module] = ctx.tied.get(module, 0), max(level, ctx.tied.get(module, 0))
    return any([how(ctx, module) for how in _TIES[start:level]])


def _tie_heads(ctx: Analysis, module: str) -> bool:
    """Code such as `shape = (*x.shape[:-1], -1, self.head_dim)` takes the width of all its heads for one."""
    tables: dict[int, list[Grid]] = {}
    for grid in ctx.grids:
        if grid.module == module and grid.ragged and grid.outer is not None:
            tables.setdefault(grid.labels.size(1), []).append(grid)
    tied = False
    for grids in tables.values():
        table = torch.cat([grid.labels for grid in grids])
        outer = torch.cat([grid.outer for grid in grids if grid.outer is not None])
        if len(ctx.labels.find(table).unique(dim=0)) > len(grids[0].labels):
            ctx.grids.append(Grid(table, f"{module} (its code gives all heads one width)", outer, module=module))
            tied = True
    return tied


def _tie_laid_out(ctx: Analysis, module: str) -> bool:
    """Code such as `q, k, v = y.split(self.sizes)` in a loop takes widths that it lays out itself for one."""
    own = [op for op in ctx.ops if op.module == module and isinstance(rule_of(op), (Move, Pieces))]
    return _tie_widths(ctx, module, (fact for op in own for fact in op.outputs()))


def _tie_all(ctx: Analysis, module: str) -> bool:
    """Code such as `B, N, C = x.shape; ...; y.reshape(B, N, C)` takes the width of what comes in for another."""
    return _tie_widths(ctx, module, _around(ctx, module))


def _tie_widths(ctx: Analysis, module: str, facts: Iterable[Fact]) -> bool:
    """Of widths that were equal, equally many go."""
    widths: dict[int, dict[tuple[int, ...], Tensor]] = {}
    for fact in facts:
        for layer in fact.layers if fact.source != "param" else ():
            labels = compact(layer).reshape(-1)
            widths.setdefault(len(labels), {}).setdefault(tuple(ctx.labels.find(labels).tolist()), labels)
    tied, where = False, f"{module} (its code takes widths that were equal for one)"
    for rows in widths.values():
        # An order of its own makes no other width: heads side by side are the same channels as heads in a row.
        distinct = list({tuple(sorted(key)): row for key, row in rows.items()}.values())
        if len(distinct) > 1 and len(distinct[0]) > 1:
            together = ctx.labels.fresh(1).expand(len(distinct)).clone()
            ctx.grids.append(
                Grid(torch.stack(distinct), where, outer=together, module=f"{module} (widths that are one)")
            )
            tied = True
    return tied


_TIES = (_tie_heads, _tie_laid_out, _tie_all)


def _caller(ctx: Analysis, module: str) -> str:
    """The module whose code calls this one."""
    module = module.rpartition(".")[0]
    while module and type(ctx.model.get_submodule(module)).__module__ == "torch.nn.modules.container":
        module = module.rpartition(".")[0]
    return module


def _around(ctx: Analysis, module: str) -> Iterator[Fact]:
    """What the own code of a module reads and writes, and what comes into it."""
    by_node = {op.node: op for op in ctx.ops}
    for op in ctx.ops:
        if op.module == module:
            yield from op.facts()
            yield from op.outputs()
        elif module and within(op.module, module):
            for node in op.node.all_input_nodes:
                if node in by_node and not within(op.trace.module_of(node), module):
                    yield from by_node[node].outputs()
