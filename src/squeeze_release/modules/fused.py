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
import itertools
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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

Forward = Callable[[Tensor, Parameter, Parameter, Removed], Tensor]
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
    """Without gradients and with them, for inputs that lie as x does and parameters like these, at any address."""
    if not applies(x.permute(0, 2, 3, 1) if image else x, weight, bias):
        return None, None
    rows = Rows(x, weight, bias, output_dtype(x), image)
    return rows.plain(x), rows.differentiable


def normalize(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed, dtype: torch.dtype) -> Tensor:
    """y in `dtype`, contiguous. Differentiable, and twice too."""
    rows = Rows(x, weight, bias, dtype)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias)):
        return rows.differentiable(x, weight, bias, removed)
    return rows.plain(x)(x, weight, bias, removed)


# ------------------------------------------------------------------------------------------------------------- autograd


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter, removed: Removed, rows: Rows) -> Tensor:
        y, stats = rows.with_stats(x, weight, bias, removed)
        ctx.save_for_backward(x, weight, stats)
        ctx.removed, ctx.rows = removed, rows
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, stats), removed, rows, dy = ctx.saved_tensors, ctx.removed, ctx.rows, grads[0]
        # With create_graph these gradients will be differentiated themselves.
        if torch.is_grad_enabled() or not rows.as_they_were(x, weight, stats, dy):
            return *_written_out(x, weight, rows.bias_dtype, dy, removed), None, None
        _, to_weight, to_bias, _, _ = ctx.needs_input_grad
        return *rows.backward(x, weight, stats, dy.contiguous(), removed.inverse, to_weight, to_bias), None, None


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
    """Rows of tensors of one shape: all that calls need not ask again, and the kernels for them.

    image: channels are the second of four dimensions. y lies with channels last even then, as rows do.
    """

    def __init__(self, x: Tensor, weight: Parameter, bias: Parameter, dtype: torch.dtype, image: bool = False) -> None:
        self.image, self.device, self.empty = image, x.get_device(), _allocator(x.device)
        self.x_dtype, self.y_dtype = x.dtype, dtype
        self.weight_dtype, self.bias_dtype = (None if each is None else each.dtype for each in (weight, bias))
        self.shape = tuple((x.permute(0, 2, 3, 1) if image else x).shape)
        self.stride, self.width, size = _contiguous(self.shape), self.shape[-1], x.numel()
        self.count, self.few = size // self.width, size < FEW_PROGRAMS * TILE
        self.multiple = math.gcd(self.width, 8)
        self.groups = self.width // self.multiple
        self._same: Callable[..., bool] | None = None  # for backward
        self._for_backward: dict[tuple[bool, torch.dtype], tuple[Plan, int]] = {}
        self._for_sums: dict[tuple[bool, bool], Plan] = {}

    def plain(self, x: Tensor) -> Forward:
        """To y, from tensors that lie as x does."""
        last = x.permute(0, 2, 3, 1) if self.image else x
        if last.is_contiguous():
            return self._forward(self.image)
        pixels = _pixels(last) if self.few else 0
        return self._forward(self.image, pixels, copied=pixels == 0)

    @functools.cached_property
    def with_stats(self) -> Callable[[Tensor, Parameter, Parameter, Removed], tuple[Tensor, Tensor]]:
        """To y and the statistics for `backward`, from tensors that are contiguous, channels last."""
        return self._forward(image=False, kept=True)

    def differentiable(self, x: Tensor, weight: Parameter, bias: Parameter, removed: Removed) -> Tensor:
        if self.image:
            return _apply(x.permute(0, 2, 3, 1).contiguous(), weight, bias, removed, self).permute(0, 3, 1, 2)
        return _apply(x.contiguous(), weight, bias, removed, self)

    def _forward(self, image: bool, pixels: int = 0, copied: bool = False, kept: bool = False) -> Callable[..., Any]:
        """pixels: x lies channel by channel, of so many each. copied: it must be arranged first. kept: with statistics.

        All of it in one function, with what it needs at hand: what Python does here a small network waits for.
        """
        plan = self._forward_plan(kept, pixels > 0)
        device, dtype, empty, count, groups = self.device, self.y_dtype, self.empty, self.count, self.groups
        shape, stride = (_channels_first(each) if image else each for each in (self.shape, self.stride))
        across, layout = -(-count // plan.tile.rows), torch.channels_last if image else torch.contiguous_format

        def forward(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed) -> Any:
            if current_device() != device >= 0:
                with torch.cuda.device(device):
                    return forward(x, weight, bias, removed)
            if copied:
                x = x.contiguous(memory_format=layout)
            y = empty(shape, stride, dtype)
            stats = empty((count, 2), (2, 1), torch.float32) if kept else y
            at_x, at_y = x.data_ptr(), y.data_ptr()
            at_weight = at_x if weight is None else weight.data_ptr()
            at_bias = at_x if bias is None else bias.data_ptr()
            at_stats = stats.data_ptr() if kept else at_y
            aligned = not (at_x | at_y | at_weight | at_bias | at_stats) & 15
            short = plan.short
            if short is not None and aligned and at_x and at_weight and at_bias:
                launch, function, warps, shared, types, nothing = short
                arguments = (at_x, at_weight, at_bias, at_y, at_stats, count, groups, pixels, *removed, *nothing)
                launch(function, across, 1, 1, warps, shared, types, arguments, current_stream(device))
            else:
                tensors = x, x if weight is None else weight, x if bias is None else bias, y, stats
                plan.launch_by_triton(across, 1, device, tensors, (count, groups, pixels, *removed))
            return (y, stats) if kept else y

        return forward

    def as_they_were(self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor) -> bool:
        """Plain tensors as they were saved: `.data =`, or hooks of whoever saves memory, may have changed them."""
        saved = (x, stats, dy) if weight is None else (x, stats, dy, weight)
        same = self._same
        if same is not None and same(*saved):
            return no_modes()
        if not nobody_watches() or not all(readable(each, self.device) for each in (x, stats, dy)):
            return False
        dtypes = self.x_dtype, torch.float32, self.weight_dtype
        if (x.dtype, stats.dtype, None if weight is None else weight.dtype) != dtypes:
            return False
        shapes = self.shape, self.shape, (self.count, 2)
        if (x.shape, dy.shape, stats.shape) != shapes or not (x.is_contiguous() and stats.is_contiguous()):
            return False
        if weight is not None and not fits(weight, self.width, self.device):
            return False
        self._same = like(*saved)
        return True

    def backward(
        self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor, inverse: float, to_weight: bool, to_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dx, and the gradients of weight and bias where they are asked for."""
        device, width, empty, summed = self.device, self.width, self.empty, to_weight or to_bias
        if current_device() != device >= 0:
            with torch.cuda.device(device):
                return self.backward(x, weight, stats, dy, inverse, to_weight, to_bias)
        which = summed, dy.dtype
        plan, programs = self._for_backward.get(which) or self._backward_plan(which)
        dx = empty(self.shape, self.stride, self.x_dtype)
        parts = empty((2, programs, width), (programs * width, width, 1), torch.float32) if summed else stats
        tensors = x, dy, x if weight is None else weight, stats, dx, parts
        plan.launch(programs, 1, device, tensors, (self.count, self.groups, inverse))
        if not summed:
            return dx, None, None
        dw = empty((width,), (1,), self.weight_dtype) if to_weight else None
        db = empty((width,), (1,), self.bias_dtype) if to_bias else None
        sums = parts, parts if dw is None else dw, parts if db is None else db
        total = self._for_sums.get((to_weight, to_bias)) or self._total_plan((to_weight, to_bias))
        total.launch(-(-width // COLUMNS), 2, device, sums, (programs, width))
        return dx, dw, db

    def _forward_plan(self, kept: bool, by_channel: bool) -> Plan:
        tile = _tile(self.width, self.few, 8 if by_channel else 1)
        has = self.weight_dtype is not None, self.bias_dtype is not None
        dtypes = self.x_dtype, self.weight_dtype, self.bias_dtype, self.y_dtype
        return self._plan("forward", (*has, kept, by_channel, self.multiple, *tile.shape), tile, dtypes)

    def _backward_plan(self, which: tuple[bool, torch.dtype]) -> tuple[Plan, int]:
        """And how many programs there are."""
        summed, dy_dtype = which
        tile = _tile(self.width, self.few)
        constants = self.weight_dtype is not None, summed, self.multiple, *tile.shape
        plan = self._plan("backward", constants, tile, (self.x_dtype, self.weight_dtype, dy_dtype))
        programs = min(-(-self.count // tile.rows), _multiprocessors(self.device) * max(1, 16 // tile.warps))
        found = self._for_backward[which] = plan, programs
        return found

    def _total_plan(self, which: tuple[bool, bool]) -> Plan:
        to_weight, to_bias = which
        dtypes = self.weight_dtype if to_weight else None, self.bias_dtype if to_bias else None
        plan = self._for_sums[which] = self._plan("total", (*which, DEPTH, COLUMNS), Tile(DEPTH, COLUMNS, 4), dtypes)
        return plan

    def _plan(self, kernel: str, constants: tuple[Any, ...], tile: Tile, dtypes: tuple[Any, ...]) -> Plan:
        """Rows of one kind share it."""
        key = kernel, constants, tile.warps, dtypes, self.device
        return _plans.setdefault(key, Plan(kernel, constants, tile))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides."""
    behind = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(behind)[::-1]


def _channels_first(last: tuple[int, ...]) -> tuple[int, ...]:
    """The shape or strides of the same image."""
    images, high, wide, channels = last
    return images, channels, high, wide


@functools.cache
def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """From shape, strides and dtype to a tensor on the current device, past torch's dispatcher: nobody watches."""
    from torch._C._dynamo import guards

    # As in what torch's compiler writes. It is not public.
    found: Callable[..., Tensor] | None = getattr(guards, "_empty_strided_cuda", None)
    if found is not None and device.type == "cuda":
        return found
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)


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
        Rows(x, None, None, x.dtype).plain(x)(x, None, None, Removed.of(16, 0, 0.0, 0.0, 1.0))
    except Exception as error:  # no C compiler, a driver that is too old: whatever it is, there is another way
        message = f"CompensatedLayerNorm runs without its fused kernels: {type(error).__name__}: {error}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return False
    return True
