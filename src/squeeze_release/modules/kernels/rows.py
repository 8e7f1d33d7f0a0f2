"""Rows of tensors of one shape: all that calls of CompensatedLayerNorm's kernels need not ask again.

Small tensors are bound by the host, so each way to a kernel is one function with what it needs at hand.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import usual
from .inputs import Parameter, Removed, fits, like, nobody_watches, readable
from .launch import Kernel, Launch, LongWay, Outputs, Tile

TILE = 2048  # elements that a program holds at a time, if a row is not longer
WARP_ELEMENTS = 512  # 16 to a thread
FEW_PROGRAMS = 264  # two for each multiprocessor of an H200: with fewer, they hold an eighth of a tile
TOTAL = Tile(256, 16, 4)  # of `triton_kernels.total`
SUMMED = Tile(128, 16, 4)  # of programs that sum up columns in `triton_kernels.backward_at_once`
AT_ONCE_ROWS, AT_ONCE_ELEMENTS = 512, 1 << 21  # up to which that is faster than parts and their total

Forward = Callable[[Tensor, Parameter, Parameter, Removed], Tensor]
WithStats = Callable[[Tensor, Parameter, Parameter, Removed], tuple[Tensor, Tensor]]
Gradients = tuple[Tensor, Parameter, Parameter]  # of x, weight and bias; of these two where they are asked for
AS_ROWS = -1  # in place of pixels: x lies row by row already

_kernels: dict[tuple[Any, ...], Kernel] = {}


class Kind(NamedTuple):
    """All that differs between tensors, but where they are and how x lies."""

    shape: tuple[int, ...]  # channels last
    image: bool  # channels are the second of four dimensions; y lies with channels last even then
    device: torch.device
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    weight_dtype: torch.dtype | None
    bias_dtype: torch.dtype | None
    to_x: bool  # whether its gradient is asked for; it is there in any case
    to_weight: bool
    to_bias: bool


class Backward(NamedTuple):
    """One kernel, or two: then `total` adds up what `first` has left in parts."""

    first: Any
    total: Any = None

    def __call__(self, x: Tensor, dy: Tensor, weight: Parameter, stats: Tensor, inverse: tuple[float]) -> Gradients:
        dx, *others = self.first(x, dy.contiguous(), weight, stats, inverse)
        to_weight, to_bias = (*others, None)[:2] if self.total is None else self.total(others[0], ())
        return dx, to_weight, to_bias


class Rows:
    def __init__(self, kind: Kind, in_cpp: Any) -> None:
        self.shape, self.image, self.device, *dtypes, _, self.to_weight, self.to_bias = kind
        self.x_dtype, self.y_dtype, self.weight_dtype, self.bias_dtype = dtypes
        self.index, self.empty = -1 if self.device.index is None else self.device.index, _allocator(self.device)
        self.stride, self.width, self.size = _contiguous(self.shape), self.shape[-1], math.prod(self.shape)
        self.count, self.few = self.size // self.width, self.size < FEW_PROGRAMS * TILE
        self.multiple = math.gcd(self.width, 8)
        self.groups = self.width // self.multiple
        # Whether tensors are like some that were saved, and the way for them.
        self.way_back: tuple[Callable[..., bool], Backward | None] = _never, None
        self.in_cpp = in_cpp  # for all of these: it may come meanwhile
        self.way_back_in_cpp: Any = None if self.in_cpp is None else self.in_cpp.WayBack()
        self._plain: dict[int, Forward] = {}
        self._backward: dict[torch.dtype, Backward] = {}

    @classmethod
    def of(cls, x: Tensor, weight: Parameter, bias: Parameter, dtype: torch.dtype, image: bool = False) -> Rows:
        """The one for tensors of this kind. dtype: of y."""
        shape = tuple((x.permute(0, 2, 3, 1) if image else x).shape)
        weight_dtype, bias_dtype = (None if each is None else each.dtype for each in (weight, bias))
        asked = (each is not None and each.requires_grad for each in (x, weight, bias))
        return _rows(Kind(shape, image, x.device, x.dtype, dtype, weight_dtype, bias_dtype, *asked), usual.compiled())

    # ---------------------------------------------------------------------------------------------------------- forward

    def plain(self, x: Tensor) -> Forward:
        """To y, from tensors that lie as x does."""
        last = x.permute(0, 2, 3, 1) if self.image else x
        pixels = AS_ROWS if last.is_contiguous() else _pixels(last) if self.few else 0
        if pixels not in self._plain:
            self._plain[pixels] = self._plain_of(pixels)
        return self._plain[pixels]

    def _plain_of(self, pixels: int) -> Forward:
        run = self._forward(self.image, max(0, pixels))
        layout = torch.channels_last if self.image else torch.contiguous_format
        return run if pixels else lambda x, *others: run(x.contiguous(memory_format=layout), *others)

    @functools.cached_property
    def with_stats(self) -> WithStats:
        """To y and the statistics for `backward`, from tensors that are contiguous, channels last."""
        return self._forward(image=False, kept=True)

    def _forward(self, image: bool, pixels: int = 0, kept: bool = False) -> Launch:
        """pixels: x lies channel by channel, of so many each. kept: with statistics."""
        by_channel = pixels > 0
        tile = _tile(self.width, self.few, 8 if by_channel else 1)
        has = self.weight_dtype is not None, self.bias_dtype is not None
        constants = *has, kept, by_channel, self.multiple, *tile.shape
        dtypes = self.x_dtype, self.weight_dtype, self.bias_dtype, self.y_dtype
        shape, stride = (_channels_first(each) if image else each for each in (self.shape, self.stride))
        outputs = (shape, stride, self.y_dtype), ((self.count, 2), (2, 1), torch.float32) if kept else None
        kernel, programs = self._kernel("forward", constants, tile, dtypes), -(-self.count // tile.rows)
        return self._launch(kernel, (programs, 1), outputs, (self.count, self.groups, pixels), alone=not kept)

    # --------------------------------------------------------------------------------------------------------- backward

    def backward(self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor) -> Backward | None:
        """The way to the gradients, known from now on.

        None where kernels cannot: they are for plain tensors as they were saved, and `.data =`, or hooks of whoever
        saves memory, may have changed them.
        """
        same, known = self.way_back
        if same(x, weight, stats, dy) and nobody_watches():
            return known
        if not self._as_they_were(x, weight, stats, dy):
            return None
        run = self._backward.get(dy.dtype) or self._backward.setdefault(dy.dtype, self._backward_of(dy.dtype))
        new = like(x, weight, stats, dy, in_cpp=self.in_cpp) or _never
        self.way_back = new, run  # as a whole: another thread may look at the same time
        if self.in_cpp is not None:
            self.way_back_in_cpp.learn(new, *(None if each is None else each.launch for each in run))
        return run

    def _as_they_were(self, x: Tensor, weight: Parameter, stats: Tensor, dy: Tensor) -> bool:
        if not nobody_watches() or not all(readable(each, self.index) for each in (x, stats, dy)):
            return False
        dtypes = self.x_dtype, torch.float32, self.weight_dtype
        if (x.dtype, stats.dtype, None if weight is None else weight.dtype) != dtypes:
            return False
        shapes = self.shape, self.shape, (self.count, 2)
        if (x.shape, dy.shape, stats.shape) != shapes or not (x.is_contiguous() and stats.is_contiguous()):
            return False
        return weight is None or fits(weight, self.width, self.index)

    def _backward_of(self, dy_dtype: torch.dtype) -> Backward:
        outputs = (
            (self.shape, self.stride, self.x_dtype),
            ((self.width,), (1,), self.weight_dtype) if self.to_weight else None,
            ((self.width,), (1,), self.bias_dtype) if self.to_bias else None,
        )
        few = self.count <= AT_ONCE_ROWS and self.size <= AT_ONCE_ELEMENTS
        return (self._at_once if few else self._in_parts)(outputs, dy_dtype)

    def _at_once(self, outputs: Outputs, dy_dtype: torch.dtype) -> Backward:
        """Few rows: one kernel."""
        tile = _tile(self.width, few=True)
        tile = tile._replace(warps=max(SUMMED.warps, tile.warps))
        constants = (
            self.weight_dtype is not None,
            self.to_weight,
            self.to_bias,
            self.multiple,
            *tile.shape,
            *SUMMED.shape,
        )
        dtypes = self.x_dtype, self.weight_dtype, dy_dtype, self.bias_dtype
        summing = -(-self.width // SUMMED.block) if self.to_weight or self.to_bias else 0
        kernel, programs = self._kernel("backward_at_once", constants, tile, dtypes), -(-self.count // tile.rows)
        return Backward(self._launch(kernel, (summing + programs, 1), outputs, (self.count, self.groups)))

    def _in_parts(self, outputs: Outputs, dy_dtype: torch.dtype) -> Backward:
        """Many rows: programs take parts of them; where there are sums, another kernel adds up those of the parts."""
        tile, summed = _tile(self.width, self.few), self.to_weight or self.to_bias
        programs = min(-(-self.count // tile.rows), _multiprocessors(self.index) * max(1, 16 // tile.warps))
        like_x, like_weight, like_bias = outputs
        like_parts = (2, programs, self.width), (programs * self.width, self.width, 1), torch.float32
        constants = self.weight_dtype is not None, summed, self.multiple, *tile.shape
        kernel = self._kernel("backward", constants, tile, (self.x_dtype, self.weight_dtype, dy_dtype))
        integers = self.count, self.groups
        to_x = self._launch(kernel, (programs, 1), (like_x, like_parts if summed else None), integers)
        if not summed:
            return Backward(to_x)
        asked = self.weight_dtype if self.to_weight else None, self.bias_dtype if self.to_bias else None
        kernel = self._kernel("total", (self.to_weight, self.to_bias, *TOTAL.shape), TOTAL, asked)
        grid = -(-self.width // TOTAL.block), 2
        return Backward(to_x, self._launch(kernel, grid, (like_weight, like_bias), (programs, self.width)))

    # ---------------------------------------------------------------------------------------------------------- kernels

    def _kernel(self, name: str, constants: tuple[Any, ...], tile: Tile, dtypes: tuple[Any, ...]) -> Kernel:
        """Rows of one kind share it."""
        key = name, constants, tile.warps, dtypes, self.index
        return _kernels.setdefault(key, Kernel(name, constants, tile.warps))

    def _launch(
        self, kernel: Kernel, grid: tuple[int, int], outputs: Outputs, integers: tuple[int, ...], alone: bool = False
    ) -> Launch:
        return LongWay(kernel, grid, self.device, self.empty, outputs, integers, alone, self.in_cpp).shortest


_rows = functools.lru_cache(1024)(Rows)


def _never(*arguments: Any) -> Any:
    return False


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
