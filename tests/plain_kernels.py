"""The Triton kernels of CompensatedLayerNorm in plain torch, on a CPU: launched by Python and by `usual.cpp` alike.

So all that leads to kernels is tested where there are none: a driver's function that finds its tensors by addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from squeeze_release.modules.kernels import launch

TYPES = {"forward": "pppppiiifffff", "backward_at_once": "pppppppiif", "backward": "ppppppiif", "total": "pppii"}
SIZES = {"p": ctypes.c_uint64, "i": ctypes.c_int32, "f": ctypes.c_float}


class Driver:
    """In place of CUDA's: `launch` is told what a kernel of some pointers, integers and numbers is told."""

    def __init__(self, launch: Callable[[int, list[int], int, Callable[[str], list[Any]]], int]) -> None:
        self._launch = launch
        whole, address = ctypes.c_uint, ctypes.c_void_p
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, address, *[whole] * 7, address, address, address)(self._called)
        self.at: int = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _called(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, _ = rest
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))

        def told(types: str) -> list[Any]:
            return [ctypes.cast(places[i], ctypes.POINTER(SIZES[t]))[0] for i, t in enumerate(types)]

        return self._launch(function, shape, stream, told)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    room = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(room, dtype=dtype, count=size).view(shape)


# ----------------------------------------------------------------------------------------------------------- arithmetic


def forward(x: Tensor, weight: Any, bias: Any, y: Tensor, stats: Any, *numbers: float) -> None:
    mean, share, cross, base, inverse = numbers
    wide = x.float()
    kept_mean = wide.mean(1, True)
    shift, centred = mean - kept_mean, wide - kept_mean
    rstd = (centred.square().sum(1, True) * inverse + cross * shift.square() + base).rsqrt()
    normal = (centred - share * shift) * rstd
    normal = normal if weight is None else normal * weight.float()
    y.copy_(normal if bias is None else normal + bias.float())
    if stats is not None:
        stats.copy_(torch.cat([kept_mean + share * shift, rstd], 1))


def gradients(x: Tensor, dy: Tensor, weight: Any, stats: Tensor, inverse: float) -> tuple[Tensor, Tensor, Tensor]:
    normal, dy = (x.float() - stats[:, :1]) * stats[:, 1:], dy.float()
    g = dy if weight is None else dy * weight.float()
    dx = (g - g.sum(1, True) * inverse - normal * (g * normal).sum(1, True) * inverse) * stats[:, 1:]
    return dx, (dy * normal).sum(0), dy.sum(0)


def fill(into: tuple[Any, ...], found: tuple[Tensor, ...]) -> None:
    for one, other in zip(into, found, strict=True):
        if one is not None:
            one.copy_(other)


class Plain:
    """In place of Triton, while a test runs: what it has compiled is known at once, as a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernels: list[tuple[launch.Kernel, list[torch.dtype]]] = []
        self.by_triton, self.by_driver = 0, 0
        self.driver = Driver(self._launch)
        plain = self

        def run(kernel: launch.Kernel, grid: tuple[int, int], tensors: list[Tensor], numbers: tuple[Any, ...]) -> None:
            plain.by_triton += 1
            dtypes = [tensor.dtype for tensor in tensors]
            plain._run(kernel, grid, [tensor.data_ptr() for tensor in tensors], dtypes, numbers)
            if kernel.known is None and all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
                plain.kernels.append((kernel, dtypes))
                kernel.known = launch.Known(plain.driver.at, len(plain.kernels), 32 * kernel.warps, 0, 1)

        monkeypatch.setattr(launch.Kernel, "run", run)

    def _launch(self, function: int, shape: list[int], stream: int, told: Callable[[str], list[Any]]) -> int:
        self.by_driver += 1
        kernel, dtypes = self.kernels[function - 1]
        types = {
            "forward": "pppppiiifffff",
            "backward_at_once": "pppppppiif",
            "backward": "ppppppiif",
            "total": "pppii",
        }
        values = told(types[kernel.name] + "p")
        assert values.pop() == 0  # hidden
        self._run(kernel, (shape[0], shape[1]), values[: len(dtypes)], dtypes, tuple(values[len(dtypes) :]))
        return 0

    def _run(
        self, kernel: launch.Kernel, grid: tuple[int, int], at: list[int], dtypes: list[torch.dtype], numbers: Any
    ) -> None:
        def there(i: int, *shape: int, asked: bool = True) -> Tensor | None:
            return tensor_at(at[i], shape, dtypes[i]) if asked else None

        name, constants = kernel.name, kernel.constants
        if name == "total":
            parts, width = numbers
            sums = there(0, 2, parts, width)
            assert sums is not None
            to = there(1, width, asked=constants[0]), there(2, width, asked=constants[1])
            return fill(to, tuple(sums.sum(1)))
        count, groups, *numbers = numbers
        width = groups * constants[4 if name == "forward" else 2 if name == "backward" else 3]
        like_x = count, width
        if name == "forward":
            (has_weight, has_bias, kept, first), (pixels, *numbers) = constants[:4], numbers
            x = there(0, count // pixels, width, pixels) if first else there(0, *like_x)
            assert x is not None
            x = x.transpose(1, 2).reshape(like_x) if first else x
            parameters = there(1, width, asked=has_weight), there(2, width, asked=has_bias)
            return forward(x, *parameters, there(3, *like_x), there(4, count, 2, asked=kept), *numbers)  # type: ignore[arg-type]
        read = there(0, *like_x), there(1, *like_x), there(2, width, asked=constants[0]), there(3, count, 2)
        found = gradients(*read, *numbers)  # type: ignore[arg-type]
        if name == "backward_at_once":
            to = there(4, *like_x), there(5, width, asked=constants[1]), there(6, width, asked=constants[2])
            return fill(to, found)
        fill((there(4, *like_x),), found[:1])
        if constants[1]:
            parts = there(5, 2, grid[0], width)
            assert parts is not None
            parts.zero_()
            parts[:, -1] = torch.stack(found[1:])
        return None
