"""Release: zeros that squeezing left inside dense tensors become small trainable noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .errors import check_choice
from .prune import find_targets

POOLS = ("layer", "column")


@torch.no_grad()
def release(
    model: nn.Module, *, scale: float = 0.01, pool: str = "layer", generator: torch.Generator | None = None
) -> int:
    """Turn every exact zero of a prunable weight into a draw from scale * N(mu, sigma^2), in place; returns how many.

    A zero inside a dense tensor costs as much as any weight and does nothing: released, it can be trained again.

    Args:
        scale: 0 leaves the zeros as they are, free to train: the paper's ablation.
        pool: mu and sigma are those of the layer's surviving weights, or of those in the zero's "column", the weights
            that read the same input. A column without two survivors takes the layer's.
        generator: for the draws; on the CPU.

    >>> net = nn.Linear(4, 2)
    >>> with torch.no_grad():
    ...     _ = net.weight[0, 1:].zero_()
    >>> release(net), int(net.weight.count_nonzero())
    (3, 8)
    """
    check_choice("pool", pool, POOLS, of="release", consequence="nothing was released")
    names = [name for target in find_targets(model, conv="element") for name in target.names]
    return sum(_release(model.get_parameter(name), scale, pool, generator) for name in names)


def _release(weight: Tensor, scale: float, pool: str, generator: torch.Generator | None) -> int:
    zero = weight == 0
    count = int(zero.sum())
    if count and scale:
        mu, sigma = _statistics(weight.double(), ~zero, pool)
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
        drawn = (scale * (mu + sigma * noise)).to(weight.dtype)
        weight.copy_(torch.where(zero, drawn, weight))
    return count


def _statistics(weight: Tensor, alive: Tensor, pool: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the surviving weights."""
    mu, sigma, count = _moments(weight, alive, list(range(weight.dim())))
    if float(count) < 2 or not float(sigma):  # next to nothing survived: as a fresh layer would start
        sigma = torch.full_like(sigma, weight[0].numel() ** -0.5)
    if pool == "column" and weight.dim() > 1:
        dims = [dim for dim in range(weight.dim()) if dim != 1]
        column_mu, column_sigma, survivors = _moments(weight, alive, dims)
        enough = survivors >= 2
        mu, sigma = torch.where(enough, column_mu, mu), torch.where(enough, column_sigma, sigma)
    return mu, sigma


def _moments(weight: Tensor, alive: Tensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    count = alive.sum(dims, keepdim=True)
    mu = (weight * alive).sum(dims, keepdim=True) / count.clamp_min(1)
    square = ((weight - mu).square() * alive).sum(dims, keepdim=True) / (count - 1).clamp_min(1)
    return mu, square.sqrt(), count
