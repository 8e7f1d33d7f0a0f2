"""Layers that compute some of their outputs and place them among constants, against the layers they stand in for."""

from __future__ import annotations

import copy

import pytest
import torch
from check import close
from torch import nn

from squeeze_release.modules import PlacedConv1d, PlacedConv2d, PlacedConv3d, PlacedLinear, with_index, with_place

F64 = torch.float64


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(6, 9), (2, 5, 6)),
        (nn.Conv1d(6, 9, 3, padding=1), (2, 6, 5)),
        (nn.Conv2d(6, 9, 3, padding=1, padding_mode="reflect"), (2, 6, 5, 4)),
        (nn.Conv2d(6, 9, (1, 3)), (6, 5, 4)),  # without a batch
        (nn.Conv3d(6, 9, 2, stride=2), (2, 6, 5, 4, 4)),
    ],
)
def test_placed_modules(layer: nn.Module, shape: tuple[int, ...], bias: bool) -> None:
    layer = copy.deepcopy(layer).double()
    if not bias:
        layer.register_parameter("bias", None)
    x, live = torch.randn(shape, dtype=F64), torch.tensor([7, 1, 2, 5])
    with torch.no_grad():
        layer.weight[[0, 3, 4, 6, 8]] = 0
    placed = with_place(layer, live)
    assert type(placed) in (PlacedLinear, PlacedConv1d, PlacedConv2d, PlacedConv3d)
    close(placed(x), layer(x))
    with torch.no_grad():
        layer.weight[7], placed.weight[0] = 0, 0
    twice = with_place(placed, torch.tensor([1, 2, 3]))
    close(twice(x), layer(x))
    assert len(twice.weight) == 3 and len(twice.fill) == 6 and len(placed.weight) == 4
    # Columns of zeros go as well, before or after.
    columns = torch.tensor([1, 2, 4])
    with torch.no_grad():
        layer.weight[:, [0, 3, 5]] = 0
    narrow = copy.deepcopy(twice)
    narrow.weight = nn.Parameter(layer.weight[[1, 2, 5]][:, columns])
    setattr(narrow, "in_features" if isinstance(layer, nn.Linear) else "in_channels", 3)
    close(with_index(narrow, columns)(x), layer(x))
    again = type(twice)(
        *((3, 3) if isinstance(layer, nn.Linear) else (3, 3, layer.kernel_size, layer.stride, layer.padding)),
        bias=bias,
        **({} if isinstance(layer, nn.Linear) else {"padding_mode": layer.padding_mode}),
        place=twice.place,
        fill=twice.fill,
        index=columns,
    ).double()
    again.load_state_dict(with_index(narrow, columns).state_dict())
    close(again(x), layer(x))
    assert "placed among 9" in repr(again)
