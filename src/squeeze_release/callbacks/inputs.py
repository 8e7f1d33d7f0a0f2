"""Example inputs, as the user gives them or as the model is first called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..rehearse import Call


def as_call(example: Any) -> Call:
    """A tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(example, dict):
        return (), dict(example)
    return example if isinstance(example, tuple) else (example,), {}


class Watch:
    """Notes what a model is first called with."""

    def __init__(self, model: nn.Module, leave_out: Iterable[str] = ()) -> None:
        self._name, self._leave_out, self._call = type(model).__name__, set(leave_out), None
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    _call: Call | None

    def _note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None:
            kept = {name: value for name, value in kwargs.items() if name not in self._leave_out}
            # Cloned: the model may write into what it is given.
            call: Call = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kept))
            self._call = call

    def seen(self, remedy: str) -> Call:
        self.close()
        if self._call is None:
            raise InputError(
                f"the forward of {self._name} was not called in the first batch",
                where="example_inputs",
                consequence="there is nothing to squeeze it with; nothing was pruned",
                remedy=f"give example_inputs=; or {remedy}",
            )
        return self._call

    def close(self) -> None:
        self._hook.remove()
