"""Group norm loses whole groups, instance norm single channels; what shares a group with something alive stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import Tensor, nn

import squeeze_release as sr

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


def network(norm: nn.Module, rank: int = 2) -> nn.Sequential:
    net = nn.Sequential(CONV[rank](3, 8, 3), norm, nn.Tanh(), CONV[rank](8, 2, 3))
    return noisy(net)  # type: ignore[return-value]


# --------------------------------------------------------------------------------------------------------- group norm


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_a_group_that_nobody_reads_goes(rank, affine):
    net = network(nn.GroupNorm(4, 8, affine=affine), rank)
    unread(net[3], 2, 3)
    golden = {"0.out_channels": 6, "1.num_groups": 3, "1.num_channels": 6, "3.in_channels": 6}
    check(net, rand(2, 3, *[6] * rank), golden=golden | ({"1.weight": (6,), "1.bias": (6,)} if affine else {}))


def test_a_group_of_constants_is_constant():
    net = network(nn.GroupNorm(4, 8))
    dead(net[0], 4, 5)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 6, "1.num_groups": 3, "3.in_channels": 6})


def test_a_group_of_equal_constants_is_constant():
    """Its variance is 0: what remains is the bias."""
    net = network(nn.GroupNorm(4, 8))
    dead(net[0], 4, 5, bias=0.3)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 6, "1.num_groups": 3, "3.in_channels": 6})


def test_equal_constants_too_large_to_be_centred_in_float64_stay():
    net = network(nn.GroupNorm(4, 8))
    dead(net[0], 4, 5, bias=3.3e7)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 8, "1.num_groups": 4})


def test_half_a_group_stays():
    """Channel 2 is constant and unread, but its group mate lives, and counts it in mean and variance."""
    net = network(nn.GroupNorm(4, 8))
    dead(net[0], 2)
    unread(net[3], 2)
    squeezed = check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 8, "1.num_groups": 4, "1.weight": (8,)})
    assert "mean and variance of a group" in reasons(squeezed.report)


def test_gamma_zero_makes_a_constant_but_not_a_group():
    net = network(nn.GroupNorm(4, 8))
    with torch.no_grad():
        net[1].weight[[0, 1, 4]] = 0  # all of group 0, half of group 2
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 6, "1.num_groups": 3})


class Own(nn.GroupNorm):
    """timm's GroupNorm1: a forward of its own, and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__(1, width)
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(1, 8), lambda: Own(8)])
def test_one_group_is_a_layer_norm_over_positions(norm):
    net = network(norm())
    dead(net[0], 1, 2, 6)
    unread(net[3], 1, 2, 4)  # 4 varies, and 6 is read behind an activation: both stay
    squeezed = check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 6, "1": sr.CompensatedGroupNorm, "1.removed": 2})
    assert "statistics" in reasons(squeezed.report)


@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(1, 9), lambda: Own(9)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_two_channels_carry_the_constants_behind_one_group(norm, rank):
    conv = CONV[rank]
    net = noisy(nn.Sequential(conv(3, 9, 1), norm(), conv(9, 4, 1)))
    dead(net[0], 1, 2, 4, 6, 7)
    squeezed = check(net, rand(2, 3, *[5] * rank), golden={"0.out_channels": 6, "1.removed": 3, "2.in_channels": 6})
    assert squeezed.report.carriers == 2


def test_one_group_squeezed_again_and_in_lower_precision():
    net = noisy(nn.Sequential(nn.Conv2d(3, 9, 1), nn.GroupNorm(1, 9), nn.Conv2d(9, 4, 1)))
    dead(net[0], 1, 2, bias=0.0)
    unread(net[2], 1, 2, 5)
    small = check(net, rand(2, 3, 5, 5), golden={"1.removed": 2}).model
    dead(small[0], 3, bias=0.4)  # which was channel 5
    smaller = check(small, rand(2, 3, 5, 5), golden={"1.removed": 3, "0.out_channels": 6}).model
    x = rand(2, 3, 5, 5)
    want = smaller(x).detach()
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        got = smaller.to(dtype)(x.to(dtype)).detach().double()
        assert float((got - want).abs().max() / want.abs().max()) < bound


def test_one_group_is_over_positions_too():
    """A layer norm of each position alone would be another function: the constants are in both of them."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.Conv2d(8, 4, 1)))
    dead(net[0], 1, 2)
    unread(net[2], 1, 2)
    small = check(net, rand(2, 3, 6, 6)).model
    x = rand(1, 3, 6, 6)
    assert not torch.allclose(small(x)[..., :3], small(x[..., :3]))  # a position depends on the others


def test_channels_along_positions_stay_under_one_group():
    """A linear layer over positions writes them; the norm counts each of them."""
    net = Net(lambda s, x: s.out(s.norm(s.mix(x))), mix=nn.Linear(5, 6), norm=nn.GroupNorm(1, 4), out=nn.Linear(6, 3))
    noisy(net)
    unread(net.out, 1, 2)
    check(net, rand(2, 4, 5), golden={"mix.out_features": 6})


def test_a_function_with_one_group_stays():
    net = Net(lambda s, x: s.out(F.group_norm(s.conv(x), 1)), conv=nn.Conv2d(3, 8, 1), out=nn.Conv2d(8, 4, 1))
    noisy(net)
    dead(net.conv, 1, 2)
    unread(net.out, 1, 2)
    check(net, rand(2, 3, 5, 5), golden={"conv.out_channels": 8})


def test_groups_of_one_channel():
    net = network(nn.GroupNorm(8, 8))
    unread(net[3], 1)
    dead(net[0], 5)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 6, "1.num_groups": 6, "1.num_channels": 6})


def test_all_groups_dead_leaves_a_network_that_runs():
    net = network(nn.GroupNorm(4, 8))
    unread(net[3], *range(8))
    check(net, rand(2, 3, 6, 6), gradients=False)


def test_a_group_kept_alive_by_another_reader():
    """The stream keeps channels 2 and 3 for the head; the norm in the branch has to take them."""
    net = Net(
        lambda s, x: s.head(torch.tanh(y := s.stem(x))) + s.out(s.norm(y)),
        stem=nn.Conv2d(3, 8, 1),
        norm=nn.GroupNorm(4, 8),
        out=nn.Conv2d(8, 2, 1),
        head=nn.Conv2d(8, 2, 1),
    )
    noisy(net)
    unread(net.out, 2, 3, 4, 5)
    unread(net.head, 4, 5)
    check(net, rand(2, 3, 5, 5), golden={"stem.out_channels": 6, "norm.num_groups": 3, "out.in_channels": 6})


def test_residual_stream_with_group_norms():
    def run(s, x):
        y = s.stem(x)
        for norm, conv in zip(s.norms, s.convs, strict=True):
            y = y + conv(torch.relu(norm(y)))
        return s.head(y.mean((2, 3)))

    net = Net(
        run,
        stem=nn.Conv2d(3, 8, 3),
        norms=nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(2)),
        convs=nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2)),
        head=nn.Linear(8, 3),
    )
    noisy(net)
    for layer in (net.stem, *net.convs):
        dead(layer, 2, 3, 6)  # group 1, and half of group 3
    check(net, rand(2, 3, 5, 5), golden={"stem.out_channels": 6, "norms.1.num_groups": 3, "head.in_features": 6})


class Inline(nn.Module):
    """A number of groups in the code, where nobody can set it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 4, self.weight, self.bias)


class Stubborn(nn.GroupNorm):
    """Has a `num_groups` and does not use it. Two groups of four go: four groups would be of two then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 4, self.weight, self.bias)


@pytest.mark.parametrize("norm", [Inline(), Stubborn(4, 8)], ids=["inline", "stubborn"])
def test_a_number_of_groups_in_the_code_stays(norm):
    net = network(norm)
    unread(net[3], 0, 1, 2, 3)
    squeezed = check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 8, "1.weight": (8,)})
    assert "number of groups" in reasons(squeezed.report)


def test_rule_set_a_leaves_group_norms():
    net = network(nn.GroupNorm(4, 8))
    unread(net[3], 2, 3)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 8}, rules="A")


def test_group_norm_called_twice():
    net = Net(
        lambda s, x: s.out(s.norm(s.a(x)) * s.norm(s.b(x))),
        a=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(3, 8, 1),
        norm=nn.GroupNorm(4, 8),
        out=nn.Conv2d(8, 2, 1),
    )
    noisy(net)
    dead(net.a, 0, 1, 4, 5)
    dead(net.b, 0, 1)
    check(net, rand(2, 3, 5, 5), golden={"a.out_channels": 6, "norm.num_groups": 3, "out.in_channels": 6})


# ------------------------------------------------------------------------------------------------------ instance norm


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("running", [True, False])
def test_instance_norm_loses_single_channels(rank, affine, running):
    net = network(INSTANCE_NORM[rank](8, affine=affine, track_running_stats=running), rank)
    dead(net[0], 1, bias=0.7)
    unread(net[3], 4)
    golden = {"0.out_channels": 6, "1.num_features": 6, "3.in_channels": 6}
    if running:
        golden |= {"1.running_mean": (6,), "1.running_var": (6,)}
    check(net, rand(2, 3, *[6] * rank), golden=golden)


def test_instance_norm_gamma_zero():
    net = network(nn.InstanceNorm2d(8, affine=True))
    with torch.no_grad():
        net[1].weight[3] = 0
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 7, "1.weight": (7,), "1.num_features": 7})


def test_instance_norm_keeps_a_constant_in_front_of_padding_and_a_live_channel():
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 2, (1, 3), padding=(0, 1)))
    )
    with torch.no_grad():
        net[0].weight[1], net[1].bias[1] = 0, 0.5  # not 0: its border differs
        net[0].weight[2], net[1].bias[2] = 0, 0.0  # 0 in front of padding
    small = check(net, rand(2, 3, 6, 6)).model
    assert small[0].out_channels == 7


def test_constant_too_large_for_an_instance_norm_stays():
    net = network(nn.InstanceNorm2d(8))
    dead(net[0], 1, bias=3.3e7)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 8})
