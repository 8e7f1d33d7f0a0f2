"""What a stand-in takes over from the module it stands for, and what it keeps when it is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling


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
    """A module whose buffers follow its device but not its dtype: in half precision a sum of squares overflows.

    What forward reads are numbers derived of its _STATISTICS. `_known` are these buffers, as they were then.
    """

    _STATISTICS: ClassVar[tuple[str, ...]]
    _known: tuple[Tensor | None, ...]

    def _as_derived(self) -> bool:
        """Whether the numbers are those of the buffers: torch.func.functional_call puts others in place without asking.

        So does an export without dynamo, but those are fakes of the same numbers.
        """
        return self._are_known() or (is_compiling() and not is_dynamo_compiling())

    def _are_known(self) -> bool:
        own = self._buffers
        return all(own[name] is known for name, known in zip(self._STATISTICS, self._known, strict=True))

    def _now_known(self) -> None:
        self._known = tuple(self._buffers[name] for name in self._STATISTICS)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        known = self._are_known()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        if known:
            self._now_known()  # the same numbers, elsewhere
        return self
