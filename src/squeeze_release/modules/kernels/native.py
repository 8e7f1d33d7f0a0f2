"""CompensatedLayerNorm as one kernel on CPUs, where nothing is differentiated: `native.c`.

It is built when the package is installed, if there is a C compiler with OpenMP then. Where it is missing torch's own
ops do the same in two to ten times the time. Python calls it until it was called often, and C++ (`usual`) from then on.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty_like

from .inputs import GONE, Parameter, Plain, Removed, fits

_VERSION = 4  # of native.c: what an editable installation has built may be older than the source
_Numbers = ctypes.c_float * len(Removed._fields)
SMALL = 32768  # entries; of more the arithmetic takes longer than all around it
OFTEN = 1000  # calls with so few


def kernel(
    x: Tensor, weight: Parameter, bias: Parameter, image: bool, in_cpp: Any, often: Callable[[], None]
) -> Plain | None:
    """For inputs like `x` and parameters like these, wherever they lie.

    in_cpp: what `usual` has compiled, if it has. often: called once small inputs were common here.
    """
    width = x.size(1 if image else -1)
    run = _function(x.dtype, width, weight, bias)
    if run is None:
        return None
    calls = 0

    @functools.lru_cache(1024)
    def told(removed: Removed) -> Any:
        return _Numbers(*removed)

    def launch(x: Tensor, weight: Parameter, bias: Parameter, removed: Removed) -> Tensor | None:
        nonlocal calls
        size = x.numel()
        if size <= SMALL:
            calls += 1
            if calls == OFTEN:
                often()
        x = x.permute(0, 2, 3, 1).contiguous() if image else x.contiguous()
        at_x = x.data_ptr()
        at_weight = None if weight is None else weight.data_ptr()
        at_bias = None if bias is None else bias.data_ptr()
        if not (at_x and at_weight != 0 and at_bias != 0):
            if size:
                raise RuntimeError(GONE)
            return None
        y = empty_like(x)
        if run(told(removed), at_x, at_weight, at_bias, y.data_ptr(), size // width, width):
            raise MemoryError("no memory for a row of CompensatedLayerNorm")
        return y.permute(0, 3, 1, 2) if image else y

    return launch if in_cpp is None else in_cpp.Native(ctypes.cast(run, ctypes.c_void_p).value, width, image, launch)


def _function(dtype: torch.dtype, width: int, weight: Parameter, bias: Parameter) -> Any:
    float32, bfloat16 = torch.float32, torch.bfloat16
    names = {(float32, float32): "norm_float", (bfloat16, bfloat16): "norm_half", (bfloat16, float32): "norm_mixed"}
    scale = dtype if weight is None else weight.dtype
    for parameter in (weight, bias):
        if parameter is not None and not (parameter.dtype is scale and fits(parameter, width, -1)):
            return None
    library, name = _library(), names.get((dtype, scale))
    if library is None or name is None or width == 0 or (weight is None and bias is not None):
        return None
    function = getattr(library, name)
    function.argtypes = [_Numbers, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2]
    return function


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
