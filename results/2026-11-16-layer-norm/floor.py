"""What an autograd function in Python costs at least, beside F.layer_norm of 197 rows, on a GPU.

PYTHONPATH=src:benchmarks python results/2026-11-16-layer-norm/floor.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import Spread, interleaved
from torch import Tensor, nn

import squeeze_release as sr

ROWS, WIDTH = 197, 384


class Allocates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        stats = x.new_empty((2, ROWS))
        ctx.save_for_backward(x, weight, stats)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def main() -> None:
    plain = nn.LayerNorm(WIDTH, device="cuda")
    x, dy = (torch.randn(ROWS, WIDTH, device="cuda") for _ in range(2))
    weight, bias = plain.weight, plain.bias
    ours = sr.CompensatedLayerNorm(WIDTH, device="cuda")
    ours.merge(torch.randn(9))
    ours.weight, ours.bias = weight, bias
    apply: Callable[..., Tensor] = super(torch.autograd.Function, Allocates).apply
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "F": lambda x: F.layer_norm(x, (WIDTH,), weight, bias, 1e-5),
        "allocates": lambda x: Allocates.apply(x, weight, bias),
        "allocates short": lambda x: apply(x, weight, bias),
        "ours": ours,
    }
    wrt = x.requires_grad_(), weight, bias
    calls = {name: lambda f=f: torch.autograd.grad(f(x), wrt, dy) for name, f in forwards.items()}
    times = interleaved(calls, True, 41, 2e-3)
    for name, each in times.items():
        ratio = Spread.of([a / b for a, b in zip(each, times["F"], strict=True)])
        print(f"forward+backward {name} {1e6 * Spread.of(each).middle:.2f} us {ratio.middle:.3f}")


if __name__ == "__main__":
    main()
