"""Convolutions whose weight is computed become plain ones, where that lets channels go.

Weight standardisation computes, filter by filter, W' = g (W - mean W) / sqrt(var W + eps). In eval mode W' is as
constant as W, but each of its columns depends on all columns of W, so no column of W can go by itself. With W' for a
weight the convolution is one like all others: the same numbers, computed once and not in every call.

Exact: in eval mode, always. In training W' itself is then what learns.
Refuses: several example calls; weights that anything else reads or holds, or that depend on more than the
convolution's own parameters; code that does more than compute the weight and convolve; lower precision on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from .analyse import Analysis
from .analyse.blocks import inside, within
from .plan import Plain, Plan
from .rules import Op

_KINDS: dict[str, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    "aten.conv1d.default": nn.Conv1d,
    "aten.conv2d.default": nn.Conv2d,
    "aten.conv3d.default": nn.Conv3d,
}


def plan_plain(ctx: Analysis) -> Plan:
    """All convolutions of which the weight is computed, each with the weight that it computes."""
    if "computed" not in ctx.options:
        return Plan()
    ops: dict[str, list[Op]] = {}
    for op in ctx.ops:
        ops.setdefault(op.module, []).append(op)
    held = _holders(ctx.model)
    found = {}
    for path, own in ops.items():
        if not any(within(path, kept) for kept in ctx.keep) and _computes(own):
            made = _plain(ctx, path, own, held)
            if made is not None:
                found[path] = made
    return Plan(plain=found)


def that_matter(step: Plan, then: Plan) -> Plan:
    """Only those that lose channels then, or are part of a dead block: the others stay as they are."""
    names = {path for path in step.plain if f"{path}.weight" in then.slices or inside(path, then.dead)}
    return Plan(plain={path: made for path, made in step.plain.items() if path in names})


def _computes(ops: list[Op]) -> bool:
    return any(op.name in _KINDS and op.param("weight") is None for op in ops)


def _plain(ctx: Analysis, path: str, ops: list[Op], held: dict[int, int]) -> Plain | None:
    """One call in one trace, that is nothing but a weight and a convolution with it."""
    module, (conv, *more) = ctx.model.get_submodule(path), [op for op in ops if op.name in _KINDS]
    kind = _KINDS[conv.name]
    if more or not isinstance(module, kind) or any(module.children()) or conv.trace.calls[path].count != 1:
        return None
    if any(held[id(p)] > 1 for p in module.parameters()) or not _bias_is_own(conv, path, module):
        return None
    source, entry = (conv.node.args[i] for i in (1, 0))
    made = _evaluate(ctx, conv, source, path)
    if made is None or made[0].shape != module.weight.shape:
        return None
    weight, used = made
    if any(op.node not in used and op is not conv and op.node.users for op in ops) or within(_home(conv, entry), path):
        return None
    if conv.trace.calls[path].shape_out != tuple(conv.node.meta["val"].shape):
        return None
    arguments = {name: conv.given[name] for name in ("stride", "padding", "dilation", "groups")}
    return Plain(kind, weight, {name: _own(value) for name, value in arguments.items()})


def _own(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _home(op: Op, node: Any) -> str:
    return op.trace.module_of(node) if isinstance(node, fx.Node) and node.op == "call_function" else ""


def _bias_is_own(conv: Op, path: str, module: nn.Module) -> bool:
    if module.bias is None:
        return conv.given.get("bias") is None
    return conv.param("bias") == f"{path}.bias"


def _evaluate(ctx: Analysis, conv: Op, weight: Any, path: str) -> tuple[Tensor, set[fx.Node]] | None:
    """The weight in float64, and the ops that compute it; None if they read anything but the module's parameters."""
    values: dict[fx.Node, Any] = {}
    todo = [weight]
    while todo:
        node = todo[-1]
        missing = [source for source in node.all_input_nodes if source not in values]
        if node.op == "placeholder":
            name = conv.trace.params.get(node.name)
            if name is None or name.rpartition(".")[0] != path or not _read_here_alone(conv, node, path):
                return None
            values[todo.pop()] = ctx.tensor(name).double()
        elif node.op != "call_function" or _casts(node, weight):
            return None
        elif missing:
            todo += missing
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[todo.pop()] = node.target(*args, **kwargs)
    return values[weight], {node for node in values if node.op == "call_function"}


def _read_here_alone(conv: Op, node: fx.Node, path: str) -> bool:
    return all(user.op == "call_function" and _home(conv, user) == path for user in node.users)


def _casts(node: fx.Node, like: fx.Node) -> bool:
    """Whether numbers become less exact on the way, or are no plain numbers."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype != like.meta["val"].dtype


def _holders(model: nn.Module) -> dict[int, int]:
    """Parameter -> how many modules hold it."""
    held: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            held[id(parameter)] = held.get(id(parameter), 0) + 1
    return held
