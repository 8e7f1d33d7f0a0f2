"""Rows centred and scaled by full-width statistics, in torch's own ops, for a compiler to make kernels of.

What pays differs: where mean and scale of a row are kept in memory they are worked out once, but that is another pass
over rows. All of these are the formula of `CompensatedLayerNorm`, and take what it stores: K, m_R and M2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import statically_known_true

FEW = 65536  # entries: on a CPU one more pass over their rows takes longer than it saves


def normalized(x: Tensor, kept: int, statistics: Tensor, eps: float) -> Tensor:
    """Along the last dimension, in the way that is fastest when compiled for inference: about F.layer_norm's time."""
    # With gradients it is autograd that keeps what it needs.
    inference = is_dynamo_compiling() and not torch.is_grad_enabled()
    if inference and x.is_cuda:
        return _on_a_gpu(x, kept, statistics, eps)
    if inference and not statically_known_true(x.numel() <= FEW):  # of sizes that are left open, large ones cost more
        return _of_many_rows(x, kept, statistics, eps)
    return _of_few_rows(x, kept, statistics, eps)


def centred_and_scaled(x: Tensor, dims: int | tuple[int, ...], kept: int, statistics: Tensor, eps: float) -> Tensor:
    centre, scale = _centre_and_scale(x, dims, kept, statistics, eps)
    return (x - centre) * scale


def _centre_and_scale(
    x: Tensor, dims: int | tuple[int, ...], kept: int, statistics: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    var, mu = torch.var_mean(x, dims, correction=0, keepdim=True)
    count, mean, m2 = statistics.to(x.dtype)
    width, away = count + kept, mu - mean
    live, gone = kept / width, count / width
    # Scaled before they are added up: the sum of squares of large numbers overflows where their mean does not.
    var = var * live + away.square() * (live * gone) + (m2 / width + eps)
    return mu - away * gone, var.rsqrt()


def _on_a_gpu(x: Tensor, kept: int, statistics: Tensor, eps: float) -> Tensor:
    """In one sum, which inductor splits better there than two; of so long an expression it would make two kernels."""
    centre, scale = (_in_memory(each) for each in _centre_and_scale(x, -1, kept, statistics, eps))
    return (x - centre) * scale


def _of_many_rows(x: Tensor, kept: int, statistics: Tensor, eps: float) -> Tensor:
    """In two sums; between them, and behind, what is known of a row is worked out for 16 rows at once."""
    count, mean, m2 = statistics.to(x.dtype)
    inverse = 1 / (count + kept)
    live, gone = kept * inverse, count * inverse
    mu = _in_memory(x.sum(-1, True) * inverse + gone * mean)
    square = ((x - mu).square() * (1 / kept)).sum(-1, True)  # scaled first, for it may overflow
    var = square * live + (mu - mean).square() * gone + (m2 * inverse + eps)
    return (x - mu) * _in_memory(var.rsqrt())


def _of_few_rows(x: Tensor, kept: int, statistics: Tensor, eps: float) -> Tensor:
    """All that the removed channels add goes into the two sums, with every kept channel a part of it.

    That makes one loop over rows; and with gradients, however many rows there are, as few kernels as there can be.
    """
    count, mean, m2 = statistics.to(x.dtype)
    width = count + kept
    inverse, gone = 1 / width, count / width / kept
    mu = (x * inverse + gone * mean).sum(-1, True)
    square = (mu - x).square() * inverse + ((mu - mean).square() * gone + (m2 * inverse + eps) / kept)
    y: Tensor = (x - mu) * square.sum(-1, True).rsqrt()
    return y


def _in_memory(each: Tensor) -> Tensor:
    """What is viewed like this must be in memory, so that inductor works it out once, and not for each entry again."""
    return each.as_strided(each.shape, each.stride())


def scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
