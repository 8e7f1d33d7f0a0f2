"""What the kernels of CompensatedLayerNorm, `fused.py` and `native.py`, are told, and what must be so before they are.

A kernel sees memory and nothing else: not who traces or differentiates, not whose memory it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _dispatch_tls_local_include_set as _listeners
from torch.autograd import forward_ad
from torch.compiler import is_compiling

_PLAIN = (Tensor, nn.Parameter)
_USUAL = DispatchKeySet(DispatchKey.BackendSelect).add(DispatchKey.ADInplaceOrView).raw_repr()


class Removed(NamedTuple):
    """What the kernels know of the removed channels. Computed in float64, handed over as float32."""

    mean: float  # m_R
    share: float  # K / C
    cross: float  # m K / C^2
    base: float  # M2 / C + eps
    inverse: float  # 1 / C

    @classmethod
    def of(cls, kept: int, count: int, mean: float, m2: float, eps: float) -> Removed:
        width = max(1, kept + count)
        return cls(mean, count / width, kept * count / width**2, m2 / width + eps, 1 / width)


def nobody_watches() -> bool:
    """No compiler, tracer, transform or mode that would have to see every op."""
    return not is_compiling() and nobody_watches_eager()


def nobody_watches_eager() -> bool:
    """For who has asked a compiler already: all others listen at torch's dispatcher, but for forward gradients."""
    return not _listeners().raw_repr() & ~_USUAL and forward_ad._current_level < 0


def address_of(tensor: Tensor) -> int:
    """Where its numbers lie: 0 where there are none, or where it is no more than a promise of some."""
    return tensor.data_ptr() if torch._C._has_storage(tensor) else 0


def fits(parameter: Tensor, width: int, device: int) -> bool:
    """A kernel believes what it is told of a tensor: on another device, or too short, it would read something else."""
    return (
        parameter.__class__ in _PLAIN
        and parameter.shape == (width,)
        and parameter.get_device() == device
        and parameter.is_contiguous()
        and not parameter.is_neg()  # a view whose numbers are negated by whoever reads them
        and (device >= 0 or parameter.is_cpu)
        and address_of(parameter) != 0
    )


def output_dtype(x: Tensor) -> torch.dtype:
    """As of F.layer_norm: autocast widens it, only the CPU's leaves it alone."""
    dtype = x.dtype
    if dtype is torch.float32 or x.is_cpu or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return torch.float32 if dtype is torch.bfloat16 or dtype is torch.float16 else dtype
