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
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel_inputs import Removed, address_of, fits, nobody_watches, output_dtype
from .launch import Plan, Tile

MAX_WIDTH = 16384  # of a row that one program holds in registers
MAX_ROWS = 1 << 30  # which a program counts in 32 bits
TILE = 2048  # elements that a program holds at a time, if a row is not longer
WARP_ELEMENTS = 512  # 16 to a thread
FEW_PROGRAMS = 264  # two for each multiprocessor of an H200: with fewer, they hold an eighth of a tile
DEPTH, COLUMNS = 256, 16  # of a tile in `kernels.total`

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_plans: dict[tuple[Any, ...], Plan] = {}


def applies(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels can do it: plain tensors on one GPU, in eager, differentiated backwards or not at all."""
    return (
        nobody_watches()  # first, for a compiler that looks into this function need not look further
        and x.__class__ is Tensor
        and x.dtype in _FLOATS
        and (width := x.size(-1)) <= MAX_WIDTH
        and 0 < x.numel() <= MAX_ROWS * width
        and address_of(x) != 0
        and not x.is_neg()
        and _ready(device := x.get_device())
        and (weight is None or (weight.dtype in _FLOATS and fits(weight, width, device)))
        and (bias is None or (bias.dtype in _FLOATS and fits(bias, width, device)))
    )


def differentiated(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    )


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, contiguous. Differentiable, and twice too."""
    x = x.contiguous()
    if differentiated(x, weight, bias):
        y: Tensor = _Normalize.apply(x, weight, bias, removed, dtype)  # type: ignore[no-untyped-call]
        return y
    return _forward(x, weight, bias, removed, dtype, None)


# ------------------------------------------------------------------------------------------------------------- autograd


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed, dtype: torch.dtype
    ) -> Tensor:
        stats = x.new_empty((2, x.numel() // x.shape[-1]), dtype=torch.float32)
        y = _forward(x, weight, bias, removed, dtype, stats)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.removed = removed
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, stats), dy = ctx.saved_tensors, grads[0]
        # With create_graph these gradients will be differentiated themselves.
        if torch.is_grad_enabled() or not _as_they_were(x, weight, stats, dy):
            return *_written_out(x, weight, bias, dy, ctx.removed), None, None
        _, to_weight, to_bias, _, _ = ctx.needs_input_grad
        needed = weight if to_weight else None, bias if to_bias else None
        return *_backward(x, weight, stats, dy.contiguous(), ctx.removed, *needed), None, None


def _as_they_were(x: Tensor, weight: Tensor | None, stats: Tensor, dy: Tensor) -> bool:
    """Plain tensors where they were saved: `.data =`, or hooks of whoever saves memory, may have changed them since.

    A batch of gradients has no address.
    """
    device = stats.get_device()
    return (
        nobody_watches()
        and dy.__class__ is Tensor
        and not dy.is_neg()
        and x.is_contiguous()
        and x.get_device() == dy.get_device() == device
        and address_of(x) != 0
        and address_of(dy) != 0
        and (weight is None or fits(weight, x.shape[-1], device))
    )


def _written_out(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, removed: Removed
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
        None if bias is None else dy.reshape(-1, width).sum(0).to(bias.dtype),
    )


# -------------------------------------------------------------------------------------------------------------- kernels


def kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed
) -> Callable[[Tensor], Tensor | None] | None:
    """For inputs like `x`, if they are contiguous, and as long as the parameters lie where they are; no gradients.

    It answers None where only the long way leads on: a kernel that has not run yet, memory that is not aligned.
    """
    at_weight, at_bias = (0 if parameter is None else parameter.data_ptr() for parameter in (weight, bias))
    if not applies(x, weight, bias) or (at_weight | at_bias) & 15:
        return None
    width, device, dtype = x.size(-1), x.get_device(), output_dtype(x)
    same, most, few_size = dtype is x.dtype, MAX_ROWS * width, FEW_PROGRAMS * TILE
    few, many = (_forward_plan(x, weight, bias, dtype, size, False) for size in (1, few_size))
    numbers = (width // few.multiple, *removed)

    def launch(x: Tensor) -> Tensor | None:
        size, at_x = x.numel(), x.data_ptr()
        plan = few if size < few_size else many
        if plan.short is None or not 0 < size <= most or device != torch._C._cuda_getDevice():
            return None
        y = torch.empty_like(x) if same else torch.empty_like(x, dtype=dtype)
        at_y = y.data_ptr()
        if (at_x | at_y) & 15:
            return None
        rows, stream = size // width, torch._C._cuda_getCurrentRawStream(device)
        places = (at_x, at_weight or at_x, at_bias or at_x, at_y, at_y)
        plan.short(-(-rows // plan.tile.rows), 1, stream, (*places, rows, *numbers))
        return y

    return launch


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed, dtype: torch.dtype, stats: Tensor | None
) -> Tensor:
    width, size = x.size(-1), x.numel()
    rows = size // width
    y = torch.empty_like(x) if dtype is x.dtype else torch.empty_like(x, dtype=dtype)
    w, b = x if weight is None else weight, x if bias is None else bias
    plan = _forward_plan(x, weight, bias, dtype, size, stats is not None)
    numbers = rows, width // plan.multiple, *removed
    plan.launch(-(-rows // plan.tile.rows), 1, (x, w, b, y, y if stats is None else stats), numbers)
    return y


def _forward_plan(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, size: int, kept: bool
) -> Plan:
    """For `size` elements like those of x; `kept`: with the statistics for backward."""
    width, few = x.size(-1), size < FEW_PROGRAMS * TILE
    dtypes = tuple(None if parameter is None else parameter.dtype for parameter in (weight, bias))
    key = width, few, kept, x.dtype, dtypes, dtype, x.get_device()
    plan = _plans.get(key)
    if plan is None:
        tile = _tile(width, few)
        constants = weight is not None, bias is not None, kept, math.gcd(width, 8), *tile.shape
        plan = _plans[key] = Plan("forward", constants, tile)
    return plan


def _backward(
    x: Tensor, weight: Tensor | None, stats: Tensor, dy: Tensor, removed: Removed,
    weight_like: Tensor | None, bias_like: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx, and gradients like weight and bias where they are asked for."""
    width, device = x.shape[-1], x.get_device()
    rows, summed = x.numel() // width, weight_like is not None or bias_like is not None
    few = rows * width < FEW_PROGRAMS * TILE
    key = ("backward", width, few, summed, x.dtype, dy.dtype, None if weight is None else weight.dtype, device)
    plan = _plans.get(key)
    if plan is None:
        tile = _tile(width, few)
        plan = _plans[key] = Plan("backward", (weight is not None, summed, math.gcd(width, 8), *tile.shape), tile)
    programs = min(-(-rows // plan.tile.rows), _multiprocessors(device) * max(1, 16 // plan.tile.warps))
    dx = torch.empty_like(x)
    parts = x.new_empty((2, programs, width), dtype=torch.float32) if summed else stats
    plan.launch(
        programs, 1,
        (x, dy, x if weight is None else weight, stats, dx, parts),
        (rows, width // plan.multiple, removed.inverse),
    )  # fmt: skip
    return dx, *(_totals(parts, weight_like, bias_like) if summed else (None, None))


def _totals(parts: Tensor, weight_like: Tensor | None, bias_like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    _, programs, width = parts.shape
    to_weight = None if weight_like is None else torch.empty_like(weight_like)
    to_bias = None if bias_like is None else torch.empty_like(bias_like)
    key = (
        "total", None if to_weight is None else to_weight.dtype, None if to_bias is None else to_bias.dtype,
        parts.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        constants = (to_weight is not None, to_bias is not None, DEPTH, COLUMNS)
        plan = _plans[key] = Plan("total", constants, Tile(DEPTH, COLUMNS, 4))
    plan.launch(
        -(-width // COLUMNS), 2,
        (parts, parts if to_weight is None else to_weight, parts if to_bias is None else to_bias),
        (programs, width),
    )  # fmt: skip
    return to_weight, to_bias


def _tile(width: int, few: bool) -> Tile:
    """Few programs would leave multiprocessors idle: then each holds fewer rows."""
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, (TILE // 8 if few else TILE) // block)
    return Tile(rows, block, min(16, max(1, rows * block // WARP_ELEMENTS)))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 2


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
        _forward(x, None, None, Removed.of(16, 0, 0.0, 0.0, 1.0), x.dtype, None)
    except Exception as error:  # no C compiler, a driver that is too old: whatever it is, there is another way
        message = f"CompensatedLayerNorm runs without its fused kernels: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
