"""CompensatedLayerNorm as one kernel forward and one backward, for NVIDIA GPUs with Triton. `applies` says where.

Of m kept and K removed channels, C = m + K, with the removed ones' mean m_R and squared deviations M2, a row x has

    mu_A = sum(x) / m        d = m_R - mu_A                                    mu = mu_A + (K / C) d
    y = w (x - mu) r + b     1 / r^2 = (|x - mu_A|^2 + M2) / C + (m K / C^2) d^2 + eps

Backward, with n = (x - mu) r and g = w dy: dmu/dx_j = 1 / C. All C deviations from mu add up to 0, so the variance
moves with x_j as if mu stood still: dvar/dx_j = 2 (x_j - mu) / C. Together

    dx = r (g - sum(g) / C - n sum(g n) / C)        dw = sum of dy n over rows        db = sum of dy over rows

which is LayerNorm's own with C in place of m: the removed channels are in mu and r, and get no gradient.

Numbers go to the kernels as Python floats, for reading a tensor would wait for the device.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from .inputs import (
    FLOATS,
    Differentiable,
    Kernels,
    Parameter,
    Removed,
    fits,
    nobody_watches,
    output_dtype,
    readable,
)
from .rows import Rows

MAX_WIDTH = 16384  # of a row that one program holds in registers
MAX_ROWS = 1 << 30  # which a program counts in 32 bits
_MOST = 4096  # functions, one for each norm and kind of input


def applies(x: Tensor, weight: Parameter, bias: Parameter) -> bool:
    """Whether the kernels can do it: plain tensors on one GPU, in eager, differentiated backwards or not at all."""
    return (
        nobody_watches()  # first, for a compiler that looks into this function need not look further
        and readable(x, device := x.get_device())
        and x.dtype in FLOATS
        and (width := x.size(-1)) <= MAX_WIDTH
        and 0 < x.numel() <= MAX_ROWS * width
        and _ready(device)
        and (weight is None or (weight.dtype in FLOATS and fits(weight, width, device)))
        and (bias is None or (bias.dtype in FLOATS and fits(bias, width, device)))
    )


def kernels(x: Tensor, weight: Parameter, bias: Parameter, image: bool) -> Kernels:
    """For inputs that lie as x does and parameters like these, at any address."""
    if not applies(x.permute(0, 2, 3, 1) if image else x, weight, bias):
        return Kernels(None, None)
    rows = Rows.of(x, weight, bias, output_dtype(x), image)
    return Kernels(rows.plain(x), _Functions(rows, x.is_contiguous()))


def normalize(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, contiguous. Differentiable, and twice too."""
    rows = Rows.of(x, weight, bias, dtype)
    if is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return _differentiable(rows, x.is_contiguous(), removed)(x, weight, bias)
    return rows.plain(x)(x, weight, bias, removed)


# ------------------------------------------------------------------------------------------------------------- autograd


class _Functions(dict[Removed, Differentiable]):
    """Made as they are asked for."""

    def __init__(self, rows: Rows, contiguous: bool) -> None:
        self.rows, self.contiguous = rows, contiguous

    def __missing__(self, removed: Removed) -> Differentiable:
        if len(self) >= _MOST:
            self.clear()
        found = self[removed] = _differentiable(self.rows, self.contiguous, removed)
        return found


def _differentiable(rows: Rows, contiguous: bool, removed: Removed) -> Differentiable:
    apply = _function(rows, removed)
    if rows.image:
        return lambda x, *others: apply(x.permute(0, 2, 3, 1).contiguous(), *others).permute(0, 3, 1, 2)
    return apply if contiguous else lambda x, *others: apply(x.contiguous(), *others)


@functools.lru_cache(_MOST)
def _function(rows: Rows, removed: Removed) -> Differentiable:
    """One for each, so that autograd has tensors alone to look at. From tensors that are contiguous, channels last."""

    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
        y, stats = rows.with_stats(x, weight, bias, removed)
        ctx.save_for_backward(x, weight, stats)
        return y

    def backward(ctx: Any, dy: Tensor) -> tuple[Parameter, ...]:
        x, weight, stats = ctx.saved_tensors
        return unusual(x, weight, stats, dy)

    def unusual(x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor) -> tuple[Parameter, ...]:
        # With create_graph these gradients will be differentiated themselves.
        run = None if is_grad_enabled() else rows.backward(x, weight, stats, dy)
        if run is None:
            return _written_out(x, weight, rows.bias_dtype, dy, removed)
        return run(x, dy, weight, stats, removed[-1:])

    if rows.in_cpp is not None:
        found: Differentiable = rows.in_cpp.Differentiable(rows.with_stats, rows.way_back_in_cpp, removed, unusual)
        return found
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type("CompensatedLayerNorm", (torch.autograd.Function,), methods)
    # Past what torch does for those who watch: nobody does.
    apply: Differentiable = super(torch.autograd.Function, function).apply
    return apply


def _written_out(
    x: Tensor, weight: Parameter, bias_dtype: torch.dtype | None, dy: Tensor, removed: Removed
) -> tuple[Tensor | None, ...]:
    """The same gradients in plain ops."""
    wide, dy = x.float(), dy.float()
    kept_mean = wide.mean(-1, keepdim=True)
    shift, centred = removed.mean - kept_mean, wide - kept_mean
    square = centred.square().sum(-1, keepdim=True) * removed.inverse + removed.cross * shift.square() + removed.base
    rstd = square.rsqrt()
    n = (centred - removed.share * shift) * rstd
    g = dy if weight is None else dy * weight.float()
    along_mean, along_sigma = (each.sum(-1, keepdim=True) * removed.inverse for each in (g, g * n))
    width = x.shape[-1]
    return (
        (rstd * (g - along_mean - n * along_sigma)).to(x.dtype),
        None if weight is None else (dy * n).reshape(-1, width).sum(0).to(weight.dtype),
        None if bias_dtype is None else dy.reshape(-1, width).sum(0).to(bias_dtype),
    )


@functools.cache
def _ready(device: int) -> bool:
    """Whether Triton is there and can compile and launch for this GPU: tried once, on one row."""
    if device < 0 or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    x = torch.ones(1, 16, dtype=torch.float32, device=torch.device("cuda", device))
    try:
        Rows.of(x, None, None, x.dtype).plain(x)(x, None, None, Removed.of(16, 0, 0.0, 0.0, 1.0))
    except Exception as error:  # no C compiler, a driver that is too old: whatever it is, there is another way
        message = f"CompensatedLayerNorm runs without its fused kernels: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
