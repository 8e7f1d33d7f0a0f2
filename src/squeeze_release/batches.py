"""The batch of a call: the first dimension of its first tensor, and of all others that share its size."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import InputError
from .rehearse import Call
from .verify import map_tensors, resized, tensors_in


def one_call(example_inputs: Any, kwargs: dict[str, Any] | None, *, of: str) -> Call:
    """A tensor or a tuple of arguments -> (args, kwargs)."""
    if isinstance(example_inputs, list):
        raise InputError(
            "example_inputs is a list, which stands for several calls",
            where=f"{of}(..., example_inputs)",
            consequence="nothing was done: this is about one way of calling the model",
            remedy="pass one tensor or one tuple of arguments",
        )
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), dict(kwargs or {})


def batch_of(call: Call) -> int:
    """0 where there is none."""
    return next((tensor.shape[0] for tensor in tensors_in(call) if tensor.ndim), 0)


def has_batch(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == batch


def with_batch(call: Call, size: int) -> Call:
    """Cut, or repeated from the start."""
    batch = batch_of(call)
    return map_tensors(call, lambda tensor: resized(tensor, 0, size) if has_batch(tensor, batch) else tensor)
