"""What the kernels of CompensatedLayerNorm, `fused.py` and `native.py`, are told, and what must be so before they are.

A kernel sees memory and nothing else: not who traces or differentiates, not whose memory it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _dispatch_tls_local_include_set as _listeners
from torch.autograd import forward_ad
from torch.compiler import is_compiling

Parameter = Tensor | None
count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of inputs; computed in float32
GONE = (
    "a tensor of CompensatedLayerNorm has numbers, but its memory is gone, so there is nothing to read: "
    "whoever resized its storage to 0, as FSDP does between calls, must fill it before forward"
)
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


Plain = Callable[[Tensor, Parameter, Parameter, Removed], Tensor | None]
Differentiable = Callable[[Tensor, Parameter, Parameter], Tensor]


class Kernels(NamedTuple):
    """For tensors of one kind: without gradients; and with them, for what is known of the removed channels."""

    plain: Plain | None
    differentiable: Mapping[Removed, Differentiable] | None


def nobody_watches() -> bool:
    """No compiler, tracer, transform or mode that would have to see every op."""
    return not is_compiling() and nobody_watches_eager()


def nobody_watches_eager() -> bool:
    """For who has asked a compiler already: all others listen at torch's dispatcher, but for forward gradients."""
    return not _listeners().raw_repr() & ~_USUAL and forward_ad._current_level < 0


def address_of(tensor: Tensor) -> int:
    """Where its numbers lie: 0 where there are none, or where it is no more than a promise of some."""
    return tensor.data_ptr() if torch._C._has_storage(tensor) else 0


def readable(tensor: Tensor, device: int) -> bool:
    """A plain tensor that is there. Of a batch of gradients, say, there is no address."""
    return (
        tensor.__class__ is Tensor
        and not tensor.is_nested
        and tensor.get_device() == device
        and not tensor.is_neg()  # a view whose numbers are negated by whoever reads them
        and address_of(tensor) != 0
    )


def fits(parameter: Tensor, width: int, device: int) -> bool:
    """A kernel believes what it is told of a tensor: on another device, or too short, it would read something else."""
    return (
        parameter.__class__ in _PLAIN
        and parameter.shape == (width,)
        and parameter.get_device() == device
        and parameter.is_contiguous()
        and not parameter.is_neg()
        and (device >= 0 or parameter.is_cpu)
        and address_of(parameter) != 0
    )


def like(*tensors: Parameter, channels: int | None = None, in_cpp: Any = None) -> Callable[..., bool] | None:
    """Whether tensors are as these, in all that a kernel believes of them but their addresses, in one call.

    torch's compiler asks this before every call of what it has compiled; of autocast, transforms and modes too, by what
    they do to the dispatcher. What it overlooks are a compiler's own modes (`count_modes`) and forward gradients. Where
    one is None here, only None is like it.

    channels: of the first tensor this dimension alone must be as long; its other sizes, and strides, are left open.
    in_cpp: what `usual` has compiled, which asks the same.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    channels = None if channels is None else channels % there[0].dim()
    if in_cpp is not None:
        same: Callable[..., bool] = in_cpp.Likes(*tensors, channels=channels)
        return same
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.shape) for tensor in there]  # as it takes them, not as it is annotated
        strides: Any = [list(tensor.stride()) for tensor in there]
        if channels is not None:
            rank = there[0].dim()
            sizes[0], strides[0] = [None] * rank, [None] * rank
            sizes[0][channels] = there[0].size(channels)
        guards = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        if not check(*there):
            return None
    except Exception:  # it is not public: whatever another torch says to this, there is another way
        return None
    missing = [tensor is None for tensor in tensors]

    def like_those_there(*others: Parameter) -> bool:
        if [other is None for other in others] != missing:
            return False
        return check(*(other for other in others if other is not None))

    return like_those_there if any(missing) else check  # None is not like a tensor


def output_dtype(x: Tensor) -> torch.dtype:
    """As of F.layer_norm: autocast widens it, only the CPU's leaves it alone."""
    dtype = x.dtype
    if dtype is torch.float32 or x.is_cpu or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return torch.float32 if dtype is torch.bfloat16 or dtype is torch.float16 else dtype
