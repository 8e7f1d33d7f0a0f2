"""Elementwise ops: constants stay constants; channels that meet go together or not at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, unread
from torch import nn

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.SELU(),
    nn.ELU(0.7),
    nn.CELU(1.3),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Hardtanh(-0.2, 0.3),
    nn.ReLU6(),
    nn.LeakyReLU(0.2),
    nn.Softplus(2.0, 1.0),
    nn.Mish(),
    nn.Hardshrink(0.1),
    nn.Softshrink(0.1),
    nn.Softsign(),
    nn.LogSigmoid(),
    nn.Threshold(0.1, 20.0),
    nn.Tanhshrink(),
    nn.RReLU(),
    nn.PReLU(),
    nn.PReLU(6),
    nn.Identity(),
    nn.Dropout(0.5),
    nn.AlphaDropout(0.3),
    nn.ReLU(inplace=True),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_pass_constants(activation):
    net = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))
    noisy(net)
    dead(net[0], 1, 4)
    golden = {"0.out_features": 4, "2.in_features": 4}
    if isinstance(activation, nn.PReLU) and activation.weight.numel() > 1:
        golden |= {"1.weight": (4,), "1.num_parameters": 4}
    if isinstance(activation, nn.RReLU):
        golden = {}  # exact is enough
    # One number for all channels: its gradient loses the part of the channels that became plain numbers.
    shared = isinstance(activation, nn.PReLU) and activation.weight.numel() == 1
    check(net, rand(2, 4), golden=golden, gradients=not shared)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.PReLU(6), nn.Tanh(), nn.Hardtanh()], ids=str)
def test_activations_keep_what_is_read(activation):
    net = noisy(nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3)))
    check(net, rand(2, 4), golden={"0.out_features": 6})


def test_prelu_over_positions():
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.Conv2d(6, 2, 3)))
    dead(net[0], 0, 1)
    with torch.no_grad():
        net[0].bias[:2] = torch.tensor([-0.8, 0.8])
    check(net, rand(1, 3, 6, 6), golden={"0.out_channels": 4, "1.weight": (4,), "2.in_channels": 4})


FUNCTIONS = [
    torch.exp,
    torch.square,
    torch.abs,
    torch.neg,
    torch.sin,
    torch.cos,
    torch.erf,
    torch.expm1,
    torch.atan,
    torch.sign,
    lambda x: x.clamp(-0.2, 0.2),
    lambda x: x.clamp(min=0.1),
    lambda x: torch.clamp_max(x, 0.1),
    lambda x: x**2,
    lambda x: x.abs().sqrt(),
    lambda x: (x.abs() + 1).log(),
    lambda x: torch.rsqrt(x * x + 1),
    lambda x: torch.reciprocal(x * x + 1),
    lambda x: x.round(),
    lambda x: torch.nan_to_num(x),
    lambda x: F.relu(x, inplace=True),
    lambda x: x.relu_(),
    lambda x: x.mul_(2).add_(1),
    lambda x: 2 - x,
    lambda x: 1 / (x * x + 1),
    lambda x: x / 3 + 0.5 - 2 * x,
    lambda x: torch.maximum(x, x * 0.5),
    lambda x: torch.lerp(x, x * x, 0.3),
    lambda x: torch.add(x, x, alpha=2),
    lambda x: torch.addcmul(x, x, x, value=0.5),
    lambda x: x - x.tanh(),
    lambda x: torch.atan2(x, x * x + 1),
    lambda x: x.float().double(),
    lambda x: x.to(torch.float64),
    lambda x: torch.fmod(x, 0.3),
    lambda x: torch.remainder(x, 0.3),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_functions_pass_constants(number):
    function = FUNCTIONS[number]
    net = Net(lambda s, x: s.out(function(s.lin(x))), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 3))
    dead(net.lin, 1, 4)
    check(net, rand(2, 4), golden={"lin.out_features": 4, "out.in_features": 4}, gradients=False)


def test_a_constant_whose_function_is_nan_is_no_constant():
    net = Net(
        lambda s, x: s.out(torch.nan_to_num(torch.log(s.lin(x)))), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 3)
    )
    dead(net.lin, 1, bias=-1.0)
    with torch.no_grad():
        net.lin.bias[[0, 2, 3, 4, 5]] = 50.0
    check(net, rand(2, 4), gradients=False)


def test_a_constant_that_becomes_infinite():
    net = Net(lambda s, x: s.out(torch.tanh(1 / s.lin(x))), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 3))
    dead(net.lin, 1, bias=0.0)
    check(net, rand(2, 4), gradients=False)


@pytest.mark.parametrize(
    "compare",
    [
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: x.masked_fill(x < 0, 0.5),
        lambda x: (x > 0.1).to(x.dtype) * x,
        lambda x: torch.where(x > 0, x.new_tensor(1.0), x),
        lambda x: torch.zeros_like(x) + x,
        lambda x: torch.ones_like(x),
    ],
)
def test_comparisons_are_exact(compare):
    net = Net(lambda s, x: s.out(compare(s.lin(x))), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 3))
    dead(net.lin, 1, 2)
    unread(net.out, 4)
    squeezed = check(net, rand(3, 4), gradients=False)
    assert squeezed.model.out.in_features <= 5  # what nobody reads goes, whatever computes it


# ------------------------------------------------------------------------------------------------------------ in place


def twice(s, x):
    x = s.lin(x)
    y = s.other(x)
    x += torch.relu(y)
    return s.out(x.relu_()) + s.last(x)


def written_after_reading(s, x):
    x = s.lin(x)
    y = x  # the same tensor: what is added below is in y too
    x.add_(s.other(x))
    return s.out(y) + s.last(x)


def through_a_view(s, x):
    x = s.lin(x)
    x.view(-1).mul_(2)
    return s.out(x) + s.last(s.other(x))


def one_channel(s, x):
    x = s.lin(x)
    x[:, 0] = 0
    x[:, 3:5] += 1
    return s.out(x) + s.last(s.other(x))


@pytest.mark.parametrize("code", [twice, written_after_reading, through_a_view, one_channel])
def test_in_place(code):
    net = Net(code, lin=nn.Linear(4, 6), other=nn.Linear(6, 6), out=nn.Linear(6, 2), last=nn.Linear(6, 2))
    noisy(net)
    dead(net.lin, 1)
    dead(net.other, 1)
    golden = {"lin.out_features": 5} if code in (twice, written_after_reading) else {}
    check(net, rand(2, 4), golden=golden, gradients=False)
