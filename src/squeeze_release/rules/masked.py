"""Attention masks that are known: made in the code, or looked up in tables of the model (relative positions).

A row that is masked throughout gives 0 in fused attention, and no softmax that sums to 1.

Exact: where every row of the mask has a finite entry, and so have those that another size would look up: tables are
finite, and nothing but lookups, sums, products and bounded functions lies between them and the mask.
Keeps: constant values under any other mask, one that comes in from outside above all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..trace import named_arguments
from .base import RULES, Op
from .elementwise import Identity
from .index import Embedding, Index, IndexSelect
from .shape import Cat, Move, Pieces, Stack, Turn

if TYPE_CHECKING:
    from ..analyse import Analysis

# Finite where their inputs are. A table that reached a mask through any other op might be infinite at places that the
# example does not look up.
_FINITE_RULES = (Identity, Index, Embedding, IndexSelect, Move, Pieces, Cat, Stack, Turn)
_FINITE_OPS = """add sub mul linear relu gelu silu sigmoid tanh hardtanh relu6 masked_fill where layer_norm
rms_norm""".split()


def leaves_every_query_a_key(op: Op, ctx: Analysis) -> bool:
    """Whether the mask is made from nothing that comes in, and masks no row throughout."""
    node = named_arguments(op.node)["attn_mask"]
    mask = known_numbers(op, ctx, node)
    if mask is None:
        return False
    dtype = node.meta["val"].dtype
    open_ = mask if dtype == torch.bool else mask > torch.finfo(dtype).min / 2
    return bool(open_.any(-1).all())


def known_numbers(op: Op, ctx: Analysis, node: fx.Node) -> Tensor | None:
    """The numbers of a tensor that the code makes, and that depends on no input; None if it does."""
    done: dict[fx.Node, Any] = {}
    looked_up: set[fx.Node] = set()  # what depends on a table
    todo = [node]
    while todo:
        here = todo[-1]
        if here.op == "placeholder":
            table = _table(op, ctx, here)
            if table is None:
                return None
            done[todo.pop()] = table
            looked_up.add(here)
            continue
        missing = [source for source in here.all_input_nodes if source not in done]
        if here.op != "call_function" or not _runs(here):
            return None
        if missing:
            todo += missing
            continue
        if looked_up & set(here.all_input_nodes):
            looked_up.add(here)
            if not _stays_finite(here):
                return None
        args, kwargs = fx.node.map_arg((here.args, here.kwargs), done.__getitem__)
        done[todo.pop()] = here.target(*args, **kwargs)  # type: ignore[operator]
    result: Tensor = done[node]
    return result


def _table(op: Op, ctx: Analysis, node: fx.Node) -> Tensor | None:
    """A parameter or buffer that holds indices, or numbers none of which masks."""
    name = op.trace.params.get(node.name)
    if name is None or node.meta["val"].dtype == torch.bool:
        return None
    numbers, dtype = ctx.tensor(name), node.meta["val"].dtype
    if dtype.is_floating_point and not bool((numbers.abs() < torch.finfo(dtype).max / 2).all()):
        return None
    return numbers.to(dtype)


def _runs(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) or node.target.__name__ == "getitem"  # type: ignore[union-attr]


def _stays_finite(node: fx.Node) -> bool:
    short = str(node.target).split(".")
    if short[0] == "aten" and short[1].rstrip("_") in _FINITE_OPS:
        return True
    return isinstance(RULES.get(node.target), _FINITE_RULES) or not isinstance(node.target, torch._ops.OpOverload)
