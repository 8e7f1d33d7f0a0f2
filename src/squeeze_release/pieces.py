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


# Weights of affine ops, as (groups, rows a group, columns a group, taps); vectors run over all columns or all rows.


def read_columns(matrix: Tensor, rows: Tensor | None = None) -> Tensor:
    """Which columns have a non-zero entry in any row, or in any of these."""
    groups, _, width, _ = matrix.shape
    read = torch.zeros((groups, width), dtype=torch.bool)
    wanted = None if rows is None else rows.reshape(groups, -1, 1)
    for span in spans(matrix, 1):
        nonzero = _nonzero(matrix[:, span])
        read |= (nonzero if wanted is None else nonzero & wanted[:, span]).any(1)
    return read.reshape(-1)


def constant_rows(matrix: Tensor, c: Tensor) -> Tensor:
    """W c in float64 for the rows that read nothing but known numbers; NaN for those that read a NaN of c."""
    groups, height, width, _ = matrix.shape
    c = c.reshape(groups, 1, width)
    values = torch.full((groups, height), torch.nan, dtype=torch.float64)
    for span in spans(matrix, 1):
        piece = matrix[:, span]
        known = ~(_nonzero(piece) & c.isnan()).any(2)
        if bool(known.any()):
            numbers = c.nan_to_num(0.0).expand(*known.shape, width)[known]
            values[:, span][known] = (piece[known].double().sum(2) * numbers).sum(1)
    return values


def matvec(matrix: Tensor, c: Tensor) -> Tensor:
    """W c in float64, all taps alike."""
    c = c.reshape(len(matrix), 1, -1)
    parts = [(matrix[:, span].double().sum(3) * c).sum(2) for span in spans(matrix, 1)]
    return torch.cat(parts, 1).reshape(-1)


def _nonzero(matrix: Tensor) -> Tensor:
    nonzero = matrix != 0
    return nonzero.any(3) if matrix.size(3) > 1 else nonzero.squeeze(3)
