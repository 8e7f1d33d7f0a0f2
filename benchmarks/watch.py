"""Which norms are read through something that is not linear: there, no carrier can speak for the constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from precision import Float64
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# Functions that move numbers or add them up.
_MOVES = set(
    "permute transpose reshape view flatten unflatten contiguous to float double type_as dropout roll pad mean "
    "sum getitem unbind chunk split split_with_sizes squeeze unsqueeze expand clone movedim swapaxes cat stack concat "
    "select narrow repeat get avg_pool2d adaptive_avg_pool2d avg_pool1d adaptive_avg_pool1d detach alias view_as neg "
    "flip tile set requires_grad".split()
)
_COMBINES = set("add sub mul div rsub radd rmul truediv iadd imul isub".split())


class Watch(Float64):
    """Follows the outputs of norms from function to function."""

    def __init__(self, lent: set[int]) -> None:
        super().__init__()
        self.lent = lent
        self.followed: dict[int, tuple[Tensor, frozenset[str]]] = {}  # with the tensor, so that its id stays its own
        self.found: set[str] = set()

    def follow(self, tensor: Tensor, names: frozenset[str]) -> None:
        self.followed[id(tensor)] = (tensor, names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t): self.followed[id(t)][1] for t in _tensors((args, kwargs)) if id(t) in self.followed}
        others = [t for t in _tensors((args, kwargs)) if id(t) not in self.followed and not isinstance(t, nn.Parameter)]
        out = super().__torch_function__(func, types, args, kwargs)
        names = frozenset().union(*before.values())
        after = [t for t in _tensors(out) if t.is_floating_point()]
        if names and after:
            kind = func.__name__.strip("_")
            if func is F.linear and any(id(t) in self.lent for t in _tensors((args, kwargs))):
                return out
            if kind in _MOVES or (kind in _COMBINES and not others and len(before) == 1):
                for tensor in after:
                    self.follow(tensor, names)
            else:
                self.found |= names
        return out


def _tensors(tree: Any) -> list[Tensor]:
    with torch._C.DisableTorchFunction():
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
