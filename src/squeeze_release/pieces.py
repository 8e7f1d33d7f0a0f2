"""Big tensors a piece at a time, so that what is computed from them on the way takes next to no memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST = 2**20  # entries of a piece; it should fit into a processor's cache


def spans(tensor: Tensor, dim: int = 0) -> Iterator[slice]:
    """Slices of a dimension that cover it, short enough that what they cut out of the tensor is small."""
    length = tensor.size(dim)
    step = max(1, _MOST * length // max(1, tensor.numel()))
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def nonzero_rows(matrix: Tensor) -> Tensor:
    """Per index of dimension 0: is any entry not 0?"""
    return torch.cat([(matrix[span] != 0).flatten(1).any(1) for span in spans(matrix)])


def nonzero_columns(matrix: Tensor) -> Tensor:
    """Per index of dimension 1: is any entry not 0?"""
    found = torch.zeros(matrix.size(1), dtype=torch.bool, device=matrix.device)
    for span in spans(matrix):
        found |= (matrix[span] != 0).transpose(0, 1).flatten(1).any(1)
    return found


def constant_columns(matrix: Tensor) -> Tensor:
    """Per column of a 2-d tensor: does it hold one and the same number?"""
    same = torch.ones(matrix.size(1), dtype=torch.bool, device=matrix.device)
    for span in spans(matrix):
        same &= (matrix[span] == matrix[:1]).all(0)
    return same
