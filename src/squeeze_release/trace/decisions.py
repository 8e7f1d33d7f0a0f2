"""Branches that the code takes on a tensor it has made itself.

`if padding.any()` stops torch.export, which knows no numbers, even where `padding` comes from `torch.zeros`. What
depends on no input and no parameter is the same in every call, so a run in eager says which way the code goes, and the
trace goes that way too. As with a branch on a shape, the trace then speaks for calls of this shape.

A branch on anything else is not decided: torch.export refuses it, and so do we.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_NUMBERS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "item", "tolist", "numpy", "__array__")
_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "exponential", "uniform", "empty")


class Decisions(TorchFunctionMode):
    """A run in eager, with notes: for every truth value that was asked for, what it was, or None if it may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bool | None] = []
        self._made: dict[int, Tensor] = {}  # tensors that depend on nothing; held, so that an id is not used again
        self._open = True  # until a number of a tensor that comes in gets out into the code, or into what was made

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = all(id(tensor) in self._made for tensor in given) and not any(word in name for word in _RANDOM)
        if func is Tensor.__bool__:
            self.taken.append(out if made and self._open else None)
        if not made:
            self._open &= name not in _NUMBERS and not (self._writes(name, kwargs) and self._any_made(given))
        elif self._open:
            self._made |= {id(leaf): leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)}
        return out

    def _any_made(self, tensors: list[Tensor]) -> bool:
        return any(id(tensor) in self._made for tensor in tensors)

    @staticmethod
    def _writes(name: str, kwargs: dict[str, Any] | None) -> bool:
        inplace = name.endswith("_") and not name.endswith("__")
        return inplace or name.startswith(("__set", "__i")) or "out" in (kwargs or {})


class Decided(TorchFunctionMode):
    """The same run again, where no numbers are known: the truth values that were noted."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._taken = iter(decisions.taken)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__bool__:
            known = next(self._taken, None)
            if known is not None:
                return known
        return func(*args, **(kwargs or {}))
