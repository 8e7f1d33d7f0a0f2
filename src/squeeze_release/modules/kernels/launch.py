"""How a Triton kernel is launched: the first time by Triton, then by `usual.cpp`.

Small tensors are bound by the host, and Triton looks at every argument to find the kernel for them. What it would find
is known here: dtypes and constants belong to a `Kernel`.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import GONE, Parameter

Allocate = Callable[..., Tensor]  # from shape, strides and dtype
Output = tuple[tuple[int, ...], tuple[int, ...], torch.dtype | None]
Outputs = tuple[Output | None, ...]
Launch = Callable[..., Any]
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # a build for CPUs has none
_one_at_a_time = threading.RLock()


class Tile(NamedTuple):
    """What one program holds at a time."""

    rows: int
    block: int
    warps: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.block


class Known(NamedTuple):
    """What the driver is told of a kernel."""

    launch: int  # where the driver's function is
    function: int  # which the kernel is
    threads: int
    shared: int
    hidden: int  # parameters behind all others, addresses of scratch memory that no kernel of ours has


class Kernel:
    """One of `triton_kernels`, with its constants; shared by rows of one kind. Once it has run it is `known`."""

    def __init__(self, name: str, constants: tuple[Any, ...], warps: int) -> None:
        self.name, self.constants, self.warps = name, constants, warps
        self.known: Known | None = None
        self.found: Any = None  # which Triton unloads with the last that holds it

    def run(self, grid: tuple[int, int], tensors: list[Tensor], numbers: tuple[float, ...]) -> None:
        """By Triton, which compiles anew for a pointer that is not aligned to 16 bytes."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if 0 in addresses:
            raise RuntimeError(GONE)
        kernel = getattr(_kernels(), self.name)
        # Two threads would both compile it, and Triton keep one.
        with _one_at_a_time:
            # Products and sums are rounded one by one, so that a network says the same with gradients and without.
            found = kernel[grid](*tensors, *numbers, *self.constants, num_warps=self.warps, enable_fp_fusion=False)
            if found is not None and self.found is None and all(address % 16 == 0 for address in addresses):
                self.found, self.known = found, known(found, len(tensors), len(numbers))


class LongWay:
    """A kernel on a grid. Called with the tensors it reads, and a tuple of numbers; returns those that it fills.

    Its parameters are both, in this order, then `integers`, then the numbers. Tensors that are read, but for the first,
    and outputs may be None, where its constants say so. alone: only the first output is returned. in_cpp: what `usual`
    has compiled.
    """

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int], device: torch.device, empty: Allocate,
        outputs: Outputs, integers: tuple[int, ...], alone: bool = False, in_cpp: Any = None,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.device, self.empty = kernel, grid, device, empty
        self.outputs, self.integers, self.alone, self.in_cpp = outputs, integers, alone, in_cpp
        self.launch = None if in_cpp is None else in_cpp.Launch(outputs, integers, grid, device)
        self._teach()

    @property
    def shortest(self) -> Launch:
        """The shortest way that there is; it leads to this one where it does not know better."""
        return self if self.launch is None else self.in_cpp.Way(self.launch, self, self.alone)

    def _teach(self) -> None:
        if self.launch is not None and self.kernel.known is not None:
            self.launch.know(*self.kernel.known)

    def __call__(self, *arguments: Any) -> Any:
        if self.device.type == "cuda" and current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self(*arguments)
        *read, numbers = arguments
        filled = [None if each is None else self.empty(*each) for each in self.outputs]
        tensors: list[Parameter] = [*read, *filled]
        somewhere = read[0]
        self.kernel.run(
            self.grid, [somewhere if each is None else each for each in tensors], (*self.integers, *numbers)
        )
        self._teach()
        return filled[0] if self.alone else tuple(filled)


def known(found: Any, tensors: int, numbers: int) -> Known | None:
    """Of what Triton has compiled; None where it takes other parameters than it is called with, or needs more."""
    try:
        metadata, bits = found.metadata, parameter_bits(found.asm["ptx"])
        told = [64] * tensors + [32] * numbers
        hidden = len(bits) - len(told)
        scratch = metadata.global_scratch_size or metadata.profile_scratch_size
        special = metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl
        if hidden < 0 or bits != told + [64] * hidden or scratch or special or not isinstance(found.function, int):
            return None
        return Known(_driver(), found.function, 32 * metadata.num_warps, metadata.shared, hidden)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):  # another Triton: the long way remains
        return None


def parameter_bits(ptx: str) -> list[int]:
    """The width of each parameter, from a kernel's assembly."""
    entry = ptx[ptx.index(".entry") :]
    return [int(bits) for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", entry[: entry.index(")")])]


@functools.cache
def _driver() -> int:
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    if address is None:
        raise OSError("the driver has no cuLaunchKernel")
    return address


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels

    return triton_kernels
