"""CompensatedLayerNorm as one kernel on CPUs, where nothing is differentiated: `native.c`.

It is built when the package is installed, if there is a C compiler with OpenMP then. Where it is missing torch's own
ops do the same in two to ten times the time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from .fused import Removed, differentiated, fits, nobody_watches

_VERSION = 1  # of native.c: what an editable installation has built may be older than the source
_ARGUMENTS = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 2 + [ctypes.c_float] * len(Removed._fields)


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, removed: Removed) -> Tensor | None:
    """y; or None where there is no kernel: it is for plain tensors on the CPU, in eager, and without gradients.

    Between two large layers all that Python touches comes from main memory: it should not touch much.
    """
    if not nobody_watches() or differentiated(x, weight, bias):  # first, as in fused.py
        return None
    if x.__class__ is not Tensor or x.is_neg() or not x.numel():
        return None
    if (weight is not None and not fits(weight, x)) or (bias is not None and not fits(bias, x)):
        return None
    kernel = _kernel(x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    if kernel is None:
        return None
    x = x.contiguous()
    y, width = torch.empty_like(x), x.size(-1)
    at_weight, at_bias = None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr()
    if kernel(x.data_ptr(), at_weight, at_bias, y.data_ptr(), x.numel() // width, width, *removed):
        raise MemoryError("no memory for a row of CompensatedLayerNorm")
    return y


@functools.cache
def _kernel(dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> Any:
    """By dtypes."""
    float32, bfloat16 = torch.float32, torch.bfloat16
    names = {(float32, float32): "norm_float", (bfloat16, bfloat16): "norm_half", (bfloat16, float32): "norm_mixed"}
    name = names.get((dtype, weight or dtype))
    if name is None or bias not in (None, weight) or _library() is None:
        return None
    kernel = getattr(_library(), name)
    kernel.argtypes = _ARGUMENTS
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
