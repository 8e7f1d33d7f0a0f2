"""What a stand-in takes over from the module it stands for, and what it keeps when it is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a stand-in takes over: Parameters and hooks are shared, so that optimizers and hook handles stay good."""
    own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    return vars(module) | {name: vars(module)[name].copy() for name in own}


def behind(module: nn.Module, x: Tensor) -> Tensor:
    """What a norm with an activation of its own does with its result."""
    for name, child in module.named_children():
        x = x if name == "parametrizations" else child(x)
    return x


class KeepsFloat64(nn.Module):
    """A module whose buffers follow its device but not its dtype: in half precision a sum of squares overflows."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self
