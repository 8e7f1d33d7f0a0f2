"""Which layers write a stream: channels that several layers write, as a residual sum, or that several layers read.

All others write inner channels, from one layer to the next.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from leaves import Leaf
from precision import Float64
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

Call = tuple[tuple[Any, ...], dict[str, Any]]

_ADDS = {"add", "radd", "iadd", "sub", "isub"}


class _Writers(Float64):
    """Follows what layers write from function to function; batch norms and other norms are functions like all else."""

    def __init__(self) -> None:
        super().__init__()
        self.of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> the layers that wrote it
        self.added: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {names for names in map(self.writers, _tensors((args, kwargs))) if names}
        out = super().__torch_function__(func, types, args, kwargs)
        names = frozenset().union(*given)
        if len(given) > 1 and func.__name__.strip("_") in _ADDS:
            self.added |= names
        for tensor in _tensors(out) if names else ():
            self.of[tensor] = names
        return out

    def writers(self, tensor: Tensor) -> frozenset[str]:
        found: frozenset[str] = self.of.get(tensor, frozenset())
        return found


@torch.no_grad()
def stream_writers(model: nn.Module, call: Call, leaves: dict[str, Leaf]) -> set[str]:
    """The names of the layers whose channels are a stream."""
    mode = _Writers()
    readers: dict[str, set[str]] = {}

    def hook(name: str) -> Any:
        def look(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            for tensor in _tensors((args, kwargs)):
                for writer in mode.writers(tensor):
                    readers.setdefault(writer, set()).add(name)
            for tensor in _tensors(output):
                mode.of[tensor] = frozenset({name})

        return look

    layers = {n: leaf for n, leaf in leaves.items() if not leaf.is_norm}
    with ExitStack() as stack:
        for name, leaf in layers.items():
            stack.callback(leaf.module.register_forward_hook(hook(name), with_kwargs=True).remove)
        stack.enter_context(mode)
        model(*call[0], **call[1])
    return mode.added | {name for name, others in readers.items() if len(others) > 1}


def _tensors(tree: Any) -> list[Tensor]:
    with torch._C.DisableTorchFunction():
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
