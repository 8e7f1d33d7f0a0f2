"""Everything in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOW = (torch.float32, torch.float16, torch.bfloat16)


class Float64(TorchFunctionMode):
    """Casts to lower precision are lifted: transformers computes some norms and softmaxes in float32."""

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            return args[0].double()
        args = tuple(torch.float64 if isinstance(a, torch.dtype) and a in _LOW else a for a in args)
        if kwargs.get("dtype") in _LOW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
