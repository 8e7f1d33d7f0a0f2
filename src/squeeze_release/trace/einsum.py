"""Einsum as what it stands for: while a model is traced, a product of two tensors shows up as permutes and a matmul.

So it needs no rule of its own. Only the trace differs; the model keeps its einsum, and verification runs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class EinsumAsMatmul(TorchFunctionMode):
    """Calls of `torch.einsum` on two tensors become ops that have rules."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.einsum and not kwargs:
            equation, *operands = args
            operands = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
            if isinstance(equation, str) and _plain(equation.replace(" ", ""), operands):
                return _product(equation.replace(" ", ""), *operands)
        return func(*args, **(kwargs or {}))


def _plain(equation: str, operands: Sequence[Any]) -> bool:
    """Two tensors, every index once in each, none broadcast, the result spelled out."""
    inputs, arrow, out = equation.partition("->")
    names = inputs.split(",")
    if not arrow or "." in equation or len(names) != 2 or len(operands) != 2:
        return False
    if any(len(set(each)) != len(each) for each in (*names, out)):
        return False
    sizes: dict[str, int] = {}
    return all(
        isinstance(operand, Tensor)
        and operand.dim() == len(each)
        and all(sizes.setdefault(i, operand.size(d)) == operand.size(d) for d, i in enumerate(each))
        for each, operand in zip(names, operands, strict=True)
    )


def _product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    inputs, _, out = equation.partition("->")
    left, right = inputs.split(",")
    a, left = _sum_out(a, left, right + out)
    b, right = _sum_out(b, right, left + out)
    both = [i for i in left if i in right]
    batch, summed = [i for i in both if i in out], [i for i in both if i not in out]
    rows, columns = [i for i in left if i not in both], [i for i in right if i not in both]
    if not summed:
        return _spread(a, left, out) * _spread(b, right, out)
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    a = _grouped(a, left, batch, rows, summed)
    b = _grouped(b, right, batch, summed, columns)
    y = torch.matmul(a, b)
    if len(rows) != 1 or len(columns) != 1:
        y = y.reshape([sizes[i] for i in (*batch, *rows, *columns)])
    return _permuted(y, "".join((*batch, *rows, *columns)), out)


def _sum_out(t: Tensor, names: str, needed: str) -> tuple[Tensor, str]:
    """Sum over what is in neither the other operand nor the result."""
    alone = [d for d, i in enumerate(names) if i not in needed]
    return (t.sum(alone), "".join(i for i in names if i in needed)) if alone else (t, names)


def _grouped(t: Tensor, names: str, batch: list[str], first: list[str], second: list[str]) -> Tensor:
    """(batch..., first, second), each of the last two as one dimension."""
    t = _permuted(t, names, "".join((*batch, *first, *second)))
    if len(first) == len(second) == 1:
        return t
    lead = len(batch)
    t = t.flatten(lead + len(first), -1) if second else t.unsqueeze(-1)
    return t.flatten(lead, -2) if first else t.unsqueeze(lead)


def _permuted(t: Tensor, names: str, order: str) -> Tensor:
    return t if names == order else t.permute([names.index(i) for i in order])


def _spread(t: Tensor, names: str, out: str) -> Tensor:
    """With every index of the result, 1 wide where it has none."""
    t = _permuted(t, names, "".join(i for i in out if i in names))
    for d, i in enumerate(out):
        t = t if i in names else t.unsqueeze(d)
    return t
