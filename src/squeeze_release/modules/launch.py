"""How a Triton kernel is launched: the first time by Triton, then without its search for what it has compiled.

Small tensors are bound by the host, and Triton looks at every argument to find the kernel for them. What it would find
is known here: dtypes and constants belong to a plan.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Numbers = tuple[float, ...]
Short = Callable[[int, int, int, tuple[Any, ...]], None]  # across, down, stream, addresses and numbers


class Tile(NamedTuple):
    """What one program holds at a time."""

    rows: int
    block: int
    warps: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.block


class Plan:
    """A kernel with its constants; once it has run, `short` is the way to launch it.

    Triton compiles anew for a pointer that is not aligned to 16 bytes: one that is not takes the long way.
    """

    def __init__(self, kernel: str, constants: tuple[Any, ...], tile: Tile) -> None:
        self.kernel, self.constants, self.tile = kernel, constants, tile
        self.multiple: int = constants[-3]
        self.short: Short | None = None
        self.found: Any = None  # which Triton unloads with the last that holds it

    def launch(self, across: int, down: int, tensors: tuple[Tensor, ...], numbers: Numbers) -> None:
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(across, down, tensors, numbers)
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = True
        for address in addresses:
            if address & 15:
                aligned = False
        if aligned and self.short is not None:
            self.short(across, down, torch._C._cuda_getCurrentRawStream(device), (*addresses, *numbers))
            return None
        kernel = getattr(_kernels(), self.kernel)
        # Products and sums are rounded one by one, so that a network says the same with gradients and without.
        found = kernel[(across, down)](
            *tensors, *numbers, *self.constants, num_warps=self.tile.warps, enable_fp_fusion=False
        )
        if aligned and found is not None and self.found is None:
            self.found = found
            stream = torch._C._cuda_getCurrentRawStream(device)
            self.short = _shortest(found, self.constants, (across, down, stream), addresses, numbers)
        return None


def _shortest(
    found: Any, constants: tuple[Any, ...], where: tuple[int, int, int], addresses: list[int], numbers: Numbers
) -> Short | None:
    """The first way that leads to the kernel, seen by going it; should this Triton know none, the long one remains."""
    for make in (_by_torch, _by_triton):
        try:
            short = make(found, constants, len(addresses), numbers)
            short(*where, (*addresses, *numbers))
            return short
        except (AttributeError, ImportError, KeyError, TypeError, ValueError, RuntimeError):
            continue
    return None


def _by_torch(found: Any, constants: tuple[Any, ...], addresses: int, numbers: Numbers) -> Short:
    """By torch's own launcher, which is C++ throughout. What it is told of a kernel's parameters it believes."""
    launch = torch._C._StaticCudaLauncher._launch_kernel
    metadata, bits = found.metadata, parameter_bits(found.asm["ptx"])
    told = [64] * addresses + [32] * len(numbers)
    hidden = len(bits) - len(told)  # addresses of scratch memory, which no kernel of ours has
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    special = metadata.num_ctas != 1 or metadata.launch_cooperative_grid or metadata.launch_pdl
    if hidden < 0 or bits != told + [64] * hidden or scratch or special:
        raise ValueError("the kernel has other parameters than it was called with")
    types = "O" * addresses + "".join("i" if isinstance(number, int) else "f" for number in numbers) + "O" * hidden
    function, warps, shared, nowhere = found.function, metadata.num_warps, metadata.shared, (None,) * hidden

    def short(across: int, down: int, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(function, across, down, 1, warps, shared, types, arguments + nowhere, stream)

    return short


def _by_triton(found: Any, constants: tuple[Any, ...], addresses: int, numbers: Numbers) -> Short:
    run, function, metadata = found.run, found.function, found.packed_metadata

    def short(across: int, down: int, stream: int, arguments: tuple[Any, ...]) -> None:
        run(across, down, 1, stream, function, metadata, None, None, None, *arguments, *constants)

    return short


def parameter_bits(ptx: str) -> list[int]:
    """The width of each parameter, from a kernel's assembly."""
    entry = ptx[ptx.index(".entry") :]
    return [int(bits) for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", entry[: entry.index(")")])]


@functools.cache
def _kernels() -> Any:
    from . import kernels

    return kernels
