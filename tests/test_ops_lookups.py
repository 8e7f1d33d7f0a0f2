"""Lookups by index, slices that are written, biases put together from pieces, pads: what they bind and what passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import nn

# --------------------------------------------------------------------------------------------------- lookups, pads


def test_index_over_positions_passes_channels():
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
            self.table = nn.Parameter(torch.randn(7, 6))
            self.register_buffer("where", torch.randint(0, 7, (3,)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.a(x) + self.table[self.where]))

    net = noisy(Table())
    with torch.no_grad():
        net.table[:, 1] = 0.25
        net.table[:5, 2] = 0.25  # not the same everywhere
    dead(net.a, 1, 2)
    unread(net.out, 4)
    check(net, rand(2, 3, 4), golden={"a.out_features": 4, "table": (7, 4), "where": (3,)})


@pytest.mark.parametrize("places", [(0,), (0, 1), (0, 2), (1,), (1, 2)], ids=str)
def test_index_puts_its_dimensions_where_torch_does(places):
    """One index, two side by side, and two apart, which go to the front."""
    index = {d: torch.tensor([[1, 0], [0, 1], [1, 1]]) for d in places}

    def run(s, x):
        y = torch.tanh(s.a(x))
        return s.out(y[tuple(index[d] if d in index else slice(None) for d in range(3))])

    net = noisy(Net(run, a=nn.Linear(4, 6), out=nn.Linear(6, 2)))
    dead(net.a, 1)
    unread(net.out, 2)
    check(net, rand(2, 2, 2, 4), golden={"a.out_features": 4, "out.in_features": 4})


def test_index_over_channels_stays():
    order = torch.tensor([2, 0, 1, 3])
    net = noisy(Net(lambda s, x: s.out(torch.tanh(s.a(x))[:, order]), a=nn.Linear(4, 4), out=nn.Linear(4, 2)))
    dead(net.a, 1)
    unread(net.out, 3)
    squeezed = check(net, rand(2, 4), golden={"a.out_features": 4})
    assert "index" in reasons(squeezed.report)


def test_writing_a_slice_of_positions():
    def run(s, x):
        y = torch.tanh(s.a(x))
        z = y.clone()
        z[:, 1:3] = torch.tanh(s.b(x[:, :2]))
        return s.out(z) + s.out(y)

    net = noisy(Net(run, a=nn.Linear(4, 6), b=nn.Linear(4, 6), out=nn.Linear(6, 2)))
    dead(net.a, 1)
    dead(net.b, 1)
    unread(net.out, 2)
    check(net, rand(2, 5, 4), golden={"a.out_features": 5, "b.out_features": 5, "out.in_features": 5})


def test_bias_with_a_zeroed_third_as_in_swin_v2_stays():
    """The middle third is written to 0 in the code: that the slice does not depend on the input cannot be seen."""

    def run(s, x):
        bias = s.lin.bias.clone()
        third = bias.numel() // 3
        bias[third : 2 * third].zero_()
        a, b, c = F.linear(x, s.lin.weight, bias).chunk(3, -1)
        return s.out(torch.tanh(a * b + c))

    net = noisy(Net(run, lin=nn.Linear(4, 12), out=nn.Linear(4, 2)))
    unread(net.out, 1)
    check(net, rand(2, 4), golden={"lin.weight": (12, 4), "lin.bias": (12,), "out.in_features": 4})


def test_bias_put_together_from_pieces_as_in_beit():
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(4, 12, bias=False), nn.Linear(4, 2)
            self.first, self.last = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
            self.register_buffer("middle", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = torch.cat([self.first, self.middle, self.last])
            a, b, c = F.linear(x, self.lin.weight, bias).chunk(3, -1)
            return self.out(torch.tanh(a * b + c))

    net = Pieces()
    unread(net.out, 2)
    golden = {"lin.weight": (9, 4), "first": (3,), "middle": (3,), "last": (3,), "out.in_features": 3}
    check(net, rand(2, 4), golden=golden)
    dead(net.lin, 0, 4, 8)  # a third channel that is constant
    golden = {"lin.weight": (6, 4), "first": (2,), "middle": (2,), "last": (2,), "out.in_features": 2}
    check(net, rand(2, 4), golden=golden)


@pytest.mark.parametrize(
    "pads, left", [((-1, 1, -1, 1), 5), ((-1, -1, 0, -2), 5), ((-1, -1, -1, -2), 4), ((1, 0, 0, 0), 5)], ids=str
)
def test_pads_that_cut(pads, left):
    """NASNet pads on one side and cuts on the other: the shape stays, the border of a constant does not."""
    net = Net(lambda s, x: s.out(F.pad(s.a(x), pads)), a=nn.Conv2d(3, 6, 1), out=nn.Conv2d(6, 2, 1))
    noisy(net)
    dead(net.a, 1, bias=0.5)
    dead(net.a, 2, bias=0.0)
    check(net, rand(2, 3, 6, 6), golden={"a.out_channels": left})


def test_tensors_made_in_the_code_read_no_channel():
    def run(s, x):
        y = torch.tanh(s.a(x))
        start = y.new_zeros(y.size(0), 1, 1) + torch.arange(y.size(1), dtype=y.dtype)[None, :, None]
        return s.out(y * start + y.new_full((1,), 2.0))

    net = noisy(Net(run, a=nn.Linear(4, 6), out=nn.Linear(6, 2)))
    dead(net.a, 1, bias=0.0)
    unread(net.out, 2)
    check(net, rand(2, 3, 4), golden={"a.out_features": 4})


# ------------------------------------------------------------------------------------------------ padded channels


def padded_shortcut() -> Net:
    """ResNet for CIFAR: the shortcut takes every other pixel and pads the new channels with zeros."""

    def run(s, x):
        y = torch.relu(s.stem(x))
        shortcut = F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return s.head(torch.relu(shortcut + s.b(torch.relu(s.a(y)))).mean((2, 3)))

    net = Net(
        run,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        a=nn.Conv2d(4, 6, 3, stride=2, padding=1),
        b=nn.Conv2d(6, 8, 3, padding=1),
        head=nn.Linear(8, 3),
    )
    return noisy(net)  # type: ignore[return-value]


def test_channels_padded_with_zeros():
    net = padded_shortcut()
    dead(net.stem, 1, bias=0.0)
    dead(net.b, 3, 0)  # 3 meets channel 1 of the stem: a constant; 0 meets a pad, whose width is in the code
    golden = {"stem.out_channels": 3, "a.in_channels": 3, "b.out_channels": 7, "head.in_features": 7}
    check(net, rand(2, 3, 8, 8), golden=golden)


def test_channels_padded_with_zeros_and_read():
    net = padded_shortcut()
    dead(net.stem, 1, bias=0.0)  # but b writes where it meets the stream
    check(net, rand(2, 3, 8, 8), golden={"stem.out_channels": 4, "b.out_channels": 8})


def test_autocast_inside_a_forward_hides_nothing():
    def run(s, x):
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(s.a(x))
        return s.out(y)

    net = noisy(Net(run, a=nn.Linear(4, 6), out=nn.Linear(6, 2)))
    dead(net.a, 1)
    check(net, rand(2, 4), golden={"a.out_features": 5})
    assert torch.autocast.__enter__.__name__ == "__enter__"
