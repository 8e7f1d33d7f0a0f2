"""A norm by the standard deviation, uncentred, on fewer channels, exact for the full width."""

from __future__ import annotations

import torch
from torch import Tensor

from .formulas import scaled
from .layer_norm import CompensatedLayerNorm
from .state import behind


class CompensatedStdNorm(CompensatedLayerNorm):
    """x / std(x) that remembers the constant channels it lost: same output on the kept channels, at the kept width.

    timm's SimpleNorm. The variance is that of `CompensatedLayerNorm`, over C - 1; the mean is not taken off.
    """

    def forward(self, x: Tensor) -> Tensor:
        kept, dim = self._kept, self.channel_dim
        if x.size(dim) != kept:
            raise RuntimeError(f"CompensatedStdNorm keeps {kept} channels, got an input of shape {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        var, mu = torch.var_mean(wide, dim, correction=0, keepdim=True)
        count, mean, m2 = self.statistics.to(wide.dtype)
        width = count + kept
        squares = var * kept + (mu - mean).square() * (kept * count / width) + m2
        y = wide * torch.rsqrt(squares / (width - 1) + self.eps)
        shape = [-1] if dim == -1 else [-1, *[1] * (x.dim() - 2)]
        weight, bias = (None if p is None else p.view(shape) for p in (self.weight, self.bias))
        return behind(self, scaled(y, weight, bias).to(x.dtype))
