"""GroupNorm with one group on fewer channels, exact for the full width."""

from __future__ import annotations

import torch
from torch import Tensor

from .formulas import centred_and_scaled, scaled
from .layer_norm import CompensatedLayerNorm
from .state import behind


class CompensatedGroupNorm(CompensatedLayerNorm):
    """GroupNorm with one group that remembers the constant channels it lost: same output on the kept channels.

    A constant channel is the same at every position, so the statistics over channels and positions are completed by
    the same three numbers as those of `CompensatedLayerNorm`, whose formulas these are.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) != self._kept:
            shape = tuple(x.shape)
            raise RuntimeError(f"CompensatedGroupNorm keeps {self._kept} channels, got an input of shape {shape}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = centred_and_scaled(wide, tuple(range(1, x.dim())), self._kept, self.statistics, self.eps)
        weight, bias = (None if p is None else p.view(-1, *[1] * (x.dim() - 2)) for p in (self.weight, self.bias))
        return behind(self, scaled(y, weight, bias).to(x.dtype))
