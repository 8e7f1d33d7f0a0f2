"""Local compaction: layers that are narrower than the stream they read from or write to.

Where coupling forbids narrowing a stream (the masks of its writers do not line up), a writer may still compute its
living rows alone and place them among its constants, and a reader may gather only the columns that it really reads.
That is a matter of one module: it stays the same function of its input, so nothing around it has to follow. It costs
an index operation each.

    y_j = b_j                         row j of W is 0: not computed, b_j is placed
    x_k unread, or x_k = 0            column k is not gathered
    x_k = c, no zero padding          b += W_k c, column k is not gathered
    x_k = c_k, zero padding           one of them, the largest, is gathered: W_k0 += W_k c_k / c_k0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, fx, nn

from .analyse import Analysis, rule_of
from .analyse.blocks import within
from .facts import uniform
from .modules import can_index
from .plan import Plan
from .rules import Op
from .rules.affine import Affine
from .trace import Trace

_INDEX_BYTES = 8  # an index is int64


@dataclass
class Columns:
    """What a reader gathers, and what becomes of the constants that it does not."""

    gathered: Tensor  # bool, one for each column
    matrix: Tensor  # (rows, columns, taps)
    delta: Tensor | None = None  # goes to the bias
    changed: bool = False  # whether the matrix is not the weight any more


@dataclass
class Layer:
    """A module that is called in the traces and that nobody else looks into."""

    path: str
    module: nn.Module
    ops: list[Op] = field(default_factory=list)

    @property
    def rule(self) -> Affine:
        return cast(Affine, rule_of(self.ops[0]))

    @property
    def weight(self) -> str:
        return str(self.ops[0].memo["weight"])

    @property
    def padded(self) -> bool:
        return any(op.memo["geometry"].padded for op in self.ops)


def plan_compaction(ctx: Analysis) -> Plan:
    """Every layer by itself: gather, place, both or neither, whichever is stored in the fewest bytes."""
    plan = Plan()
    for layer in layers(ctx):
        matrix = layer.rule.matrix(ctx.tensor(layer.weight), layer.ops[0].memo["geometry"])[0]
        every = Columns(torch.ones(matrix.size(1), dtype=torch.bool), matrix)
        options = [
            (_bytes(layer, columns, rows), columns, rows)
            for columns in (every, _gather(ctx, layer, matrix))
            for rows in (torch.ones(len(matrix), dtype=torch.bool), _living(columns))
        ]
        _, columns, rows = min(options, key=lambda option: option[0])  # the first of equals: neither
        _write(layer, columns, rows, plan)
    return plan


def layers(ctx: Analysis) -> list[Layer]:
    """Plain Linear and Conv modules, not grouped, whose parameters are read by their own calls alone."""
    found: dict[str, Layer] = {}
    for op in ctx.ops:
        if "weight" in op.memo and not any(within(op.module, name) for name in ctx.keep):
            module = ctx.model.get_submodule(op.module)
            if can_index(module) and op.memo["geometry"].groups == 1:
                found.setdefault(op.module, Layer(op.module, module)).ops.append(op)
    readers, owners = _readers(ctx), _owners(ctx.model)
    return [layer for layer in found.values() if _alone(layer, readers, owners)]


def _readers(ctx: Analysis) -> dict[int, set[fx.Node]]:
    """Parameter -> the nodes that read it, whatever they are."""
    readers: dict[int, set[fx.Node]] = {}
    traces: list[Trace] = list(dict.fromkeys(op.trace for op in ctx.ops))
    tensors = dict(ctx.model.named_parameters(remove_duplicate=False))
    for trace in traces:
        for node in trace.nodes:
            name = trace.params.get(node.name) if node.op == "placeholder" else None
            if name in tensors:
                readers.setdefault(id(tensors[name]), set()).update(node.users)
    return readers


def _owners(model: nn.Module) -> dict[int, int]:
    """Parameter -> how many modules hold it."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def _alone(layer: Layer, readers: dict[int, set[fx.Node]], owners: dict[int, int]) -> bool:
    calls = {op.node for op in layer.ops}
    weight, bias = layer.module._parameters.get("weight"), layer.module._parameters.get("bias")
    if weight is None or readers.get(id(weight)) != calls or owners[id(weight)] > 1:
        return False
    return bias is None or (readers.get(id(bias)) == calls and owners[id(bias)] == 1)


def _gather(ctx: Analysis, layer: Layer, matrix: Tensor) -> Columns:
    """Leave out what is 0 or not read; fold constants into the bias, or into one column in front of zero padding."""
    c = _constants(layer)
    read = (matrix != 0).any(2).any(0) & (c != 0)
    constant = read & ~c.isnan()
    constant &= ~Affine._ill_conditioned(matrix[None], c)
    columns = Columns(read, matrix)
    if layer.padded and int(constant.sum()) > 1:
        carrier = int(torch.where(constant, c.abs(), 0.0).argmax())
        shares = torch.where(constant, c / c[carrier], 0.0)
        columns.matrix = matrix.double().clone()
        columns.matrix[:, carrier] = (matrix.double() * shares[None, :, None]).sum(1)
        columns.gathered, columns.changed = read & ~constant, True
        columns.gathered[carrier] = True
    elif not layer.padded and bool(constant.any()) and ctx.can_fold(layer.ops[0]):
        columns.delta = (matrix.double().sum(2) * torch.where(constant, c, 0.0)).sum(1)
        columns.gathered = read & ~constant
    if not bool(columns.gathered.any()):  # no width is ever 0: one column stays, of zeros
        columns.gathered[0], columns.matrix, columns.changed = True, torch.zeros_like(matrix), True
    return columns


def _constants(layer: Layer) -> Tensor:
    """The number that each input channel has in every call; NaN where there is none."""
    seen = []
    for op in layer.ops:
        x = op.given["input"]
        seen.append(uniform(x.value, len(x.shape) + op.memo["geometry"].channel))
    first = seen[0]
    for other in seen[1:]:
        first = torch.where(first == other, first, torch.nan)
    return first


def _living(columns: Columns) -> Tensor:
    rows = (columns.matrix[:, columns.gathered] != 0).any(2).any(1)
    if not bool(rows.any()):
        rows[0] = True  # no width is ever 0
    return rows


def _bytes(layer: Layer, columns: Columns, rows: Tensor) -> int:
    """What is stored: weights, a bias that folding creates, indices, and zeros where there is no bias."""
    module, taps = layer.module, columns.matrix.size(2)
    number = module.get_parameter("weight").element_size()
    gathers = not bool(columns.gathered.all()) or getattr(module, "index", None) is not None
    places = not bool(rows.all()) and getattr(module, "place", None) is None
    total = int(rows.sum()) * int(columns.gathered.sum()) * taps * number
    total += _INDEX_BYTES * (int(columns.gathered.sum()) * gathers + len(rows) * places)
    if module.bias is None:
        created = columns.delta is not None
        total += number * (len(rows) if created else int((~rows).sum()))
    return total


def _write(layer: Layer, columns: Columns, rows: Tensor, plan: Plan) -> None:
    if not bool(columns.gathered.all()):
        index = columns.gathered.nonzero().flatten()
        plan.slices[layer.weight] = {1: index}
        plan.index(layer.path, index)
        if columns.changed:
            plan.values(layer.weight, columns.matrix.reshape(layer.module.get_parameter("weight").shape))
        if columns.delta is not None:
            plan.fold(layer.ops[0], columns.delta)
    if not bool(rows.all()):
        plan.placed[layer.path] = rows.nonzero().flatten()
