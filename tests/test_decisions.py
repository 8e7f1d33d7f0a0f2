"""Branches on tensors: those that the code made itself are taken as in eager, all others are refused."""

from __future__ import annotations

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand, unread
from torch import Tensor, nn

import squeeze_release as sr


def net(branch) -> Net:
    def run(s: Net, x: Tensor) -> Tensor:
        h = torch.tanh(s.lin(x))
        return s.out(h if branch(s, x) else h * 2)

    model = noisy(Net(run, lin=nn.Linear(4, 6), out=nn.Linear(6, 3)))
    unread(model.out, 2)
    model.register_buffer("limit", torch.tensor(0.5))
    return model


MADE = [
    lambda s, x: torch.zeros(len(x), dtype=torch.bool).any(),
    lambda s, x: (~torch.ones(x.shape, dtype=torch.bool)).any() or (torch.arange(3) > 1).any(),
    lambda s, x: torch.ones_like(torch.zeros(2)).masked_fill_(torch.zeros(2).bool(), 0.0).all(),
]


def written(x: Tensor) -> Tensor:
    made = torch.zeros(x.shape)
    made.copy_(x)
    return made


# Each depends on what comes in, or on numbers that may be trained, or on chance.
OPEN = [
    lambda s, x: x.sum() > 0,
    lambda s, x: (torch.zeros(1) + x.mean()).any(),
    lambda s, x: s.limit > 0,
    lambda s, x: s.lin.weight.sum() > 0,
    lambda s, x: written(x).any(),
    lambda s, x: torch.rand(()) > 0.5,
]


@pytest.mark.parametrize("branch", MADE)
def test_a_branch_on_what_the_code_made(branch) -> None:
    check(net(branch), rand(3, 4), golden={"lin.out_features": 5})


@pytest.mark.parametrize("branch", OPEN)
def test_a_branch_on_anything_else_is_refused(branch) -> None:
    with pytest.raises(sr.SqueezeError):
        sr.squeeze(net(branch).double(), rand(3, 4))


def test_what_a_number_that_got_out_made_is_open() -> None:
    """The code makes a tensor of a number that it read off the input."""
    with pytest.raises(sr.SqueezeError):
        sr.squeeze(net(lambda s, x: torch.full((2,), float(x.sum())).any()).double(), rand(3, 4))


# ------------------------------------------------------------------------ what such code does with tensors that it made


def lookup(s: Net, x: Tensor) -> Tensor:
    """Gemma 4: positions are looked up by a product with ones and zeros, and are 0 for padding."""
    ones = nn.functional.one_hot(torch.arange(x.size(1)), num_classes=8).to(s.table)
    places = torch.where(torch.zeros(x.size(1), 1).bool(), 0.0, (ones @ s.table).sum(0))
    return s.out(torch.clamp(s.lin(x) + places, s.low, s.high))


def positions() -> Net:
    model = noisy(Net(lookup, lin=nn.Linear(4, 6), out=nn.Linear(6, 3)))
    model.table = nn.Parameter(torch.randn(2, 8, 6, dtype=torch.float64))
    model.register_buffer("low", torch.tensor(-1.0))
    model.register_buffer("high", torch.tensor(0.75))
    dead(model.lin, 1, bias=0.5)
    dead(model.lin, 4, bias=2.0)  # which is cut to 0.75
    return model


def test_a_table_with_columns_of_zeros_leaves_a_constant_one() -> None:
    model = positions()
    model.table.data[..., [1, 4]] = 0
    check(model, rand(2, 5, 4), golden={"lin.out_features": 4, "table": (2, 8, 4), "out.in_features": 4})


def test_a_table_with_one_entry_does_not() -> None:
    model = positions()
    model.table.data[..., [1, 4]] = 0
    model.table.data[1, 3, 4] = 0.1
    check(model, rand(2, 5, 4), golden={"lin.out_features": 5, "table": (2, 8, 5)})


def test_a_choice_between_two_constants_is_none() -> None:
    def run(s: Net, x: Tensor) -> Tensor:
        h = s.lin(x)
        return s.out(torch.where(x[:, :1] > 0, h, 0.25)) + s.more(h.masked_fill(x[:, :1] > 0, 0.25))

    model = noisy(Net(run, lin=nn.Linear(4, 6), out=nn.Linear(6, 3), more=nn.Linear(6, 3)))
    dead(model.lin, 1, bias=0.25)  # the same on either side
    dead(model.lin, 4, bias=0.5)
    check(model, rand(3, 4), golden={"lin.out_features": 5})


class PlainRMS(nn.Module):
    """timm's RmsNorm without weights: only its shape says how wide it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (width,), 1e-5
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Doubled(PlainRMS):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_norm_without_weights_loses_constants() -> None:
    model = noisy(nn.Sequential(nn.Linear(4, 6), PlainRMS(6), nn.Linear(6, 3)))
    dead(model[0], 1, bias=0.0)
    dead(model[0], 3, bias=0.5)
    unread(model[2], 3)
    check(model, rand(3, 4), golden={"0.out_features": 4, "1": sr.modules.CompensatedRMSNorm})


def test_what_only_looks_like_one_does_not() -> None:
    model = noisy(nn.Sequential(nn.Linear(4, 6), Doubled(6), nn.Linear(6, 3)))
    dead(model[0], 1, bias=0.0)
    check(model, rand(3, 4), golden={"0.out_features": 6, "1": Doubled})
