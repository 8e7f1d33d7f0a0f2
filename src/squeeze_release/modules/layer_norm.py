"""LayerNorm on fewer channels, exact for the full width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .formulas import normalized, scaled
from .kernels import fused, shortest
from .kernels.inputs import Removed, nobody_watches, output_dtype
from .state import CompensatedNorm, behind


class CompensatedLayerNorm(CompensatedNorm):
    """LayerNorm that remembers the constant channels it lost: same output on the kept channels, at the kept width.

    Of the K removed channels it stores `count` K, `mean` m_R and `m2`, the sum of squared deviations, in float64. With
    m kept channels of mean mu_A and variance var_A, and C = m + K, the full-width statistics are

        mu = (m mu_A + K m_R) / C        var = (m var_A + M2 + (m K / C) (mu_A - m_R)^2) / C

    the paper's equation (1), arranged so that nothing cancels. The three are one buffer, `statistics`, that follows
    the module's device, never its dtype: in half precision M2 would overflow. Change it by `merge`, `load_state_dict`
    or assignment, not in place.

    In eager it is one kernel (`kernels/`): on an NVIDIA GPU with Triton forward and backward, on a CPU where nothing is
    differentiated. Elsewhere it is torch's own ops.
    """

    _DERIVED_FROM = ("statistics", "weight", "eps")
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    _numbers: Removed

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        channel_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim is -1 (last) or 1 (channels first), not {channel_dim}")
        self.eps, self.channel_dim = eps, channel_dim
        one, zero = (fill(normalized_shape, device=device, dtype=dtype) for fill in (torch.ones, torch.zeros))
        self.register_parameter("weight", nn.Parameter(one) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(zero) if elementwise_affine and bias else None)
        self._begin(normalized_shape, 3, device)

    def merge(self, constants: Tensor) -> None:
        """Remember more removed channels, by their constants: the pairwise update of Chan et al., in float64."""
        new = constants.detach().to(self.statistics).flatten()
        if new.numel():
            count, mean, m2 = self.statistics
            delta, share = new.mean() - mean, new.numel() / (count + new.numel())
            m2 = m2 + (new - new.mean()).square().sum() + delta.square() * count * share
            self.statistics = torch.stack([count + new.numel(), mean + delta * share, m2])

    @property
    def mean(self) -> Tensor:
        return self.statistics[1]

    @property
    def m2(self) -> Tensor:
        return self.statistics[2]

    @property
    def S(self) -> Tensor:
        """The paper's S, the sum of the removed constants."""
        return self.count * self.mean

    @property
    def Q(self) -> Tensor:
        """The paper's Q, the sum of their squares."""
        return self.m2 + self.count * self.mean.square()

    def forward(self, x: Tensor) -> Tensor:
        first = self.channel_dim == 1
        image = first and x.dim() == 4
        if first and not image:
            x = x.movedim(1, -1)
        out = None if is_dynamo_compiling() else shortest.normalize(x, self.__dict__, image)
        if out is None:
            out = self._elsewhere(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if image else self._elsewhere(x)
        if first and not image:
            out = out.movedim(-1, 1)
        return behind(self, out) if self._modules else out

    def _elsewhere(self, x: Tensor) -> Tensor:
        if not self._reads_numbers():
            return self._written_out(x)
        own = self._parameters
        # Where they are parameters, as they mostly are, this spares a microsecond.
        found = "weight" in own and "bias" in own
        weight, bias = (own["weight"], own["bias"]) if found else (self.weight, self.bias)
        _check(x, self._kept)
        dtype = output_dtype(x)
        if x.is_cuda and fused.applies(x, weight, bias):
            return fused.normalize(x, weight, bias, self._numbers, dtype)
        # float32 inside, one rounding at the end, as F.layer_norm does
        half = x.dtype is torch.float16 or x.dtype is torch.bfloat16
        return self._normalize(x.float(), weight, bias).to(dtype) if half else self._normalize(x, weight, bias)

    def _normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        mean, share, _, base, inverse = self._numbers
        x = x.contiguous()  # as F.layer_norm's output is; and a norm over a strided dimension costs ten copies
        # In the fewest passes: y is centred on the full mean, and then C var = |y|^2 + M2 + K (mu - m_R)^2.
        mu: Tensor = x.sum(-1, True) * inverse + share * mean
        y, shift = x - mu, mu - mean
        norm = torch.linalg.vector_norm(y, 2, -1, True)
        rstd = torch.addcmul(shift.square() * share + base, norm, norm, value=inverse).rsqrt()
        if not torch.is_grad_enabled() and nobody_watches():
            # Only y is large, so nothing else need be allocated: fresh pages cost more than the arithmetic.
            y = y.mul_(rstd)
            if weight is None or bias is None:
                y = y if weight is None else y.mul_(weight)
                return y if bias is None else y.add_(bias)
            return torch.addcmul(bias, y, weight, out=y)
        y = y * rstd
        return scaled(y, weight, bias) if weight is None or bias is None else torch.addcmul(bias, y, weight)

    def _written_out(self, x: Tensor) -> Tensor:
        """Of the statistics that are there, whoever put them there."""
        _check(x, self._kept)
        x = x.contiguous()  # as F.layer_norm's output is
        wide = x if x.dtype == torch.float64 else x.float()
        if self._kept:
            wide = normalized(wide, self._kept, self.statistics, self.eps)
        y = scaled(wide, self.weight, self.bias)
        return y.to(output_dtype(x)) if x.is_floating_point() else y

    def _take(self, count: float, *statistics: float) -> None:
        super()._take(count)
        mean, m2 = statistics
        self._numbers = Removed.of(self._kept, self._removed, mean, m2, self.eps)

    def extra_repr(self) -> str:
        return f"{self._kept}, removed={self.removed}, eps={self.eps}, channel_dim={self.channel_dim}"


def _check(x: Tensor, kept: int) -> None:
    if x.shape[-1:] != (kept,):
        raise RuntimeError(f"CompensatedLayerNorm keeps {kept} channels, got an input of shape {tuple(x.shape)}")
