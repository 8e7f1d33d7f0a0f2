"""A softmax scale that the code takes from a width: made good in the rows of the layer that writes the queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from ..analyse import Analysis, widths
from ..analyse.readers import HANDS_ON
from ..facts import Fact, compact
from ..labels import Live
from ..plan import Plan
from ..rules import RULES, Op
from ..rules.elementwise import Identity
from ..rules.matmul import Matmul


def make_good(ctx: Analysis, by_node: dict[fx.Node, Op], op: Op, now: fx.Node, live: Live, plan: Plan) -> bool:
    """Whether `q * D**-0.5` or `q @ k.T / D**0.5` that became D' can be what it was: scale the rows of q.

    (s / s') W x times s' is W x times s. Exact where nothing but this product reads these rows, in whatever shape.
    """
    reader = _product(op, by_node)
    q = next(reader.facts(), None) if reader is not None else None
    if reader is None or q is None or not q.shape or not q.along(-1):
        return False
    before, after = q.shape[-1], widths(q, live)[-1]
    if not _is_scale(op.node, before) or not _is_scale(now, after):
        return False
    rows = compact(q.along(-1)[0]).unique()
    if not _reads_alone(ctx, reader, rows, by_node):
        return False
    return plan.make_good(ctx, rows, (after / before) ** 0.5)


def _is_scale(node: fx.Node, width: int) -> bool:
    """Whether a node multiplies with D^-1/2 or divides by D^1/2."""
    kind, scale = str(node.target), node.args[1] if len(node.args) == 2 and not node.kwargs else None
    power = -0.5 if kind.startswith("aten.mul.") else 0.5 if kind.startswith("aten.div.") else 0.0
    return power != 0.0 and isinstance(scale, float) and abs(scale / width**power - 1) < 1e-12


def _product(op: Op, by_node: dict[fx.Node, Op]) -> Op | None:
    """The op that reads the queries: the scores that are scaled here and read by nobody else, or else this op."""
    node = op.node.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1 and isinstance(RULES.get(node.target), Identity):
        node = node.args[0]
    if isinstance(node, fx.Node) and isinstance(RULES.get(node.target), Matmul):
        return by_node[node] if len(node.users) == 1 else None
    return op


def _reads_alone(ctx: Analysis, reader: Op, rows: Tensor, by_node: dict[fx.Node, Op]) -> bool:
    """Whether these rows of a Linear, called once, go into this op and nowhere else, by shape ops only."""
    source = queries = reader.node.args[0]
    while isinstance(source, fx.Node) and _hands_on(source):
        source = source.args[0]
    writer = by_node.get(source) if isinstance(source, fx.Node) else None
    weight = writer.param("weight") if writer is not None else None
    if writer is None or weight is None or len(ctx.readers_of(weight)) != 1 or not ctx.written_by_linear(rows):
        return False
    return all(
        (user is reader.node and node is queries and user.args.count(node) == 1) or not _holds(node, rows, by_node)
        for node, user in _ends(writer.node)
    )


def _ends(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Where a tensor, handed on by shape ops, is read: the last of these, and its reader."""
    for user in node.users:
        if _hands_on(user):
            yield from _ends(user)
        else:
            yield node, user


def _hands_on(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        "getitem" in str(node.target) or isinstance(RULES.get(node.target), HANDS_ON)
    )


def _holds(node: fx.Node, rows: Tensor, by_node: dict[fx.Node, Op]) -> bool:
    """Whether a tensor holds some of these rows; what is not known may."""
    picked = node.args[1] if "getitem" in str(node.target) else None
    source = node.args[0] if picked is not None else node
    out = by_node[source].out if isinstance(source, fx.Node) and source in by_node else None
    fact = out[picked] if isinstance(out, list) and isinstance(picked, int) else out
    if not isinstance(fact, Fact):
        return True
    return any(bool(torch.isin(rows, compact(layer).reshape(-1)).any()) for layer in fact.layers)
