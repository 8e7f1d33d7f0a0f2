"""Blocks that do next to nothing any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Passthrough(nn.Module):
    """A block that does nothing: returns the first of its arguments, whatever else it is called with.

    `outputs` is for blocks that return a tuple: n of them, the first one and then None.
    """

    in_proj_bias = None  # nn.TransformerEncoder asks its layers' attention: without one it leaves the fast path

    def __init__(self, *, outputs: int = 0) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self._compute(args[0] if args else next(iter(kwargs.values())))
        return (y, *[None] * (self.outputs - 1)) if self.outputs else y

    def _compute(self, x: Tensor) -> Tensor:
        return x


class Shift(Passthrough):
    """A block that comes down to x + bias, one bias a channel."""

    def __init__(self, bias: Tensor, *, channel_dim: int = -1, outputs: int = 0) -> None:
        super().__init__(outputs=outputs)
        self.bias = nn.Parameter(bias)
        self.channel_dim = channel_dim

    def _compute(self, x: Tensor) -> Tensor:
        return x + _per_channel(self.bias, x, self.channel_dim)


class Constant(Passthrough):
    """A block whose output is `value`, one number a channel, at every position of its input."""

    def __init__(self, value: Tensor, *, channel_dim: int = -1, outputs: int = 0) -> None:
        super().__init__(outputs=outputs)
        self.value = nn.Parameter(value)
        self.channel_dim = channel_dim

    def _compute(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.channel_dim] = self.value.numel()
        # A copy: the caller may write to it, as to any layer's output.
        return _per_channel(self.value, x, self.channel_dim).expand(shape).clone(memory_format=torch.contiguous_format)


def _per_channel(values: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return values if channel_dim == -1 else values.view(-1, *[1] * (x.dim() - 2))
