"""RMSNorm on fewer channels, exact for the full width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .state import CompensatedNorm, behind


class CompensatedRMSNorm(CompensatedNorm):
    """RMSNorm that remembers the constant channels it lost: same output on the kept channels, at the kept width.

    Of the K removed channels it stores `count` K and `squares`, the sum of their squares, in float64. With m kept
    channels the mean square is (|x|^2 + squares) / (m + K). The two are one buffer, `statistics`, which follows the
    module's device, never its dtype.

    weight_offset: what is added to the weight (Gemma stores it as its difference from 1).
    eps: None means that of the input's dtype, as for nn.RMSNorm.
    """

    weight: nn.Parameter | None
    _inverse: float
    _squares: float

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        weight_offset: float = 0.0,
        channel_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim is -1 (last) or 1 (channels first), not {channel_dim}")
        self.eps, self.weight_offset, self.channel_dim = eps, weight_offset, channel_dim
        one = torch.full((normalized_shape,), 1.0 - weight_offset, device=device, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(one) if elementwise_affine else None)
        self._begin(normalized_shape, 2, device)

    def merge(self, constants: Tensor) -> None:
        """Remember more removed channels, by their constants."""
        new = constants.detach().to(self.statistics).flatten()
        self.statistics = torch.stack([self.count + new.numel(), self.squares + new.square().sum()])

    @property
    def squares(self) -> Tensor:
        return self.statistics[1]

    def forward(self, x: Tensor) -> Tensor:
        kept = self._kept
        if x.shape[self.channel_dim] != kept:
            raise RuntimeError(f"CompensatedRMSNorm keeps {kept} channels, got an input of shape {tuple(x.shape)}")
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        norm = torch.linalg.vector_norm(wide, 2, self.channel_dim, True)
        inverse, squares = self._numbers(wide.dtype)
        y: Tensor = wide * (norm.square() * inverse + (squares * inverse + eps)).rsqrt()
        if self.weight is not None:
            weight = self.weight + self.weight_offset if self.weight_offset else self.weight
            y = y * (weight if self.channel_dim == -1 else weight.reshape(-1, *[1] * (x.dim() - 2)))
        return behind(self, y.to(x.dtype))

    def _numbers(self, dtype: torch.dtype) -> tuple[float, float] | tuple[Tensor, Tensor]:
        if self._reads_numbers():  # in eager each op on a tensor of one number would start a kernel
            return self._inverse, self._squares
        count, squares = self.statistics.to(dtype)
        return 1 / (count + self._kept), squares

    def _take(self, count: float, *statistics: float) -> None:
        super()._take(count)
        (self._squares,) = statistics
        self._inverse = 1 / max(1, self._kept + self._removed)

    def extra_repr(self) -> str:
        return f"{self._kept}, removed={self.removed}, eps={self.eps}, channel_dim={self.channel_dim}"
