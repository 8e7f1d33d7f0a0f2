"""Batch norm and layer norm: constants pass, statistics are kept; the other norms keep their widths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

import squeeze_release as sr
from squeeze_release import CompensatedLayerNorm

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


# -------------------------------------------------------------------------------------------------------- batch norm


def test_batch_norm_on_features():
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.SELU(), nn.Linear(8, 3)))
    dead(net[0], 1)
    with torch.no_grad():
        net[1].weight[5] = 0  # gamma 0: constant whatever it reads
    check(
        net,
        rand(2, 4),
        golden={
            "0.out_features": 6,
            "1.weight": (6,),
            "1.bias": (6,),
            "1.running_mean": (6,),
            "1.running_var": (6,),
            "1.num_features": 6,
            "3.in_features": 6,
        },
    )


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("padding, left", [(0, 4), (1, 5)])
def test_batch_norm_over_positions(rank, padding, left):
    net = nn.Sequential(CONV[rank](2, 6, 3), BATCH_NORM[rank](6), nn.Tanh(), CONV[rank](6, 3, 3, padding=padding))
    noisy(net)
    dead(net[0], 1)
    with torch.no_grad():
        net[1].weight[2] = 0
    check(net, rand(1, 2, *[7] * rank), golden={"0.out_channels": left, "1.num_features": left, "3.in_channels": left})


def test_batch_norm_without_affine():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)))
    dead(net[0], 1)
    check(net, rand(2, 4), golden={"0.out_features": 5, "1.running_mean": (5,), "1.num_features": 5})


def test_batch_norm_straight_on_the_input_keeps_it():
    net = noisy(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with torch.no_grad():
        net[0].weight[2] = 0
    check(net, rand(2, 5), golden={"0.num_features": 5})


def test_batch_norm_that_uses_batch_statistics_keeps_its_width():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3)))
    dead(net[0], 1)
    check(net, rand(4, 4), golden={"0.out_features": 6})


def test_batch_norm_called_twice_on_different_constants():
    net = Net(
        lambda s, x: s.out(s.bn(s.a(x)) * s.bn(s.b(x))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        bn=nn.BatchNorm1d(6),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.a, 1)
    dead(net.b, 1, 2)
    check(net, rand(3, 4), golden={"a.out_features": 5, "bn.num_features": 5, "out.in_features": 5})


# -------------------------------------------------------------------------------------------------------- layer norm


class LayerNorm2d(nn.LayerNorm):
    """Channels first, with permutes, as timm and torchvision write it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class MeanVarNorm2d(nn.Module):
    """ConvNeXt's channels-first norm, written out by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        var = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(var + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_loses_a_channel_that_is_constant_before_and_unread_after(options):
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, **options), nn.Linear(8, 3)))
    dead(net[0], 1, 5, 6)
    unread(net[2], 1, 6)  # 5 is constant in front of the norm and read behind it
    unread(net[2], 2)  # unread, but not constant in front of it: enters the statistics
    squeezed = check(net, rand(2, 4), golden={"0.out_features": 6, "1": CompensatedLayerNorm, "2.in_features": 6})
    assert squeezed.model[1].removed == 2
    assert "statistics" in reasons(squeezed.report)


@pytest.mark.parametrize("norm", [LayerNorm2d, MeanVarNorm2d])
def test_layer_norm_channels_first(norm):
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 3, 1)))
    dead(net[0], 1, 5, 6)
    unread(net[2], 1, 6, 2)
    check(
        net,
        rand(1, 3, 6, 6),
        golden={"0.out_channels": 6, "1": CompensatedLayerNorm, "1.channel_dim": 1, "2.in_channels": 6},
    )


class NormAct(LayerNorm2d):
    """timm's norms with an activation of their own."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__(width)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class ActNorm(NormAct):
    """The activation comes first: no norm with something behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LayerNorm2d.forward(self, self.act(x))


class RmsAct(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps, self.act = nn.Parameter(torch.ones(width)), 1e-6, nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)
        return self.act(x * self.weight[:, None, None])


@pytest.mark.parametrize("norm", [lambda: NormAct(8, nn.GELU()), lambda: NormAct(8, nn.ReLU()), lambda: RmsAct(8)])
def test_a_norm_with_an_activation_of_its_own(norm):
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), norm(), nn.Conv2d(8, 3, 1)))
    dead(net[0], 1, 5, 6)
    unread(net[2], 1, 6, 2)  # 5 is read, and behind the activation it is no combination of others
    squeezed = check(
        net,
        rand(1, 3, 6, 6),
        golden={"0.out_channels": 6, "1.removed": 2, "1.act": type(net[1].act), "2.in_channels": 6},
    )
    assert set(squeezed.model[1].state_dict()) > set(net[1].state_dict())


def test_a_norm_with_an_activation_squeezed_again():
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), RmsAct(8), nn.Conv2d(8, 3, 1)))
    dead(net[0], 1)
    unread(net[2], 1, 4)
    small = check(net, rand(1, 3, 6, 6), golden={"1.removed": 1}).model
    dead(small[0], 3)  # which was channel 4
    check(small, rand(1, 3, 6, 6), golden={"1.removed": 2, "0.out_channels": 6, "1.act": nn.GELU})


def test_an_activation_in_front_of_the_norm_keeps_all():
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), ActNorm(8, nn.GELU()), nn.Conv2d(8, 3, 1)))
    dead(net[0], 1, 5, 6)
    unread(net[2], 1, 6, 2)
    check(net, rand(1, 3, 6, 6), golden={"0.out_channels": 8, "1": ActNorm})


def test_layer_norm_gamma_zero_is_a_constant_behind_but_the_input_stays():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)))
    with torch.no_grad():
        net[1].weight[2] = 0
    check(net, rand(2, 4), golden={"0.out_features": 6, "1": nn.LayerNorm, "3.in_features": 6})


def test_layer_norm_gamma_zero_on_a_constant_goes():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)))
    dead(net[0], 2)
    with torch.no_grad():
        net[1].weight[2] = 0
    check(net, rand(2, 4), golden={"0.out_features": 5, "1": CompensatedLayerNorm, "3.in_features": 5})


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_squeezed_again_accumulates(options):
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8, **options), nn.Linear(8, 3))).double()
    dead(net[0], 1)
    unread(net[2], 1)
    once = check(net, rand(2, 4)).model
    assert once[1].removed == 1
    dead(once[0], 2, 3)
    unread(once[2], 2, 3)
    twice = check(once, rand(2, 4), golden={"0.out_features": 5, "2.in_features": 5})
    assert twice.model[1].removed == 3


def test_layer_norm_of_constants_alone_is_constant():
    net = noisy(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Tanh()))
    dead(net[0], 0, 1, 2, 3, 4)
    check(net, rand(2, 4), gradients=False)


def test_layer_norm_called_twice_on_different_constants():
    net = Net(
        lambda s, x: s.out(s.norm(s.a(x)) + s.norm(s.b(x))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        norm=nn.LayerNorm(6),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    for layer in (net.a, net.b):
        dead(layer, 1, 2)
    unread(net.out, 1, 2)
    with torch.no_grad():
        net.a.bias[1] = net.b.bias[1] = 0.3  # alike in both calls; 2 is not
    check(net, rand(2, 4), golden={"a.out_features": 5, "b.out_features": 5, "norm": CompensatedLayerNorm})


def test_layer_norm_registered_under_two_names():
    norm = nn.LayerNorm(6)
    net = Net(
        lambda s, x: s.out(s.first(s.a(x)) + s.second(s.b(x))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        first=norm,
        second=norm,
        out=nn.Linear(6, 2),
    )
    noisy(net)
    for layer in (net.a, net.b):
        dead(layer, 1, bias=0.3)
    unread(net.out, 1)
    squeezed = check(net, rand(2, 4))
    assert squeezed.model.first.weight is squeezed.model.second.weight
    assert squeezed.model.a.out_features == 5


def test_two_layer_norms_share_their_parameters():
    first, second = nn.LayerNorm(6), nn.LayerNorm(6)
    second.weight, second.bias = first.weight, first.bias
    net = Net(
        lambda s, x: s.out(s.first(s.a(x)) + s.second(s.b(x))),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        first=first,
        second=second,
        out=nn.Linear(6, 2),
    )
    noisy(net)
    for layer in (net.a, net.b):
        dead(layer, 1)
    unread(net.out, 1)
    check(net, rand(2, 4), golden={"a.out_features": 5, "out.in_features": 5})


def test_layer_norm_over_two_dimensions_is_kept():
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm((5, 6)), nn.Linear(6, 3)))
    dead(net[0], 1)
    unread(net[2], 1)
    check(net, rand(2, 5, 4), golden={"0.out_features": 6, "1.weight": (5, 6)})


def test_layer_norm_inline_is_kept_and_named():
    net = Net(
        lambda s, x: s.out(F.layer_norm(s.lin(x), (6,), s.gamma)),
        lin=nn.Linear(4, 6),
        out=nn.Linear(6, 3),
        gamma=nn.Parameter(torch.ones(6)),
    )
    noisy(net)
    dead(net.lin, 1)
    unread(net.out, 1)
    squeezed = check(net, rand(2, 4), golden={"lin.out_features": 6, "gamma": (6,)})
    assert "layer_norm called as a function" in reasons(squeezed.report)


def test_layer_norm_on_the_input_keeps_it():
    net = noisy(nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3)))
    unread(net[1], 2)
    check(net, rand(2, 5), golden={"0.weight": (5,)})


def test_layer_norm_with_huge_equal_constants_stays_exact():
    net = noisy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    dead(net[0], 1, 2, 3, bias=100.0)
    unread(net[2], 1, 2, 3)
    check(net, rand(2, 4), golden={"0.out_features": 5})


def test_layer_norm_in_front_of_a_residual_stream():
    """Pre-norm: the stream channel is constant only if the stem and every block write a constant."""
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.b(torch.relu(s.a(s.norm(y))))),
        stem=nn.Linear(4, 6),
        norm=nn.LayerNorm(6),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 6),
        head=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.stem, 1, 2)
    dead(net.b, 1)
    unread(net.a, 1, 2)
    check(
        net,
        rand(2, 4),
        golden={"stem.out_features": 5, "norm": CompensatedLayerNorm, "b.out_features": 5, "head.in_features": 5},
    )


# ----------------------------------------------------------------------------------------------- norms that keep all


@pytest.mark.parametrize(
    "norm",
    [
        nn.GroupNorm(3, 6),
        nn.LocalResponseNorm(3),
        nn.RMSNorm(7),
    ],
    ids=str,
)
def test_other_norms_keep_their_width_exactly(norm):
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), norm, nn.Conv2d(6, 2, 1)))
    dead(net[0], 1)
    unread(net[2], 1, 2)
    squeezed = check(net, rand(1, 3, 7, 7))
    if not isinstance(norm, nn.RMSNorm):
        assert squeezed.model[0].out_channels == 6
        assert reasons(squeezed.report)


def test_functional_normalize_over_channels_is_exact():
    net = Net(lambda s, x: s.out(F.normalize(s.lin(x), dim=-1)), lin=noisy(nn.Linear(4, 6)), out=nn.Linear(6, 2))
    dead(net.lin, 1)
    unread(net.out, 1, 2)
    check(net, rand(2, 4), golden={"lin.out_features": 6})


def test_rule_sets_decide_whether_norms_lose_channels():
    def net() -> nn.Module:
        torch.manual_seed(0)
        net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
        dead(net[0], 1)
        unread(net[2], 1)
        return net

    assert check(net(), rand(2, 4), rules="A").model[0].out_features == 6
    assert check(net(), rand(2, 4), rules="AB").model[0].out_features == 5
    assert "rule set" in reasons(sr.squeeze(net(), torch.randn(2, 4), rules="A").report)
