"""Everything in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = (torch.float32, torch.float16, torch.bfloat16)


class Float64(TorchFunctionMode):
    """Casts to lower precision are lifted: transformers computes some norms and softmaxes in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16) and args[0].dtype is torch.float64:
            return args[0]
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a for a in args)
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
