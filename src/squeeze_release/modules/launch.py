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

from .kernel_inputs import GONE

Numbers = tuple[float, ...]
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)  # a build for CPUs has none
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Short(NamedTuple):
    """What torch's launcher takes: `launch(function, across, down, 1, warps, shared, types, arguments, stream)`.

    Arguments are addresses, then numbers, then `nothing`.
    """

    launch: Callable[..., None]
    function: Any
    warps: int
    shared: int
    types: str
    nothing: tuple[None, ...]


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
        self.short: Short | None = None
        self.found: Any = None  # which Triton unloads with the last that holds it

    def launch(self, across: int, down: int, device: int, tensors: tuple[Tensor, ...], numbers: Numbers) -> None:
        addresses, merged = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            merged |= address
        short = self.short
        if short is None or merged & 15 or 0 in addresses or device != current_device():
            self.launch_by_triton(across, down, device, tensors, numbers)
        else:
            launch, function, warps, shared, types, nothing = short
            arguments = (*addresses, *numbers, *nothing)
            launch(function, across, down, 1, warps, shared, types, arguments, current_stream(device))

    def launch_by_triton(
        self, across: int, down: int, device: int, tensors: tuple[Tensor, ...], numbers: Numbers
    ) -> None:
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                return self.launch_by_triton(across, down, device, tensors, numbers)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if 0 in addresses:
            raise RuntimeError(GONE)
        kernel = getattr(_kernels(), self.kernel)
        # Products and sums are rounded one by one, so that a network says the same with gradients and without.
        found = kernel[(across, down)](
            *tensors, *numbers, *self.constants, num_warps=self.tile.warps, enable_fp_fusion=False
        )
        aligned = all(address % 16 == 0 for address in addresses)
        if aligned and found is not None and self.found is None:
            self.found = found
            self.short = _shortest(found, self.constants, (across, down, current_stream(device)), addresses, numbers)
        return None


def _shortest(
    found: Any, constants: tuple[Any, ...], where: tuple[int, int, int], addresses: list[int], numbers: Numbers
) -> Short | None:
    """The first way that leads to the kernel, seen by going it; should this Triton know none, the long one remains."""
    across, down, stream = where
    for make in (_by_torch, _by_triton):
        try:
            short = make(found, constants, len(addresses), numbers)
            launch, function, warps, shared, types, nothing = short
            launch(function, across, down, 1, warps, shared, types, (*addresses, *numbers, *nothing), stream)
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
    return Short(launch, found.function, metadata.num_warps, metadata.shared, types, (None,) * hidden)


def _by_triton(found: Any, constants: tuple[Any, ...], addresses: int, numbers: Numbers) -> Short:
    run, metadata = found.run, found.packed_metadata

    def launch(
        function: Any, across: int, down: int, deep: int, warps: int, shared: int, types: str,
        arguments: tuple[Any, ...], stream: int,
    ) -> None:  # fmt: skip
        run(across, down, deep, stream, function, metadata, None, None, None, *arguments, *constants)

    return Short(launch, found.function, 0, 0, "", ())


def parameter_bits(ptx: str) -> list[int]:
    """The width of each parameter, from a kernel's assembly."""
    entry = ptx[ptx.index(".entry") :]
    return [int(bits) for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", entry[: entry.index(")")])]


@functools.cache
def _kernels() -> Any:
    from . import kernels

    return kernels
