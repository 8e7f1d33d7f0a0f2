"""Depthwise and grouped convolutions: channels leave alone, in step, or with their whole group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

# --------------------------------------------------------------------------------------------------------- depthwise


def block(multiplier: int = 1, conv: type[nn.Conv2d] = nn.Conv2d) -> Net:
    """A residual block whose stream keeps all its channels."""
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.pw2(torch.relu(s.pw1(s.dw(y))))),
        stem=nn.Conv2d(3, 6, 1),
        dw=conv(6, 6 * multiplier, 3, padding=1, groups=6),
        pw1=nn.Conv2d(6 * multiplier, 8, 1),
        pw2=nn.Conv2d(8, 6, 1),
        head=nn.Conv2d(6, 2, 1),
    )
    return noisy(net)  # type: ignore[return-value]


def test_depthwise_dead_filter_while_the_stream_keeps_the_channel():
    net = block()
    dead(net.dw, 2)
    unread(net.pw1, 4)
    squeezed = check(
        net,
        rand(1, 3, 5, 5),
        golden={
            "stem.out_channels": 6,
            "dw.weight": (4, 1, 3, 3),
            "dw.groups": 4,
            "pw1.in_channels": 4,
            "pw2.out_channels": 6,
        },
    )
    assert squeezed.model.dw.index.tolist() == [0, 1, 3, 5]


def test_depthwise_with_nothing_dead_is_left_alone():
    check(block(), rand(1, 3, 5, 5), golden={"dw": nn.Conv2d, "dw.groups": 6, "dw.weight": (6, 1, 3, 3)})


def test_depthwise_with_multiplier():
    net = block(multiplier=2)
    dead(net.dw, 0, 5, 8, 9)
    squeezed = check(net, rand(1, 3, 5, 5), golden={"stem.out_channels": 6, "dw.out_channels": 8, "pw1.in_channels": 8})
    assert squeezed.model.dw.index.tolist() == [0, 1, 1, 2, 3, 3, 5, 5]


def test_depthwise_with_multiplier_and_nothing_dead_is_left_alone():
    check(block(multiplier=2), rand(1, 3, 5, 5), golden={"dw": nn.Conv2d, "dw.groups": 6, "dw.weight": (12, 1, 3, 3)})


def test_depthwise_on_the_stream_that_goes():
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 2, 1))
    )
    dead(net[0], 1, bias=-1.0)  # 0: padding keeps it, so the filter's output is its bias
    dead(net[0], 4, bias=1.0)  # not 0, and padded: stays
    check(
        net, rand(1, 3, 5, 5), golden={"0.out_channels": 5, "2.groups": 5, "2.weight": (5, 1, 3, 3), "3.in_channels": 5}
    )


class SameConv(nn.Conv2d):
    """Pads in its own forward, as timm's Conv2dSame does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, groups=self.groups)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_with_a_forward_of_its_own(multiplier):
    net = block(multiplier, conv=SameConv)
    net.dw.padding = (0, 0)
    dead(net.dw, 2)
    check(net, rand(1, 3, 5, 5), golden={"dw": SameConv, "stem.out_channels": 6})


def test_depthwise_straight_from_the_input():
    net = noisy(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(4, 3, 1)))
    dead(net[0], 1)
    check(net, rand(1, 4, 5, 5), golden={"0.weight": (3, 1, 3, 3), "2.in_channels": 3})


def test_depthwise_transposed():
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)))
    dead(net[1], 1)
    check(net, rand(1, 3, 4, 4))


# ----------------------------------------------------------------------------------------------------------- grouped


def grouped() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, groups=4), nn.Tanh(), nn.Conv2d(8, 2, 1))
    return noisy(net)  # type: ignore[return-value]


def test_grouped_whole_groups_go():
    net = grouped()
    unread(net[4], 2, 3)
    check(
        net,
        rand(1, 3, 5, 5),
        golden={"0.out_channels": 6, "2.groups": 3, "2.weight": (6, 2, 3, 3), "2.in_channels": 6, "4.in_channels": 6},
    )


def test_grouped_the_same_column_in_every_group():
    net = grouped()
    dead(net[0], 0, 2, 4, 6)
    check(
        net, rand(1, 3, 5, 5), golden={"0.out_channels": 4, "2.groups": 4, "2.weight": (8, 1, 3, 3), "2.in_channels": 4}
    )


def test_grouped_a_different_column_in_every_group():
    net = grouped()
    dead(net[0], 0, 3, 4, 7)
    golden = {"0.out_channels": 4, "2.groups": 4, "2.weight": (8, 1, 3, 3), "2.in_channels": 4}
    check(net, rand(1, 3, 5, 5), golden=golden)


def test_grouped_columns_of_some_groups_stay():
    net = grouped()
    dead(net[0], 0, 3, 4)
    squeezed = check(net, rand(1, 3, 5, 5), golden={"0.out_channels": 8, "2.weight": (8, 2, 3, 3)})
    assert "group" in reasons(squeezed.report)


def test_grouped_columns_and_whole_groups():
    net = noisy(nn.Sequential(nn.Conv2d(3, 12, 1), nn.Tanh(), nn.Conv2d(12, 8, 3, groups=4), nn.Conv2d(8, 2, 1)))
    dead(net[0], 0, 1, 4, 11)  # two of group 0, one each of groups 1 and 3
    unread(net[3], 4, 5)  # all of group 2
    golden = {"0.out_channels": 6, "2.groups": 3, "2.weight": (6, 2, 3, 3), "2.in_channels": 6, "3.in_channels": 6}
    squeezed = check(net, rand(1, 3, 5, 5), golden=golden)
    columns = squeezed.report.group_columns["2.weight"]  # a row each; group 0 had to keep one of its dead ones
    assert columns[:, 1].tolist() == [2, 2, 2, 2, 1, 1] and columns[2:, 0].tolist() == [0, 0, 0, 0]
    old = net[2].weight[squeezed.report.slices["2.weight"][0]]
    kept = old.gather(1, columns[:, :, None, None].expand(-1, -1, 3, 3))
    assert torch.equal(squeezed.model[2].weight, kept)


def test_grouped_called_twice_on_different_columns():
    net = Net(
        lambda s, x: s.out(s.mid(torch.tanh(s.a(x))) * s.mid(torch.tanh(s.b(x)))),
        a=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(3, 8, 1),
        mid=nn.Conv2d(8, 8, 3, groups=4),
        out=nn.Conv2d(8, 2, 1),
    )
    noisy(net)
    for layer in (net.a, net.b):
        dead(layer, 0, 3, 4, 7, bias=0.4)
    check(net, rand(1, 3, 5, 5), golden={"a.out_channels": 4, "b.out_channels": 4, "mid.weight": (8, 1, 3, 3)})
    noisy(net.b)  # other constants: they cannot be folded for both
    check(net, rand(1, 3, 5, 5), golden={"a.out_channels": 8, "mid.weight": (8, 2, 3, 3)})


def test_grouped_in_front_of_padding_different_columns():
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4, padding=1), nn.Conv2d(8, 2, 1))
    )
    dead(net[0], 0, 3, 4, 7, bias=-1.0)
    check(net, rand(1, 3, 5, 5), golden={"0.out_channels": 4, "2.weight": (8, 1, 3, 3)})


def test_grouped_convolutions_with_a_channel_shuffle_between():
    """ShuffleNet: what leaves must be the same column of every group on one side, and fill groups on the other."""

    def run(s, x):
        y = torch.tanh(s.one(torch.tanh(s.stem(x))))
        b, c, h, w = y.shape
        y = y.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)
        return s.out(torch.tanh(s.two(y)))

    net = Net(
        run,
        stem=nn.Conv2d(3, 8, 1),
        one=nn.Conv2d(8, 8, 1, groups=2),
        two=nn.Conv2d(8, 8, 1, groups=2),
        out=nn.Conv2d(8, 2, 1),
    )
    noisy(net)
    dead(net.stem, 1, 7)  # other columns of the two groups
    dead(net.one, 0, 4, 2, 6)  # columns 0 and 2 of both groups: half of each group behind the shuffle
    golden = {"stem.out_channels": 6, "one.weight": (4, 3, 1, 1), "two.weight": (8, 2, 1, 1), "two.in_channels": 4}
    check(net, rand(1, 3, 4, 4), golden=golden)


def test_grouped_one_output_of_each_group():
    net = grouped()
    unread(net[4], 0, 3, 4, 7)
    check(
        net, rand(1, 3, 5, 5), golden={"2.out_channels": 4, "2.groups": 4, "2.weight": (4, 2, 3, 3), "4.in_channels": 4}
    )


def test_grouped_one_output_of_one_group_stays():
    net = grouped()
    unread(net[4], 0)
    check(net, rand(1, 3, 5, 5), golden={"2.out_channels": 8, "4.in_channels": 8})


def test_grouped_transposed():
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 8, 3, groups=4), nn.Tanh(), nn.Conv2d(8, 2, 1)))
    unread(net[3], 2, 3)
    dead(net[0], 4)
    check(net, rand(1, 3, 4, 4))
