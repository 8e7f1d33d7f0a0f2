"""Linear layers and convolutions: what goes, what stays, and that the function is the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

from squeeze_release.modules import IndexedConv2d, IndexedLinear

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def mlp(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return noisy(nn.Sequential(*layers[:-1]))  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------------------- linear


def test_linear_loses_dead_rows_and_unread_columns():
    net = mlp(4, 8, 6, 3)
    dead(net[0], 0, 3)
    unread(net[2], 5)
    dead(net[2], 1)
    check(net, rand(2, 4), golden={"0.weight": (5, 4), "2.weight": (5, 5), "4.weight": (3, 5)})


def test_linear_keeps_a_row_whose_entries_sum_to_zero():
    net = mlp(4, 6, 2)
    with torch.no_grad():
        net[0].weight[1] = torch.tensor([1.0, -1.0, 2.0, -2.0])
        net[0].weight[2] = 1e-30
        net[2].weight[:, 3] = torch.tensor([1.0, -1.0])
    check(net, rand(2, 4), golden={"0.weight": (6, 4)})


def test_linear_cascade_of_constants():
    net = mlp(4, 6, 6, 6, 3)
    dead(net[0], 0, 1, 2)
    with torch.no_grad():
        net[2].weight[:2, 3:] = 0  # reads the constants alone, so it is one
        net[4].weight[4, 2:] = 0  # and so is what reads that alone
    check(net, rand(2, 4), golden={"0.out_features": 3, "2.out_features": 4, "4.out_features": 5, "6.in_features": 5})


def test_linear_unread_in_cascade():
    net = mlp(4, 6, 6, 3)
    unread(net[4], 0, 1)
    with torch.no_grad():
        net[2].weight[2:, 5] = 0  # read by the two rows that nobody reads
    check(net, rand(2, 4), golden={"0.out_features": 5, "2.weight": (4, 5)})


def test_linear_gathers_the_inputs_it_reads():
    net = mlp(5, 6, 2)
    unread(net[0], 0, 3)
    squeezed = check(net, rand(2, 5), golden={"0": IndexedLinear, "0.weight": (6, 3), "0.index": (3,)})
    assert squeezed.model[0].index.tolist() == [1, 2, 4]


def test_linear_on_flattened_input_gathers():
    net = nn.Sequential(nn.Flatten(), noisy(nn.Linear(12, 4)))
    unread(net[1], 0, 11)
    check(net, rand(2, 3, 4), golden={"1": IndexedLinear, "1.weight": (4, 10)})


def test_linear_constant_function():
    net = mlp(4, 5, 3)
    dead(net[0], 0, 1, 2, 3, 4)
    squeezed = check(net, rand(2, 4), gradients=False)
    assert squeezed.report.params_after <= 3 + 3 + 5  # the outputs, and at most one channel a layer


def test_linear_without_bias_gets_one():
    net = nn.Sequential(noisy(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3, bias=False))
    dead(net[0], 0, 5)
    check(net, rand(2, 4), golden={"0.out_features": 4, "2.weight": (3, 4), "2.bias": (3,)})


def test_linear_without_bias_needs_none_for_zeros():
    net = nn.Sequential(noisy(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3, bias=False))
    dead(net[0], 0, 5, bias=-1.0)
    check(net, rand(2, 4), golden={"0.out_features": 4, "2.bias": None})


class OwnLinear(nn.Linear):
    """A forward of its own, which would not use a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) * 2


def test_linear_that_cannot_take_a_bias_keeps_a_constant():
    net = nn.Sequential(noisy(nn.Linear(4, 6)), nn.Tanh(), OwnLinear(6, 3, bias=False))
    dead(net[0], 0)
    squeezed = check(net, rand(2, 4), golden={"0.out_features": 6})
    assert "there is no such bias" in reasons(squeezed.report)
    dead(net[0], 0, 2, 5)
    check(net, rand(2, 4), golden={"0.out_features": 4, "2.weight": (3, 4), "2.bias": None})
    squeezed = check(net, rand(2, 4), golden={"0.out_features": 6}, rules="AB")
    assert "no bias to fold it into" in reasons(squeezed.report)


def test_weight_that_is_read_with_and_without_a_bias_keeps_all_constants():
    """What one reader folds into its bias the other would have to carry in the weight that both read."""
    net = Net(
        lambda s, x: s.lin(y := torch.tanh(s.stem(x))) + torch.sin(F.linear(y, s.lin.weight)),
        stem=noisy(nn.Linear(4, 6)),
        lin=noisy(nn.Linear(6, 3)),
    )
    dead(net.stem, 0, 2, 5)
    squeezed = check(net, rand(2, 4), golden={"stem.out_features": 6, "lin.weight": (3, 6)})
    assert "no bias to fold it into" in reasons(squeezed.report)


def test_linear_over_tokens_and_without_a_batch():
    net = mlp(4, 6, 3)
    dead(net[0], 2)
    check(net, rand(2, 5, 4), golden={"0.out_features": 5})
    check(net, rand(4), golden={"0.out_features": 5})


def test_linear_position_dependent_constant_stays():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.lin(x) + s.position)),
        lin=noisy(nn.Linear(4, 6)),
        out=nn.Linear(6, 3),
        position=nn.Parameter(torch.randn(5, 6)),
    )
    dead(net.lin, 1, 2)
    with torch.no_grad():
        net.position[:, 2] = 0.5  # the same at every position: that one may go
    check(net, rand(2, 5, 4), golden={"lin.out_features": 5, "position": (5, 5)})


# ----------------------------------------------------------------------------------------------------- convolutions


def conv_net(rank: int, reader: nn.Module, bias: float) -> nn.Module:
    net = nn.Sequential(CONV[rank](2, 6, 3), nn.ReLU(), reader, nn.ReLU(), CONV[rank](5, 2, 1))
    noisy(net)
    dead(net[0], 1, 4, bias=bias)
    return net


FREE = [
    dict(),
    dict(stride=2),
    dict(dilation=2),
    dict(padding="valid"),
    dict(bias=False),
    dict(padding=1, padding_mode="circular"),
    dict(padding=1, padding_mode="reflect"),
    dict(padding=1, padding_mode="replicate"),
    dict(kernel_size=1, padding="same"),
    dict(kernel_size=1, stride=2),
]
BORDER = [
    dict(padding=1),
    dict(padding="same"),
    dict(padding=1, stride=2),
    dict(kernel_size=1, padding=1),
    dict(padding=2, dilation=2),
    dict(padding="same", dilation=2, bias=False),
]


@pytest.mark.parametrize("options", FREE, ids=str)
def test_conv_folds_any_constant_where_it_has_no_border(options):
    reader = nn.Conv2d(6, 5, **{"kernel_size": 3, **options})
    check(conv_net(2, reader, bias=0.7), rand(1, 2, 8, 9), golden={"0.out_channels": 4, "2.in_channels": 4})


@pytest.mark.parametrize("options", BORDER, ids=str)
def test_conv_keeps_a_constant_in_front_of_zero_padding(options):
    reader = nn.Conv2d(6, 5, **{"kernel_size": 3, **options})
    net = conv_net(2, reader, bias=0.7)
    dead(net[0], 1, bias=-0.7)  # relu makes it 0, which padding does not change: it goes, and the other one stays
    squeezed = check(net, rand(1, 2, 8, 9), golden={"0.out_channels": 5, "2.in_channels": 5})
    assert "zero padding" in reasons(squeezed.report)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("padding, left", [(0, 4), (1, 5)])
def test_conv_1d_and_3d(rank, padding, left):
    net = conv_net(rank, CONV[rank](6, 5, 3, padding=padding), bias=0.7)
    dead(net[0], 1, bias=-0.7)
    check(net, rand(1, 2, *[7] * rank), golden={"0.out_channels": left, "2.in_channels": left})


def test_conv_output_unread_and_constant_through_two_convolutions():
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 3, 3))
    noisy(net)
    dead(net[0], 0, 1)
    with torch.no_grad():
        net[1].weight[3, 2:] = 0
    unread(net[2], 5)
    check(net, rand(1, 2, 9, 9), golden={"0.out_channels": 4, "1.weight": (4, 4, 3, 3), "2.in_channels": 4})


def test_conv_on_a_constant_input_with_padding_is_constant_inside_only():
    """The border of a padded convolution of a constant differs from its inside: nothing behind it may fold."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1))
    noisy(net)
    dead(net[0], 0, 1)
    with torch.no_grad():
        net[1].weight[2, 2:] = 0
    check(net, rand(1, 2, 6, 6), golden={"1.out_channels": 4})


def test_conv_gathers_the_inputs_it_reads():
    net = noisy(nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 2, 1)))
    unread(net[0], 0, 2)
    check(net, rand(1, 4, 5, 5), golden={"0": IndexedConv2d, "0.weight": (5, 2, 3, 3)})


def test_conv_on_an_unbatched_image():
    net = conv_net(2, nn.Conv2d(6, 5, 3), bias=0.7)
    check(net, rand(2, 8, 8), golden={"0.out_channels": 4})


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("size, bias, left", [(1, 0.7, 4), (3, 0.7, 5), (3, -0.7, 4)])
def test_transposed_conv_reads(rank, size, bias, left):
    reader = TRANSPOSED[rank](6, 5, size, stride=1 if size == 1 else 2)
    check(
        conv_net(rank, reader, bias=bias),
        rand(1, 2, *[6] * rank),
        golden={"0.out_channels": left, "2.in_channels": left},
    )


def test_transposed_conv_pointwise_with_stride_keeps_a_carrier():
    check(conv_net(2, nn.ConvTranspose2d(6, 5, 1, stride=2), bias=0.7), rand(1, 2, 6, 6), golden={"0.out_channels": 5})


@pytest.mark.parametrize("size", [1, 3])
def test_transposed_conv_writes(size):
    net = noisy(nn.Sequential(nn.ConvTranspose2d(3, 6, size, stride=2), nn.Tanh(), nn.Conv2d(6, 2, 1)))
    dead(net[0], 0, 3, dim=1)
    check(
        net,
        rand(1, 3, 4, 4),
        golden={"0.weight": (3, 4, size, size), "0.bias": (4,), "0.out_channels": 4, "2.in_channels": 4},
    )
