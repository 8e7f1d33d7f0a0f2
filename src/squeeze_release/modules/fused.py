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
from torch import Tensor, empty_like

from .kernel_inputs import (
    FLOATS,
    Launch,
    Parameter,
    Removed,
    fits,
    like,
    no_modes,
    nobody_watches,
    output_dtype,
    readable,
)
from .launch import Plan, Tile, current_device, current_stream

MAX_WIDTH = 16384  # of a row that one program holds in registers
MAX_ROWS = 1 << 30  # which a program counts in 32 bits
TILE = 2048  # elements that a program holds at a time, if a row is not longer
WARP_ELEMENTS = 512  # 16 to a thread
FEW_PROGRAMS = 264  # two for each multiprocessor of an H200: with fewer, they hold an eighth of a tile
DEPTH, COLUMNS = 256, 16  # of a tile in `kernels.total`

_plans: dict[tuple[Any, ...], Plan] = {}


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


def kernels(x: Tensor, weight: Parameter, bias: Parameter, image: bool) -> tuple[Launch, Launch] | tuple[None, None]:
    """Without gradients and with them, for inputs like x and parameters like these, wherever they lie."""
    last = x.permute(0, 2, 3, 1) if image else x
    if not applies(last, weight, bias):
        return None, None
    rows = Rows(last, weight, bias, output_dtype(x))

    def differentiable(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed) -> Tensor | None:
        if not 0 < x.numel() <= rows.most:
            return None
        if image:
            return _apply(x.permute(0, 2, 3, 1).contiguous(), weight, bias, removed, rows).permute(0, 3, 1, 2)
        return _apply(x.contiguous(), weight, bias, removed, rows)

    return rows.forward_image if image else rows.forward, differentiable


def normalize(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, contiguous. Differentiable, and twice too."""
    rows = Rows(x, weight, bias, dtype)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return _apply(x.contiguous(), weight, bias, removed, rows)
    y = rows.forward(x, weight, bias, removed)
    assert y is not None, "applies was not asked"
    return y


# ------------------------------------------------------------------------------------------------------------- autograd


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter, removed: Removed, rows: Rows) -> Tensor:
        stats = x.new_empty((x.numel() // rows.width, 2), dtype=torch.float32)
        y = rows.forward(x, weight, bias, removed, stats)
        assert y is not None, "rows were counted before"
        ctx.save_for_backward(x, weight, stats)
        ctx.removed, ctx.rows = removed, rows
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, stats), removed, rows, dy = ctx.saved_tensors, ctx.removed, ctx.rows, grads[0]
        _, to_weight, to_bias, _, _ = ctx.needs_input_grad
        # With create_graph these gradients will be differentiated themselves.
        if torch.is_grad_enabled() or not rows.as_they_were(x, weight, stats, dy):
            return *_written_out(x, weight, rows.bias_dtype, dy, removed), None, None
        gradients = rows.backward(x, weight, stats, dy.contiguous(), removed.inverse, to_weight, to_bias)
        return *gradients, None, None


# Past what torch does for those who watch: nobody does.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Normalize).apply


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


# -------------------------------------------------------------------------------------------------------------- kernels


class Rows:
    """Rows like those of one tensor: all that calls need not ask again, and the kernels for them."""

    def __init__(self, x: Tensor, weight: Parameter, bias: Parameter, dtype: torch.dtype) -> None:
        self.width, self.device = x.size(-1), x.get_device()
        self.x_dtype, self.y_dtype, self.other_dtype = x.dtype, dtype, dtype is not x.dtype
        self.weight_dtype, self.bias_dtype = (None if each is None else each.dtype for each in (weight, bias))
        self.few_size, self.most = FEW_PROGRAMS * TILE, MAX_ROWS * self.width
        self.multiple = math.gcd(self.width, 8)
        self.groups = self.width // self.multiple
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._same: Callable[..., bool] | None = None  # for backward
        self.few, self.many = (self._forward_plan(few, False, False) for few in (True, False))

    def forward(
        self, x: Tensor, weight: Parameter, bias: Parameter, removed: Removed,
        stats: Tensor | None = None, y: Tensor | None = None, pixels: int = 0,
    ) -> Tensor | None:  # fmt: skip
        """y, contiguous; None of too many rows. With the statistics for backward in `stats` x must be contiguous.

        All of it in one function: what Python does here a small network waits for.
        """
        size = x.numel()
        if not 0 < size <= self.most:
            return None
        rows, few = size // self.width, size < self.few_size
        if y is None:
            if not x.is_contiguous():
                pixels = _pixels(x) if few else 0
                x = x if pixels else x.contiguous()
            if pixels or self.other_dtype:
                y = empty_like(x, dtype=self.y_dtype, memory_format=torch.contiguous_format)
            else:
                y = empty_like(x)
        if stats is None and not pixels:
            plan = self.few if few else self.many
        else:
            plan = self._forward_plan(few, stats is not None, pixels > 0)
        at_x, at_y = x.data_ptr(), y.data_ptr()
        at_weight = at_x if weight is None else weight.data_ptr()
        at_bias = at_x if bias is None else bias.data_ptr()
        at_stats = at_y if stats is None else stats.data_ptr()
        across, short = -(-rows // plan.rows), plan.short
        if (
            short is not None
            and not (at_x | at_y | at_weight | at_bias | at_stats) & 15
            and at_x and at_weight and at_bias
            and current_device() == (device := self.device)
        ):  # fmt: skip
            launch, function, warps, shared, types, nothing = short
            arguments = (at_x, at_weight, at_bias, at_y, at_stats, rows, self.groups, pixels, *removed, *nothing)
            launch(function, across, 1, 1, warps, shared, types, arguments, current_stream(device))
            return y
        tensors = x, x if weight is None else weight, x if bias is None else bias, y, y if stats is None else stats
        plan.launch_by_triton(across, 1, self.device, tensors, (rows, self.groups, pixels, *removed))
        return y

    def forward_image(self, x: Tensor, weight: Parameter, bias: Parameter, removed: Removed) -> Tensor | None:
        """The same where channels are the second of four dimensions; y lies with channels last, as rows do."""
        pixels = 0
        if not x.is_contiguous(memory_format=torch.channels_last):
            if x.numel() < self.few_size and x.is_contiguous():
                pixels = x.size(2) * x.size(3)
            else:
                x = x.contiguous(memory_format=torch.channels_last)
        y = empty_like(x, dtype=self.y_dtype, memory_format=torch.channels_last)
        return self.forward(x, weight, bias, removed, None, y, pixels)

    def as_they_were(self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor) -> bool:
        """Plain tensors as they were saved: `.data =`, or hooks of whoever saves memory, may have changed them."""
        saved = (x, stats, dy) if weight is None else (x, stats, dy, weight)
        size = x.numel()
        if not x.is_contiguous() or not stats.is_contiguous() or dy.numel() != size:
            return False
        if stats.numel() * self.width != 2 * size:
            return False
        if self._same is not None and self._same(*saved):
            return no_modes()
        there = nobody_watches() and all(readable(each, self.device) for each in (x, stats, dy))
        dtypes = self.x_dtype, torch.float32, self.weight_dtype
        if not there or (x.dtype, stats.dtype, None if weight is None else weight.dtype) != dtypes:
            return False
        if x.size(-1) != self.width or not (weight is None or fits(weight, self.width, self.device)):
            return False
        self._same = like(*saved)
        return True

    def backward(
        self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor, inverse: float, to_weight: bool, to_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx, and the gradients of weight and bias where they are asked for."""
        size, width, summed = x.numel(), self.width, to_weight or to_bias
        which = size < self.few_size, summed, dy.dtype
        plan = self._plans.get(which) or self._backward_plan(which)
        rows, tile = size // width, plan.tile
        programs = min(-(-rows // tile.rows), _multiprocessors(self.device) * max(1, 16 // tile.warps))
        dx = empty_like(x)
        parts = x.new_empty((2, programs, width), dtype=torch.float32) if summed else stats
        tensors = x, dy, x if weight is None else weight, stats, dx, parts
        plan.launch(programs, 1, self.device, tensors, (rows, self.groups, inverse))
        if not summed:
            return dx, None, None
        dw = empty_like(weight) if weight is not None and to_weight else None
        if not to_bias:
            db = None
        elif dw is not None and self.bias_dtype is self.weight_dtype:
            db = empty_like(dw)
        else:
            db = x.new_empty(width, dtype=self.bias_dtype)
        total = self._plans.get((to_weight, to_bias)) or self._total_plan((to_weight, to_bias))
        sums = parts, parts if dw is None else dw, parts if db is None else db
        total.launch(-(-width // COLUMNS), 2, self.device, sums, (programs, width))
        return dx, dw, db

    def _forward_plan(self, few: bool, kept: bool, by_channel: bool) -> Plan:
        which = few, kept, by_channel
        if which in self._plans:
            return self._plans[which]
        tile = _tile(self.width, few, 8 if by_channel else 1)
        has = self.weight_dtype is not None, self.bias_dtype is not None
        constants = *has, kept, by_channel, self.multiple, *tile.shape
        dtypes = self.x_dtype, self.weight_dtype, self.bias_dtype, self.y_dtype
        return self._plan(which, "forward", constants, tile, dtypes)

    def _backward_plan(self, which: tuple[bool, bool, torch.dtype]) -> Plan:
        few, summed, dy_dtype = which
        tile = _tile(self.width, few)
        constants = self.weight_dtype is not None, summed, self.multiple, *tile.shape
        return self._plan(which, "backward", constants, tile, (self.x_dtype, self.weight_dtype, dy_dtype))

    def _total_plan(self, which: tuple[bool, bool]) -> Plan:
        to_weight, to_bias = which
        dtypes = self.weight_dtype if to_weight else None, self.bias_dtype if to_bias else None
        return self._plan(which, "total", (*which, DEPTH, COLUMNS), Tile(DEPTH, COLUMNS, 4), dtypes)

    def _plan(
        self, which: tuple[Any, ...], kernel: str, constants: tuple[Any, ...], tile: Tile, dtypes: tuple[Any, ...]
    ) -> Plan:
        """Norms of one kind share it."""
        key = kernel, constants, tile.warps, dtypes, self.device
        plan = self._plans[which] = _plans.setdefault(key, Plan(kernel, constants, tile))
        return plan


def _pixels(x: Tensor) -> int:
    """Of an image that lies channel by channel; 0 where it does not."""
    if x.dim() != 4:
        return 0
    _, high, wide, channels = x.shape
    pixels = high * wide
    return pixels if x.stride() == (channels * pixels, wide, 1, pixels) else 0


def _tile(width: int, few: bool, at_least: int = 1) -> Tile:
    """Few programs would leave multiprocessors idle: then each holds fewer rows, but `at_least` so many."""
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(at_least, (TILE // 8 if few else TILE) // block)
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
        Rows(x, None, None, x.dtype).forward(x, None, None, Removed.of(16, 0, 0.0, 0.0, 1.0))
    except Exception as error:  # no C compiler, a driver that is too old: whatever it is, there is another way
        message = f"CompensatedLayerNorm runs without its fused kernels: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
