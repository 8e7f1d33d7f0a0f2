"""Copies of a model: a full one, one that borrows the parameters, and one that holds no weights at all.

Only the first costs the model's memory again. The others have modules, attributes, hooks, buffers and `Parameter`s of
their own, so that whatever is replaced or left behind on them stays theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import ModelError


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy, gradients left out, that also takes models pruned by torch.nn.utils.prune.

    Hooks, train/eval flags, `requires_grad`, tied parameters and memory formats are those of `model`.
    """
    replica = _deepcopy(model, {})
    drop_gradients(replica)
    return replica


def borrow(model: nn.Module) -> nn.Module:
    """A copy whose parameters share their memory with those of `model`: to be replaced, never written to."""
    plain = [parameter for parameter in model.parameters() if type(parameter) is nn.Parameter]  # others know best
    return _deepcopy(model, {id(p): nn.Parameter(p.data, p.requires_grad) for p in plain})


@contextmanager
def borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """Such a copy, to run or trace. What that leaves on its modules goes with it, and weights are let go at the end."""
    copy = borrow(model)
    try:
        yield copy
    finally:
        emptied(copy)


def hollow(model: nn.Module) -> nn.Module:
    """A copy that runs and traces like `model` but has zeros for weights, which take no memory: to try out shapes."""
    return emptied(borrow(model))


def hollow_on_cpu(model: nn.Module) -> nn.Module:
    """The same on the CPU, from whatever device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        there = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(there if parameter.dim() > 1 else parameter.detach().cpu(), False)
    memo |= {id(buffer): buffer.detach().cpu() for buffer in model.buffers()}
    return _deepcopy(model, memo)


def emptied(model: nn.Module) -> nn.Module:
    """In place: every weight becomes one zero, expanded. Vectors and buffers stay: what norms do depends on them."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.new_zeros((1,) * parameter.dim()).expand(parameter.shape)
    return model


def drop_gradients(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.grad = None


def _deepcopy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    try:
        with _CopyWithoutGraph():
            return copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            where=type(model).__name__,
            consequence="it would have to be changed in place, which is never done",
            remedy="take what copy.deepcopy(model) trips over (locks, open files, loggers) off the modules and hooks",
        ) from error


class _CopyWithoutGraph(TorchFunctionMode):
    """deepcopy refuses tensors with a graph behind them; prune leaves one such `weight` in every module it touches."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))
