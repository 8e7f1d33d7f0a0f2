"""Ops that real models are made of: windows, pixel shuffle, gates, split attention, transposed Linears, recurrence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

# ------------------------------------------------------------------------------------------ pixels and channels traded


def shuffled(conv: nn.Module | None = None) -> Net:
    net = Net(
        lambda s, x: s.out(torch.tanh(F.pixel_shuffle(s.up(x), 2))),
        up=nn.Conv2d(3, 16, 1),
        out=conv or nn.Conv2d(4, 2, 3),
    )
    return noisy(net)  # type: ignore[return-value]


def test_pixel_shuffle_unread_channel():
    net = shuffled()
    unread(net.out, 1)
    check(net, rand(2, 3, 5, 5), golden={"up.out_channels": 12, "out.in_channels": 3})


def test_pixel_shuffle_constant_channel():
    net = shuffled()
    dead(net.up, 4, 5, 6, 7, bias=0.3)
    check(net, rand(2, 3, 5, 5), golden={"up.out_channels": 12, "out.in_channels": 3})


def test_pixel_shuffle_of_different_constants_varies_over_pixels():
    net = shuffled()
    dead(net.up, 4, 5, 6, 7)
    check(net, rand(2, 3, 5, 5), golden={"up.out_channels": 16, "out.in_channels": 4})


def test_pixel_shuffle_with_three_of_four_dead_stays():
    net = shuffled()
    dead(net.up, 4, 5, 6, bias=0.3)
    check(net, rand(2, 3, 5, 5), golden={"up.out_channels": 16})


def unshuffled() -> Net:
    net = Net(
        lambda s, x: s.out(F.pixel_unshuffle(torch.tanh(s.down(x)), 2)),
        down=nn.Conv2d(3, 4, 1),
        out=nn.Conv2d(16, 2, 1),
    )
    return noisy(net)  # type: ignore[return-value]


def test_pixel_unshuffle():
    net = unshuffled()
    unread(net.out, 4, 5, 6, 7)
    dead(net.down, 3)
    check(net, rand(2, 3, 6, 6), golden={"down.out_channels": 2, "out.in_channels": 8})


def test_pixel_unshuffle_with_one_pixel_read_stays():
    net = unshuffled()
    unread(net.out, 4, 5, 7)
    check(net, rand(2, 3, 6, 6), golden={"down.out_channels": 4, "out.in_channels": 16})


def windows(padding: int) -> Net:
    net = Net(
        lambda s, x: s.out(F.unfold(torch.tanh(s.a(x)), 3, padding=padding).transpose(1, 2)),
        a=nn.Conv2d(3, 4, 1),
        out=nn.Linear(36, 2),
    )
    return noisy(net)  # type: ignore[return-value]


@pytest.mark.parametrize("padding, left", [(0, 2), (1, 3)])
def test_unfold(padding, left):
    """A constant other than 0 has another border where zeros are padded."""
    net = windows(padding)
    dead(net.a, 1, bias=0.5)
    unread(net.out, *range(18, 27))
    check(net, rand(2, 3, 5, 5), golden={"a.out_channels": left, "out.in_features": 9 * left})


def folded() -> Net:
    net = Net(
        lambda s, x: s.out(torch.tanh(F.fold(s.a(x).transpose(1, 2), (6, 6), 3))),
        a=nn.Linear(5, 36),
        out=nn.Conv2d(4, 2, 1),
    )
    return noisy(net)  # type: ignore[return-value]


def test_fold():
    net = folded()
    unread(net.out, 2)
    dead(net.a, *range(9, 18), bias=0.0)
    check(net, rand(2, 16, 5), golden={"a.out_features": 18, "out.in_channels": 2})


def test_fold_adds_overlapping_windows_so_a_constant_varies():
    net = folded()
    dead(net.a, *range(9, 18), bias=0.4)
    check(net, rand(2, 16, 5), golden={"a.out_features": 36})


def test_tensor_unfold_over_positions_and_over_channels():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.a(x)).unfold(1, 3, 2).mean(-1)) + s.b(x).unfold(2, 2, 2).sum(-1)[:, :3],
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 4),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.a, 1)
    unread(net.out, 2)
    dead(net.b, 1, bias=0.0)
    check(net, rand(2, 7, 4), golden={"a.out_features": 4, "b.out_features": 4, "out.in_features": 4})


# -------------------------------------------------------------------------------------------------- shuffles and gates


def channel_shuffle() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ChannelShuffle(2), nn.Tanh(), nn.Conv2d(8, 2, 1))
    return noisy(net)  # type: ignore[return-value]


def test_channel_shuffle_loses_the_same_column_of_every_group():
    net = channel_shuffle()
    dead(net[0], 1, 5)
    check(net, rand(1, 3, 4, 4), golden={"0.out_channels": 6, "3.in_channels": 6})


def test_channel_shuffle_different_columns_stay():
    net = channel_shuffle()
    dead(net[0], 1, 6)
    check(net, rand(1, 3, 4, 4), golden={"0.out_channels": 8, "3.in_channels": 8})


@pytest.mark.parametrize("dim", [1, -1])
def test_glu_halves_go_together(dim):
    net = noisy(Net(lambda s, x: s.out(F.glu(s.a(x), dim)), a=nn.Linear(4, 12), out=nn.Linear(6, 2)))
    unread(net.out, 1)
    dead(net.a, 2, bias=0.0)  # a_2 = 0: the gate does not matter
    dead(net.a, 3, 9)  # both halves constant
    dead(net.a, 10)  # the gate alone: a scale
    check(net, rand(2, 4), golden={"a.out_features": 6, "out.in_features": 3})


def test_glu_gate_alone_stays():
    net = noisy(Net(lambda s, x: s.out(F.glu(s.a(x), -1)), a=nn.Linear(4, 12), out=nn.Linear(6, 2)))
    dead(net.a, 6, 7)
    check(net, rand(2, 4), golden={"a.out_features": 12})


def test_split_attention_over_a_radix():
    """ResNeSt and SKNet: a softmax over the radix, then a weighted sum: channel c of both halves goes together."""

    def run(s, x):
        y = torch.relu(s.conv(x))
        y = y.reshape(x.size(0), 2, y.size(1) // 2, *y.shape[2:])
        gate = s.fc2(torch.relu(s.fc1(y.sum(1).mean((2, 3)))))
        gate = gate.reshape(x.size(0), 2, gate.size(1) // 2).softmax(1)
        return s.out((y * gate[..., None, None]).sum(1))

    net = Net(run, conv=nn.Conv2d(3, 12, 1), fc1=nn.Linear(6, 5), fc2=nn.Linear(5, 12), out=nn.Conv2d(6, 2, 1))
    noisy(net)
    unread(net.out, 1)
    unread(net.fc1, 1, 2)
    dead(net.conv, 4)  # half of a pair
    golden = {"conv.out_channels": 10, "fc1.in_features": 5, "fc2.out_features": 10, "out.in_channels": 5}
    check(net, rand(2, 3, 4, 4), golden=golden)


def test_mean_of_each_group_of_channels_binds_the_group():
    def run(s, x):
        y = s.a(x)
        y = y.reshape(y.size(0), -1, 3)
        return s.out(torch.tanh(y - y.mean(-1, keepdim=True)).flatten(1))

    net = noisy(Net(run, a=nn.Linear(4, 12), out=nn.Linear(12, 2)))
    unread(net.out, 3, 4, 5, 7)  # a whole group, and one of another
    check(net, rand(2, 4), golden={"a.out_features": 9, "out.in_features": 9})


# ------------------------------------------------------------------------------------------------ transposed, recurrent


class Conv1D(nn.Module):
    """GPT-2's Linear: the weight is (in, out), and the output width an attribute."""

    def __init__(self, width: int, nx: int) -> None:
        super().__init__()
        self.nf = width
        self.weight, self.bias = nn.Parameter(torch.randn(nx, width)), nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def test_addmm():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Conv1D(8, 6), nn.Tanh(), Conv1D(3, 8))
    noisy(net)
    dead(net[0], 1)
    dead(net[2], 2, dim=1)
    with torch.no_grad():
        net[4].weight[5] = 0
        net[2].weight[3] = 0
    golden = {"0.out_features": 4, "2.weight": (4, 6), "2.bias": (6,), "2.nf": 6, "4.weight": (6, 3), "4.nf": 3}
    check(net, rand(2, 5, 4), golden=golden)


def test_addmm_with_a_factor_stays():
    net = Net(
        lambda s, x: s.out(torch.addmm(s.b, torch.tanh(s.a(x)), s.w, alpha=0.5)),
        a=nn.Linear(4, 6),
        b=nn.Parameter(torch.randn(5)),
        w=nn.Parameter(torch.randn(6, 5)),
        out=nn.Linear(5, 2),
    )
    noisy(net)
    dead(net.a, 1)
    check(net, rand(2, 4), golden={"a.out_features": 6, "w": (6, 5)})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_with_a_reason(kind):
    net = Net(
        lambda s, x: s.out(torch.tanh(s.mid(s.rnn(s.a(x))[0]))),
        a=nn.Linear(4, 6),
        rnn=kind(6, 5, batch_first=True, bidirectional=True),
        mid=nn.Linear(10, 7),
        out=nn.Linear(7, 2),
    )
    noisy(net)
    dead(net.a, 1)
    unread(net.mid, 2)
    unread(net.out, 3)
    squeezed = check(net, rand(2, 3, 4), golden={"a.out_features": 6, "mid.weight": (6, 10), "out.in_features": 6})
    assert "rnn" in reasons(squeezed.report) and "recurrent" in reasons(squeezed.report)


def test_recurrent_cell_stays():
    net = Net(
        lambda s, x: s.out(s.cell(torch.tanh(s.a(x)))), a=nn.Linear(4, 6), cell=nn.GRUCell(6, 5), out=nn.Linear(5, 2)
    )
    noisy(net)
    dead(net.a, 1)
    check(net, rand(2, 4), golden={"a.out_features": 6})


@pytest.mark.parametrize(
    "op, channels", [(nn.PixelShuffle(2), 4), (nn.GLU(1), 2), (nn.Fold((7, 5), 3), 9)], ids=["shuffle", "glu", "fold"]
)
def test_a_single_channel_is_left_alone(op, channels):
    """One channel comes out: its width cannot shrink, whoever reads it."""
    first = nn.Conv2d(3, channels, 1) if not isinstance(op, nn.Fold) else nn.Conv1d(3, channels, 1)
    net = Net(lambda s, x: s.out(torch.tanh(op(s.a(x)))), a=first, out=nn.Conv2d(1, 2, 1))
    noisy(net)
    dead(net.a, *range(channels), bias=0.0)
    check(net, rand(2, 3, 15) if isinstance(op, nn.Fold) else rand(2, 3, 4, 4), gradients=False)
