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
from squeeze_release.modules import fused, launch

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


def launches(ours: Any, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    """An autograd function with our kernels, once they have run, and not one question: what no Python can be below."""
    removed, rows = ours._numbers, fused.Rows(x, weight, bias, x.dtype)
    for _ in range(3):
        _, stats = rows.with_stats(x, weight, bias, removed)
        rows.backward(x, weight, stats, dy, removed.inverse, True, True)
    plan, (back, programs), total = (
        rows._forward_plan(True, False),
        *rows._for_backward.values(),
        *rows._for_sums.values(),
    )
    across, columns = -(-rows.count // plan.tile.rows), -(-WIDTH // fused.COLUMNS)
    empty, stream, shape, sizes = (
        rows.empty,
        launch.current_stream,
        ((ROWS, WIDTH), (WIDTH, 1)),
        (rows.count, rows.groups),
    )
    parts_shape = (2, programs, WIDTH), (programs * WIDTH, WIDTH, 1)
    (go, f, f_warps, f_shared, f_types, f_rest), (_, b, b_warps, b_shared, b_types, b_rest) = plan.short, back.short
    _, t, t_warps, t_shared, t_types, t_rest = total.short

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, stats = empty(*shape, torch.float32), empty((ROWS, 2), (2, 1), torch.float32)
            at = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), stats.data_ptr()
            go(f, across, 1, 1, f_warps, f_shared, f_types, (*at, *sizes, 0, *removed, *f_rest), stream(0))
            ctx.save_for_backward(x, weight, stats)
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            x, weight, stats = ctx.saved_tensors
            dx, parts = empty(*shape, torch.float32), empty(*parts_shape, torch.float32)
            at = x.data_ptr(), grads[0].data_ptr(), weight.data_ptr(), stats.data_ptr(), dx.data_ptr(), parts.data_ptr()
            go(b, programs, 1, 1, b_warps, b_shared, b_types, (*at, *sizes, removed.inverse, *b_rest), stream(0))
            dw, db = empty((WIDTH,), (1,), torch.float32), empty((WIDTH,), (1,), torch.float32)
            at = parts.data_ptr(), dw.data_ptr(), db.data_ptr()
            go(t, columns, 2, 1, t_warps, t_shared, t_types, (*at, programs, WIDTH, *t_rest), stream(0))
            return dx, dw, db

    apply: Callable[..., Tensor] = super(torch.autograd.Function, Launches).apply
    return lambda x: apply(x, weight, bias)


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
        "launches": launches(ours, x, dy, weight, bias),
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
