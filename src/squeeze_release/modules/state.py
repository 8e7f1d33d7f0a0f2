"""What a stand-in takes over from the module it stands for, and what it keeps when it is moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a stand-in takes over: Parameters and hooks are shared, so that optimizers and hook handles stay good."""
    own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    return vars(module) | {name: vars(module)[name].copy() for name in own}


def behind(module: nn.Module, x: Tensor) -> Tensor:
    """What a norm with an activation of its own does with its result."""
    for name, child in module.named_children():
        x = x if name == "parametrizations" else child(x)
    return x


class CompensatedNorm(nn.Module):
    """What compensated norms share: `statistics` of the channels they lost, a buffer that follows their device.

    It does not follow their dtype, for in half precision a sum of squares overflows. Eager code reads numbers derived
    of it, and `_known` is the buffer as it was then: torch.func.functional_call puts another in place without asking.
    A compiler is given the buffer itself.
    """

    statistics: Tensor
    _known: Tensor
    _kept: int
    _removed: int
    _DERIVED_FROM: ClassVar[tuple[str, ...]] = ("statistics", "weight")

    def _begin(self, kept: int, statistics: int, device: torch.device | str | None) -> None:
        """With no channel lost."""
        self._kept = kept
        self.register_buffer("statistics", torch.zeros(statistics, device=device, dtype=torch.float64))
        self._take(*[0.0] * statistics)  # _derive does not, of a buffer without numbers
        self._derive()

    @property
    def normalized_shape(self) -> tuple[int]:
        """The kept width, that of the weight; settable for a norm without one."""
        return (self._kept,)

    @normalized_shape.setter
    def normalized_shape(self, shape: tuple[int]) -> None:
        self._kept = shape[0]
        self._derive()

    def merge(self, constants: Tensor) -> None:
        """Remember more removed channels, by their constants."""
        raise NotImplementedError

    @property
    def removed(self) -> int:
        """How many channels are gone: K."""
        return self._removed

    @property
    def count(self) -> Tensor:
        return self.statistics[0]

    def _derive(self) -> None:
        weight = getattr(self, "weight", None)
        self._kept = self._kept if weight is None else weight.numel()
        if not self.statistics.is_meta:
            self._take(*self.statistics.tolist())
        self._known = self.statistics

    def _take(self, count: float, *statistics: float) -> None:
        """Derive what forward reads."""
        self._removed = int(count)

    def _reads_numbers(self) -> bool:
        return not is_compiling() and self._buffers["statistics"] is self._known

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
        if name in self._DERIVED_FROM and "_known" in vars(self):
            self._derive()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._derive()
