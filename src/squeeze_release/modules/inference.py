"""CompensatedLayerNorm where nothing is differentiated: one kernel, launched with the least that Python can do.

Between two large layers all that Python touches comes from main memory, and to ask a tensor for an attribute costs as
much as the arithmetic of some rows. So parameters are looked at once, and again when they lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _is_any_autocast_enabled as _autocast_somewhere

from . import fused, native
from .kernel_inputs import Removed, address_of, nobody_watches_eager, output_dtype

_PLAIN = (torch.nn.Parameter, Tensor, type(None))
_MISSING: Any = object()


class Seen(NamedTuple):
    """What inputs are and where a norm's parameters lie; and for these a kernel, if there is one."""

    what: tuple[Any, ...]
    kernel: Callable[[Tensor], Tensor | None] | None


class Looked:
    """What was last seen of a norm, in one piece: another thread may look at the same time."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: Seen | None = None

    def __reduce__(self) -> tuple[type[Looked], tuple[()]]:
        return Looked, ()  # a copy's parameters lie elsewhere


def normalize(
    x: Tensor, parameters: Mapping[str, Tensor | None], looked: Looked, removed: Removed, kept: int
) -> Tensor | None:
    """y; or None where there is no kernel: they are for plain tensors, in eager, and without gradients."""
    # None is no parameter, and missing is one that is made elsewhere: of a parametrized norm.
    weight, bias = parameters.get("weight", _MISSING), parameters.get("bias", _MISSING)
    if (
        is_grad_enabled()
        or x.__class__ is not Tensor
        or weight.__class__ not in _PLAIN
        or bias.__class__ not in _PLAIN
        or not nobody_watches_eager()
        or x.shape[-1:] != (kept,)
        or x.is_neg()
        or not address_of(x)
    ):
        return None
    dtype = x.dtype
    autocast = dtype is not torch.float32 and _autocast_somewhere() and output_dtype(x)
    what = (dtype, x.device, autocast, _facts(weight), _facts(bias))
    seen = looked.seen
    if seen is None or seen[0] != what:
        seen = looked.seen = Seen(what, _kernel(x, weight, bias, removed))
    kernel = seen[1]
    return None if kernel is None else kernel(x.contiguous())


def _facts(parameter: Tensor | None) -> tuple[Any, ...] | None:
    """All that a kernel is told of it: `.data` may become any view, at the same address too."""
    if parameter is None:
        return None
    return address_of(parameter), parameter.dtype, parameter.shape, parameter.stride(), parameter.is_neg()


def _kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed
) -> Callable[[Tensor], Tensor | None] | None:
    if x.is_cpu:
        return native.kernel(x, weight, bias, removed)
    return fused.kernel(x, weight, bias, removed) if x.is_cuda else None
