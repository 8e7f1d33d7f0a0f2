"""What is known of a tensor: whose channels it carries, and which of its numbers are constants.

Facts have the activation's shape but stride 0 along every dimension where they do not vary, so that a shape op runs on
them as it is and arithmetic costs what the facts cost, not what the activation costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]
MIXED = -1  # no dimension holds channels alone


@dataclass(frozen=True)
class Span:
    """Numbers that are known up to functions f of the position: offset + parts[0] f_0 + parts[1] f_1 ...

    The f are the same for all channels, which lie along `dim`. See `rules/carriers.py`. A reshape may lay channels and
    positions along one dimension, and another part them again: meanwhile `dim` is `MIXED`, and `places` says of each
    element which channel and which position it is.
    """

    dim: int
    offset: Tensor
    parts: tuple[Tensor, ...]
    places: tuple[Tensor, Tensor] | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Span | None:
        """The span after an op that moves elements or takes their means, if each channel keeps an index of its own."""
        channels = collapse(move(self._channels()))
        if bool(compact(channels).isnan().any()):
            return None  # a mean over channels
        dim, places = _dim_of(channels), None
        if dim == MIXED or self.places is not None:
            positions = collapse(move(self._positions()))
            if bool(compact(positions).isnan().any()):
                return None  # a mean over positions, not the same ones for every channel
            if dim == MIXED or dim in varying(positions):
                dim, places = MIXED, (channels, positions)
        return Span(dim, move(self.offset), tuple(move(part) for part in self.parts), places)

    def _channels(self) -> Tensor:
        if self.places is not None:
            return self.places[0]
        shape = self.offset.shape
        return vector(torch.arange(shape[self.dim], dtype=torch.float64), shape, self.dim)

    def _positions(self) -> Tensor:
        if self.places is not None:
            return self.places[1]
        one = [1 if d == self.dim else size for d, size in enumerate(self.offset.shape)]
        return torch.arange(math.prod(one), dtype=torch.float64).reshape(one).expand(self.offset.shape)

    def scaled(self, scale: Tensor | float, shift: Tensor | float) -> Span:
        """The span of scale x + shift."""
        shape = self.offset.shape

        def times(numbers: Tensor) -> Tensor:
            return compact(numbers) * (compact(scale) if isinstance(scale, Tensor) else scale)

        offset = times(self.offset) + (compact(shift) if isinstance(shift, Tensor) else shift)
        return Span(
            self.dim, offset.expand(shape), tuple(times(part).expand(shape) for part in self.parts), self.places
        )


def _dim_of(channels: Tensor) -> int:
    """The dimension along which each index is a channel of its own."""
    dims, small = varying(channels), compact(channels)
    return dims[0] if len(dims) == 1 and small.unique().numel() == small.numel() else MIXED


@dataclass(frozen=True)
class Fact:
    """One tensor of the traced graph.

    layers: int64 tensors of labels, varying along disjoint sets of dimensions. Along a dimension without a layer the
        tensor's extent is fixed.
    value: float64, NaN where the element depends on the input (or is not known).
    source: "input", "param" or "activation".
    span: what is known of elements that depend on the input, NaN where it is nothing; None where it is nothing at all.
    """

    shape: Shape
    layers: tuple[Tensor, ...]
    numbers: Tensor | Callable[[], Tensor]  # a parameter's are only read when a rule asks: they are big
    source: str = "activation"
    span: Span | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> Span | None:
        return None if self.span is None else self.span.moved(move)

    @property
    def value(self) -> Tensor:
        return self.numbers if isinstance(self.numbers, Tensor) else self.numbers()

    def along(self, dim: int) -> list[Tensor]:
        """The layers that vary along `dim`."""
        dim %= len(self.shape)
        return [layer for layer in self.layers if dim in varying(layer)]


def scaled_one(value: Tensor, layers: Sequence[Tensor]) -> Span | None:
    """The span of a constant of every channel times a function of the position, as zero padding makes it."""
    dims = [varying(layer) for layer in layers]
    if len(dims) != 1 or len(dims[0]) != 1:
        return None
    small = compact(value)
    return Span(dims[0][0], torch.where(small.isnan(), small, 0.0).expand(value.shape), (value,))


def known_offset(fact: Fact) -> Tensor:
    """What is known of a tensor beside functions of the position: its constants are known without any."""
    return fact.value if fact.span is None else fact.span.offset


def unknown(shape: Sequence[int]) -> Tensor:
    return torch.full((1,) * len(shape), torch.nan, dtype=torch.float64).expand(tuple(shape))


def nothing(shape: Sequence[int], source: str = "activation") -> Fact:
    """The fact of a tensor of which nothing is known: fixed extents, varying numbers."""
    return Fact(tuple(shape), (), unknown(shape), source)


def varying(t: Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(t.dim()) if t.size(d) > 1 and t.stride(d) != 0)


def compact(t: Tensor) -> Tensor:
    """The tensor narrowed to size 1 along the dimensions where it does not vary."""
    for d in range(t.dim()):
        if t.size(d) > 1 and t.stride(d) == 0:
            t = t.narrow(d, 0, 1)
    return t


def collapse(t: Tensor) -> Tensor:
    """The same tensor with stride 0 along every dimension where it does not vary."""
    if t.numel() == 0:
        return t
    small = compact(t)
    for d in range(small.dim()):
        if small.size(d) > 1:
            first = small.narrow(d, 0, 1)
            same = small == first
            if small.is_floating_point():
                same |= small.isnan() & first.isnan()
            if bool(same.all()):
                small = first
    return small.expand(t.shape)


def vector(values: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Lay a vector along `dim` of a tensor of that shape."""
    view = [1] * len(shape)
    view[dim] = len(values)
    return values.reshape(view).expand(tuple(shape))


def layer_vector(layer: Tensor, dim: int) -> Tensor:
    """The labels of a layer that varies along `dim` alone."""
    return compact(layer).reshape(-1).expand(layer.size(dim))


def uniform(value: Tensor, dim: int) -> Tensor:
    """Per index of `dim`, the one number it holds everywhere, or NaN."""
    dim %= value.dim()
    rows = compact(value).movedim(dim, 0)
    rows = rows.reshape(rows.size(0), -1)
    first = rows[:, 0]
    result = torch.where((rows == first[:, None]).all(1), first, torch.nan)
    return result.expand(value.size(dim))
