"""GroupNorm with one group on fewer channels, exact for the full width."""

from __future__ import annotations

import torch
from torch import Tensor

from .layer_norm import CompensatedLayerNorm
from .state import behind


class CompensatedGroupNorm(CompensatedLayerNorm):
    """GroupNorm with one group that remembers the constant channels it lost: same output on the kept channels.

    A constant channel is the same at every position, so the statistics over channels and positions are completed by
    the same three numbers as those of `CompensatedLayerNorm`, whose formulas these are.
    """

    def forward(self, x: Tensor) -> Tensor:
        kept, gone = self._kept, self._removed
        width = kept + gone
        if x.size(1) != kept:
            raise RuntimeError(f"CompensatedGroupNorm keeps {kept} channels, got an input of shape {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, base = self._mean32, self._base32
        if x.dtype == torch.float64:
            mean, base = self.mean, self.m2 / width + self.eps
        var, mu = torch.var_mean(wide, tuple(range(1, x.dim())), correction=0, keepdim=True)
        shift = mu - mean
        var = var * (kept / width) + shift.square() * (kept * gone / width**2)
        y = (wide - (mean + shift * (kept / width))) * torch.rsqrt(var + base)
        weight, bias = (None if p is None else p.view(-1, *[1] * (x.dim() - 2)) for p in (self.weight, self.bias))
        y = y if weight is None else y * weight
        return behind(self, (y if bias is None else y + bias).to(x.dtype))
