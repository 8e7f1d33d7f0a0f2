"""CompensatedLayerNorm as one kernel on CPUs, where nothing is differentiated: `native.c`.

It is built when the package is installed, if there is a C compiler with OpenMP then. Where it is missing torch's own
ops do the same in two to ten times the time.

Between two large layers all that Python touches comes from main memory, and to ask a tensor for an attribute costs as
much as the arithmetic of some rows. So parameters are looked at once, and again when they lie elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty_like, is_grad_enabled

from .kernel_inputs import Removed, fits, nobody_watches

_VERSION = 2  # of native.c: what an editable installation has built may be older than the source
_PLAIN = (torch.nn.Parameter, Tensor, type(None))
_MISSING: Any = object()


class _Norm(ctypes.Structure):
    """`norm` of native.c."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        *((name, ctypes.c_float) for name in Removed._fields),
    )


class Seen(NamedTuple):
    """Where a norm's parameters lie, what inputs are, and the kernel for both."""

    dtype: torch.dtype
    weight: int | None
    bias: int | None
    norm: Any
    kernel: Any


class Looked:
    """What was last seen of a norm, in one piece: another thread may look at the same time."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: Seen | None = None

    def __reduce__(self) -> tuple[type[Looked], tuple[()]]:
        return Looked, ()  # a copy's parameters lie elsewhere


def normalize(
    x: Tensor, parameters: Mapping[str, Tensor | None], removed: Removed, looked: Looked, kept: int
) -> Tensor | None:
    """y; or None where there is no kernel: it is for plain tensors, in eager, and without gradients."""
    # None is no parameter, and missing is one that is made elsewhere: of a parametrized norm.
    weight, bias = parameters.get("weight", _MISSING), parameters.get("bias", _MISSING)
    if (
        not nobody_watches()  # before what a compiler would look into, as in fused.py
        or is_grad_enabled()
        or x.__class__ is not Tensor
        or weight.__class__ not in _PLAIN
        or bias.__class__ not in _PLAIN
        or x.size(-1) != kept
        or x.is_neg()
    ):
        return None
    at_weight, at_bias = None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr()
    seen = looked.seen
    if seen is None or seen.dtype is not x.dtype or seen.weight != at_weight or seen.bias != at_bias:
        norm = ctypes.byref(_Norm(at_weight, at_bias, kept, *removed))
        seen = looked.seen = Seen(x.dtype, at_weight, at_bias, norm, _kernel(x, weight, bias))
    if seen.kernel is None:
        return None
    x = x.contiguous()
    y = empty_like(x)
    if seen.kernel(seen.norm, x.data_ptr(), y.data_ptr(), x.numel() // kept):
        raise MemoryError("no memory for a row of CompensatedLayerNorm")
    return y


def _kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
    float32, bfloat16 = torch.float32, torch.bfloat16
    names = {(float32, float32): "norm_float", (bfloat16, bfloat16): "norm_half", (bfloat16, float32): "norm_mixed"}
    scale, width = x.dtype if weight is None else weight.dtype, x.size(-1)
    for parameter in (weight, bias):
        if parameter is not None and not (parameter.dtype is scale and fits(parameter, width, -1)):
            return None
    library, name = _library(), names.get((x.dtype, scale))
    if library is None or name is None or width == 0 or (weight is None and bias is not None):
        return None
    kernel = getattr(library, name)
    kernel.argtypes = [ctypes.POINTER(_Norm), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return kernel


@functools.cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec(f"{__package__}._native")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        version = ctypes.c_int.in_dll(library, "native_version").value
    except (OSError, ValueError):  # built for another machine, or before there were versions
        return None
    return library if version == _VERSION else None
