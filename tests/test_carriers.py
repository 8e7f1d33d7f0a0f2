"""Carriers: channels that are known up to a function that all share, and the few that stay for all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, unread
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.rules.carriers import MOST_GROWTH, express

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def padded(width: int = 8, out: int = 5, **options: object) -> nn.Sequential:
    return noisy(nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, out, 3, padding=1, **options)))


# ------------------------------------------------------------------------------------------------------- zero padding


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"bias": False}, {"dilation": 2}])
def test_one_channel_carries_all_constants_in_front_of_zero_padding(rank: int, options: dict[str, object]) -> None:
    net = noisy(nn.Sequential(CONV[rank](3, 8, 3), CONV[rank](8, 5, 3, padding=1, **options)))
    dead(net[0], 1, 2, 5, 6)
    squeezed = check(net, rand(1, 3, *[9] * rank), golden={"0.out_channels": 5, "1.in_channels": 5})
    assert squeezed.report.carriers == 1
    assert (net[1].bias is None) == (squeezed.model[1].bias is None)  # padding holds for the whole constant


def test_the_largest_constant_is_the_carrier() -> None:
    net = padded()
    dead(net[0], 1, bias=1e-9)
    dead(net[0], 2, bias=2.0)
    small = check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 7}).model
    assert 2.0 in small[0].bias.tolist() and 1e-9 not in small[0].bias.tolist()


def test_a_live_constant_that_is_too_small_does_not_carry() -> None:
    """Channel 1 stays for another reader; as a carrier it would need the factor 1e9."""
    net = Net(
        lambda s, x: (s.out(s.conv(x)), s.conv(x)[:, 1:2]),
        conv=nn.Conv2d(3, 6, 3),
        out=nn.Conv2d(6, 5, 3, padding=1),
    )
    noisy(net)
    dead(net.conv, 1, bias=1e-9)
    dead(net.conv, 2, 3, bias=1.0)
    assert MOST_GROWTH < 1e9
    check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 5})  # so one of the others does


def test_two_readers_share_a_carrier_that_suits_both() -> None:
    """Behind relu channel 1 is 0 and channel 2 is not; in front of it both are constants: 2 serves both readers."""
    net = Net(
        lambda s, x: s.one(y := s.conv(x)) + s.two(F.relu(y)),
        conv=nn.Conv2d(3, 6, 3),
        one=nn.Conv2d(6, 5, 3, padding=1),
        two=nn.Conv2d(6, 5, 3, padding=1),
    )
    noisy(net)
    dead(net.conv, 1, bias=-3.0)
    dead(net.conv, 2, 4, bias=0.5)
    squeezed = check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 4})
    assert squeezed.report.carriers == 1 and 0.5 in squeezed.model.conv.bias.tolist()


def test_two_readers_without_a_common_carrier_keep_two() -> None:
    net = Net(
        lambda s, x: s.one(F.relu(y := s.conv(x))) + s.two(F.relu(-y)),
        conv=nn.Conv2d(3, 8, 3),
        one=nn.Conv2d(8, 5, 3, padding=1),
        two=nn.Conv2d(8, 5, 3, padding=1),
    )
    noisy(net)
    dead(net.conv, 1, 2, 3, bias=0.7)
    dead(net.conv, 4, 5, bias=-0.7)
    assert check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 5}).report.carriers == 2


def test_padding_as_an_op_of_its_own() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(8, 5, 3)))
    dead(net[0], 1, 2, 5)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 6, "2.in_channels": 6})


def test_padding_with_another_number_than_zero_keeps_all() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConstantPad2d(1, 0.5), nn.Conv2d(8, 5, 3)))
    dead(net[0], 1, 2, 5, bias=0.7)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 8})


def test_average_pooling_that_counts_its_padding() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 5, 1)))
    dead(net[0], 1, 2, 5)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 6, "2.in_channels": 6})


def test_padded_and_flattened_is_not_one_function_any_more() -> None:
    """Every feature of the flattened tensor sees the padded 1 at another place."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ZeroPad2d(1), nn.Flatten(), nn.Linear(4 * 6 * 6, 3))
    noisy(net)
    dead(net[0], 1, 2, bias=0.7)
    check(net, rand(2, 3, 6, 6), golden={"0.out_channels": 4})


def test_padding_and_then_relu_is_not_followed() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ZeroPad2d(1), nn.Sigmoid(), nn.Conv2d(6, 5, 3)))
    dead(net[0], 1, 2, bias=0.7)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 6})


def test_grouped_convolution_has_a_carrier_in_each_group() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, padding=1, groups=2)))
    dead(net[0], 0, 1, 2, 5, 6, 7)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 4, "1.weight": (6, 2, 3, 3)})


def test_two_calls_carry_once() -> None:
    net = padded()
    dead(net[0], 1, 2, 5)
    check(net, [rand(1, 3, 8, 8), rand(2, 3, 9, 7)], golden={"0.out_channels": 6})


def test_a_convolution_called_twice_carries_once() -> None:
    net = Net(
        lambda s, x: s.out(y := s.conv(x)) + s.out(y.flip(-1)),
        conv=nn.Conv2d(3, 6, 3),
        out=nn.Conv2d(6, 5, 3, padding=1),
    )
    noisy(net)
    dead(net.conv, 1, 2, 5)
    check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 4})


def test_a_convolution_called_on_other_constants_keeps_them() -> None:
    net = Net(
        lambda s, x: s.out(y := s.conv(x)) + s.out(y.tanh()), conv=nn.Conv2d(3, 6, 3), out=nn.Conv2d(6, 5, 3, padding=1)
    )
    noisy(net)
    dead(net.conv, 1, 2, 5)
    check(net, rand(1, 3, 8, 8), golden={"conv.out_channels": 6})


# ---------------------------------------------------------------------------------------------------------- depthwise


def depthwise(*gone: int, bias: float | None = None) -> nn.Module:
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Tanh(), nn.Conv2d(8, 3, 1))
    )
    dead(net[0], *gone, bias=bias)
    return net


def test_a_live_depthwise_filter_gathers_a_carrier() -> None:
    net = depthwise(1, 2, 5)
    small = check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 6, "1.out_channels": 8}).model
    assert small[1].index.tolist().count(small[1].index[1].item()) == 3


def test_a_live_depthwise_filter_gathers_a_carrier_in_two_calls() -> None:
    check(depthwise(1, 2, 5), [rand(1, 3, 8, 8), rand(2, 3, 9, 7)], golden={"0.out_channels": 6, "1.out_channels": 8})


def test_a_live_depthwise_filter_on_zero_is_its_bias() -> None:
    check(depthwise(1, 2, 5, bias=0.0), rand(1, 3, 8, 8), golden={"0.out_channels": 5, "1.out_channels": 5})


def test_a_zero_filter_lets_go_of_its_input() -> None:
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 3, 3, padding=1))
    )
    dead(net[1], 1, 2)
    check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 6, "1.out_channels": 7, "2.in_channels": 7})


# -------------------------------------------------------------------------------------------------------------- norms


class HandWritten(nn.Module):
    """As transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class InFloat32(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class FromOne(nn.Module):
    """As Gemma writes it: the weight is a difference from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight)).type_as(x)


class ChannelsFirst(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(1, keepdim=True) + self.eps)
        return y * self.weight.reshape(-1, 1, 1)


RMS = [
    nn.RMSNorm,
    lambda w: nn.RMSNorm(w, eps=1e-2),
    lambda w: nn.RMSNorm(w, elementwise_affine=False),
    HandWritten,
    FromOne,
]


def test_two_channels_carry_the_constants_behind_a_layer_norm() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4, 6, 7)
    squeezed = check(net, rand(3, 4), golden={"0.out_features": 6, "1": sr.CompensatedLayerNorm, "2.in_features": 6})
    assert squeezed.report.carriers == 2 and squeezed.model[1].removed == 3


def test_equal_constants_behind_a_layer_norm_need_one_carrier() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 3, bias=False)))
    dead(net[0], 1, 2, 4, 6, bias=0.3)
    assert check(net, rand(3, 4), golden={"0.out_features": 6}).report.carriers == 1


def test_nearly_equal_constants_are_carried_well() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 40), nn.LayerNorm(40), nn.Linear(40, 3)))
    dead(net[0], *range(30))
    with torch.no_grad():
        net[0].bias[:30] = 30 + 1e-6 * torch.randn(30)
    check(net, rand(3, 4), golden={"0.out_features": 12})


def test_a_gamma_of_zero_carries_nothing() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4, 6, 7)
    with torch.no_grad():
        net[1].weight[1] = net[1].weight[2] = 0
    check(net, rand(3, 4), golden={"0.out_features": 6})


def test_an_activation_behind_the_norm_keeps_all_constants() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4)
    check(net, rand(3, 4), golden={"0.out_features": 9, "1": nn.LayerNorm})


def test_readers_of_a_norm_share_its_carriers_even_behind_a_mean() -> None:
    net = Net(
        lambda s, x: s.one(y := s.norm(s.lin(x))).mean(1) + s.two(y.mean(1)) + s.three(y[:, 0]),
        lin=nn.Linear(4, 9),
        norm=nn.LayerNorm(9),
        one=nn.Linear(9, 3),
        two=nn.Linear(9, 3),
        three=nn.Linear(9, 3),
    )
    noisy(net)
    dead(net.lin, 1, 2, 4, 6, 7)
    squeezed = check(net, rand(2, 5, 4), golden={"lin.out_features": 6, "two.in_features": 6})
    assert squeezed.report.carriers == 2


def test_a_maximum_behind_the_norm_keeps_all_constants() -> None:
    net = Net(
        lambda s, x: s.out(s.norm(s.lin(x)).amax(1)), lin=nn.Linear(4, 9), norm=nn.LayerNorm(9), out=nn.Linear(9, 3)
    )
    noisy(net)
    dead(net.lin, 1, 2, 4)
    check(net, rand(2, 5, 4), golden={"lin.out_features": 9})


def test_tied_weights_do_not_take_over_columns() -> None:
    """The head is the embedding: its columns cannot change without changing what is looked up."""
    net = Net(
        lambda s, i: F.linear(s.norm(s.lin(s.table(i))), s.table.weight),
        table=nn.Embedding(11, 6),
        norm=nn.LayerNorm(6),
        lin=nn.Linear(6, 6),
    )
    noisy(net)
    dead(net.lin, 1, 2, 4)
    check(net, torch.randint(0, 11, (2, 5)), golden={"lin.out_features": 6})


def test_padded_convolution_behind_a_layer_norm_needs_three() -> None:
    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    net = noisy(nn.Sequential(nn.Conv2d(3, 12, 3), Norm(12), nn.Conv2d(12, 5, 3, padding=1)))
    dead(net[0], *range(8))
    assert check(net, rand(1, 3, 8, 8), golden={"0.out_channels": 7}).report.carriers == 3


@pytest.mark.parametrize("norm", RMS)
def test_one_channel_carries_the_constants_behind_an_rms_norm(norm) -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), norm(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4, 6, 7)
    squeezed = check(net, rand(3, 4), golden={"0.out_features": 5, "1": sr.CompensatedRMSNorm, "2.in_features": 5})
    assert squeezed.report.carriers == 1 and squeezed.model[1].removed == 4


@pytest.mark.parametrize("norm", RMS)
def test_zeros_and_unread_channels_leave_an_rms_norm_without_a_carrier(norm) -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), norm(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, bias=0.0)
    dead(net[0], 4, bias=0.7)
    unread(net[2], 4, 5)
    check(net, rand(3, 4), golden={"0.out_features": 6, "1.removed": 3})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_computes_in_float32(dtype: torch.dtype) -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), InFloat32(9), nn.Linear(9, 3))).to(dtype)
    dead(net[0], 1, 2, 4, 6, 7)
    small, report = sr.squeeze(net, torch.randn(3, 4, dtype=dtype))
    assert isinstance(small[1], sr.CompensatedRMSNorm) and report.max_error < 1e-10


def test_rms_norm_over_channels_first() -> None:
    net = noisy(nn.Sequential(nn.Conv2d(3, 9, 3), ChannelsFirst(9), nn.Conv2d(9, 3, 1)))
    dead(net[0], 1, 2, 4, 6)
    check(net, rand(1, 3, 6, 6), golden={"0.out_channels": 6, "1": sr.CompensatedRMSNorm, "1.channel_dim": 1})


def test_rms_norm_keeps_what_varies() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.RMSNorm(9), nn.Linear(9, 3)))
    unread(net[2], 1, 2)
    check(net, rand(3, 4), golden={"0.out_features": 9, "1": nn.RMSNorm})


def test_a_norm_that_is_none_is_left_alone() -> None:
    """Divided by the mean magnitude, not by the root of the mean square."""

    class Other(HandWritten):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)

    net = noisy(nn.Sequential(nn.Linear(4, 9), Other(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4, bias=0.7)
    check(net, rand(3, 4), golden={"0.out_features": 9})


def test_a_norm_of_each_head_alone_keeps_the_heads_whole() -> None:
    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (s.q, s.k, s.v))
        y = F.scaled_dot_product_attention(s.norm(q), s.norm(k), v)
        return s.out(y.transpose(1, 2).flatten(2))

    net = Net(run, q=nn.Linear(6, 12), k=nn.Linear(6, 12), v=nn.Linear(6, 12), norm=nn.RMSNorm(4), out=nn.Linear(12, 6))
    noisy(net)
    unread(net.out, 4, 5, 6, 7)  # the second head
    dead(net.q, 0, bias=0.0)  # and a dimension of the first, which stays: the norm sees it
    check(net, rand(2, 5, 6), golden={"q.out_features": 8, "v.out_features": 8, "norm": nn.RMSNorm})


def test_squeezing_again_merges_what_an_rms_norm_lost() -> None:
    net = noisy(nn.Sequential(nn.Linear(4, 9), nn.RMSNorm(9), nn.Linear(9, 3)))
    dead(net[0], 1, 2, 4)
    small = check(net, rand(3, 4), golden={"1.removed": 2}).model
    dead(small[0], 3, 4)
    again = check(small, rand(3, 4), golden={"1": sr.CompensatedRMSNorm}).model
    assert again[1].removed == 4 and again[0].out_features == 5


# --------------------------------------------------------------------------------------------------- the linear algebra


def test_express_finds_few_well_conditioned_rows() -> None:
    torch.manual_seed(0)
    have = torch.randn(20, 2, dtype=torch.float64)
    have[0] *= 1e-8
    wanted = torch.randn(30, 2, dtype=torch.float64)
    picked, factors, left = express(wanted, have)
    assert len(picked) == 2 and 0 not in picked.tolist()
    assert float(left.abs().max()) < 1e-14 and float(factors.abs().max()) < 10


def test_express_leaves_what_would_take_large_factors() -> None:
    wanted = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    have = torch.tensor([[1.0, 0.0], [1.0, 1e-9]], dtype=torch.float64)
    picked, _, left = express(wanted, have)
    assert len(picked) == 1 and float(left[1].norm()) > 0.1


# ---------------------------------------------------------------------------------------------------- constant queries


class Attend(nn.Module):
    def __init__(self, code: str = "plain", heads: int = 2, size: int = 6) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, heads * size) for _ in range(4))
        self.out = nn.Linear(heads * size, 8)
        self.code, self.size, self.norm = code, size, nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.q.out_features // 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        k = k.tanh() if self.code == "tanh" else k
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.code == "causal", scale=0.4)
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("code", ["plain", "causal"])
def test_one_dimension_carries_the_constant_queries_of_a_head(code: str) -> None:
    net = noisy(Attend(code))
    dead(net.q, 1, 2, 4, 7, 9, 11)  # three of each head, whose bias stays
    unread(net.out, 0, 1, 6, 7)  # as many of v, for one number of channels serves q, k and v
    squeezed = check(net, rand(2, 5, 8), golden={"q.out_features": 8, "k.out_features": 8, "v.out_features": 8})
    assert squeezed.report.carriers == 2


def test_constant_queries_without_a_bias_need_no_carrier() -> None:
    net = noisy(Attend())
    dead(net.q, 1, 2, 7, 8, bias=0.0)
    unread(net.out, 0, 1, 6, 7)
    assert check(net, rand(2, 5, 8), golden={"k.out_features": 8}).report.carriers == 0


def test_keys_that_are_no_rows_of_a_weight_are_not_added_up() -> None:
    net = noisy(Attend("tanh"))
    dead(net.q, 1, 2, 4, 7, 9, 11)
    check(net, rand(2, 5, 8), golden={"k.out_features": 12})


def test_queries_of_a_single_token_are_no_constants_of_the_network() -> None:
    net = noisy(Attend())
    dead(net.q, 1, 2)  # of one head only: heads stay equally wide
    check(net, rand(2, 5, 8), golden={"k.out_features": 12})


def rolled(dim: int) -> nn.Module:
    net = Net(
        lambda s, x: s.out(s.norm(s.lin(x)).roll(1, dim)),
        lin=nn.Linear(4, 9),
        norm=nn.LayerNorm(9),
        out=nn.Linear(9, 3),
    )
    return dead(noisy(net).lin, 1, 3, 4, 6, 8) and net  # type: ignore[union-attr, arg-type, return-value]


def test_constants_behind_a_layer_norm_pass_a_roll_over_positions() -> None:  # shifted windows
    check(rolled(1), rand(3, 5, 4), golden={"lin.out_features": 6, "norm": sr.CompensatedLayerNorm})


def test_constants_behind_a_layer_norm_do_not_pass_a_roll_over_channels() -> None:
    check(rolled(-1), rand(3, 5, 4), golden={"lin.out_features": 9, "norm": nn.LayerNorm})


def test_a_bias_that_folding_creates_is_scaled_with_the_rows_of_q() -> None:
    """Narrower heads at the default scale: the rows of q make it good, and so must a bias that was not there before."""

    def run(s: Net, x: Tensor) -> Tensor:
        q, k, v = s.qkv(s.norm(s.stem(x))).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    net = Net(
        run, stem=nn.Linear(4, 10), norm=nn.LayerNorm(10), qkv=nn.Linear(10, 36, bias=False), out=nn.Linear(12, 3)
    )
    noisy(net)
    dead(net.stem, 1, 2, 4, 7)
    with torch.no_grad():
        net.qkv.weight.view(3, 2, 6, 10)[0, :, 3:] = 0
    unread(net.out, 0, 1, 2, 6, 7, 8)
    check(net, rand(2, 5, 4), golden={"stem.out_features": 8, "qkv.weight": (18, 8), "qkv.bias": (18,)})
