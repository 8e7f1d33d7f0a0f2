"""Small pieces from which tests build networks: a module around a function, and zeros in rows and columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import squeeze_release as sr


class Net(nn.Module):
    """A module whose forward is a function of (self, *inputs), so that a test shows its network in one place."""

    def __init__(self, code: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


@torch.no_grad()
def dead(layer: nn.Module, *rows: int, bias: float | None = None, dim: int = 0) -> nn.Module:
    """Outputs that no longer see the input: they are the constant in the bias."""
    layer.weight.index_fill_(dim, torch.tensor(rows), 0)
    if bias is not None:
        layer.bias[list(rows)] = bias
    return layer


@torch.no_grad()
def unread(layer: nn.Module, *columns: int) -> nn.Module:
    """Inputs that nothing reads."""
    layer.weight.index_fill_(1, torch.tensor(columns), 0)
    return layer


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def reasons(report: sr.Report) -> str:
    return "\n".join(f"{row.name}: {row.reason}" for row in report.kept)
