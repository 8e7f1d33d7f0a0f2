"""Biases that are put together from several parameters: `F.linear(x, weight, torch.cat((q_bias, k_bias, v_bias)))`.

What a bias would take is taken by its pieces, each its own rows. A buffer that is not saved with the model (BEiT's
`k_bias`, which is 0) takes nothing; but where its rows are the keys of an attention and nothing else, nothing is lost:
q (k + d) = q k + q d, which is the same for all keys, and the softmax cancels it.

Exact: a concat of biases is a bias, row by row.
Keeps: constants, where a piece is read by anyone else or stands twice, or where one that is not saved counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from ..facts import Fact, compact
from ..trace import named_arguments
from .shape import origin

if TYPE_CHECKING:
    from ..analyse import Analysis
    from .base import Op


@dataclass(frozen=True)
class Piece:
    """Rows of a bias that a parameter or buffer of their own holds; without a name, rows whose bias does not matter."""

    name: str | None
    rows: slice


def pieces(op: Op, ctx: Analysis) -> list[Piece] | None:
    """What a joined bias is made of, if all of it may change; None if there is a piece that may not."""
    if "pieces" not in op.memo:
        op.memo["pieces"] = _pieces(op, ctx)
    found: list[Piece] | None = op.memo["pieces"]
    return found


def _pieces(op: Op, ctx: Analysis) -> list[Piece] | None:
    readers, labels = ctx.readers_of(op.memo["weight"]), op.memo.get("rows")
    names = _joined(op)
    if names is None or len(set(names)) < len(names) or labels is None:
        return None
    if any(reader.param("weight") != op.memo["weight"] or _joined(reader) != names for reader in readers):
        return None
    cats = {named_arguments(reader.node)["bias"] for reader in readers}
    if not {user for cat in cats for user in cat.users} <= {reader.node for reader in readers}:
        return None
    found, start = [], 0
    for name in names:
        if not ctx.uses_of(name) <= cats:
            return None
        rows = slice(start, start := start + ctx.tensor(name).numel())
        if not ctx.is_saved(name) and not _cancels(op, labels[rows], ctx):
            return None
        found.append(Piece(name if ctx.is_saved(name) else None, rows))
    return found


def _joined(op: Op) -> list[str] | None:
    """The parameters and buffers that a concat makes the bias from."""
    cat = named_arguments(op.node).get("bias")
    if not isinstance(cat, fx.Node) or str(cat.target) != "aten.cat.default" or len(cat.meta["val"].shape) != 1:
        return None
    names = [op.trace.params.get(str(node)) for node in cat.args[0]]  # type: ignore[union-attr]
    return None if None in names else names  # type: ignore[return-value]


def _cancels(op: Op, rows: Tensor, ctx: Analysis) -> bool:
    """Whether these rows are the keys of attentions, all of them, and nothing else."""
    readers, writers = ctx.sole_readers(rows), {call.node for call in ctx.readers_of(op.memo["weight"])}
    return readers is not None and all(
        reader.name == "aten.scaled_dot_product_attention.default"
        and origin(named_arguments(reader.node)["key"]) in writers
        and not any(_holds(reader.given.get(other), rows) for other in ("query", "value", "attn_mask"))
        for reader in readers
    )


def _holds(fact: object, rows: Tensor) -> bool:
    layers = fact.layers if isinstance(fact, Fact) else ()
    return any(bool(torch.isin(compact(layer), rows).any()) for layer in layers)
