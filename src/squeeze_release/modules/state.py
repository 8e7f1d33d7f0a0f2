"""What a stand-in takes over from the module it stands for, and what it keeps when it is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
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
    """A norm's `statistics` of the channels it lost: a buffer that follows its device but not its dtype.

    In half precision a sum of squares overflows. What forward reads are numbers derived of the statistics: `_known` is
    this buffer as it was then.
    """

    statistics: Tensor
    _known: Tensor
    _removed: int
    _CHANGES: ClassVar[tuple[str, ...]] = ("statistics",)  # what the numbers are derived of

    def _forget(self, statistics: int, device: torch.device | str | None) -> None:
        """Begin with no channel lost."""
        self.register_buffer("statistics", torch.zeros(statistics, device=device, dtype=torch.float64))
        self._removed = 0
        self._derive()

    @property
    def removed(self) -> int:
        """How many channels are gone: K."""
        return self._removed

    @property
    def count(self) -> Tensor:
        return self.statistics[0]

    def _derive(self) -> None:
        if not self.statistics.is_meta:
            self._take(*self.statistics.tolist())
        self._known = self.statistics

    def _take(self, count: float, *statistics: float) -> None:
        """Derive what forward reads."""
        self._removed = int(count)

    def _as_derived(self) -> bool:
        """Whether the numbers are those of the buffer: torch.func.functional_call puts another in place without asking.

        So does an export without dynamo, but that is a fake of the same numbers.
        """
        return self._buffers["statistics"] is self._known or (is_compiling() and not is_dynamo_compiling())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before, known = self.statistics, self.statistics is self._known
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        new = self.statistics
        if new.dtype != before.dtype:
            new = self._buffers["statistics"] = before.to(new.device)
        if known:
            self._known = new  # the same numbers, elsewhere
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._CHANGES and "_known" in vars(self):
            self._derive()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._derive()
