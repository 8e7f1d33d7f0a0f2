"""Padding, pooling, reductions and lookups."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, unread
from test_rules_shape import around, image
from torch import nn

# ------------------------------------------------------------------------------------------------- padding and pooling


@pytest.mark.parametrize(
    "mode, value, bias, left",
    [
        ("constant", 0.0, 0.5, 6),
        ("constant", 0.0, 0.0, 5),
        ("constant", 0.5, 0.5, 5),
        ("constant", 0.5, 0.0, 6),
        ("reflect", None, 0.5, 5),
        ("replicate", None, 0.5, 5),
        ("circular", None, 0.5, 5),
    ],
)
def test_pad(mode, value, bias, left):
    net = image(lambda x: F.pad(x, (1, 2, 1, 0), mode, value))
    dead(net.lin, 1, bias=bias)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": left})


def test_pad_over_channels_is_a_concat_with_constants():
    """The pads stay, for the code makes them; between them channels go as they do anywhere."""
    net = image(lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), out=8)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 6, "out.in_channels": 8})
    dead(net.lin, 1)
    unread(net.out, 4)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 4, "out.in_channels": 6})


@pytest.mark.parametrize("pads, out", [((1, 0, 0, 0, 1, 1), 8), ((0, 0, 0, 0, -1, 0), 5)])
def test_pad_over_channels_and_positions_or_by_cutting_keeps_them(pads, out):
    net = image(lambda x: F.pad(x, pads), out=out)
    dead(net.lin, 1)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 6, "out.in_channels": out})


KEEPS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 1, padding=1),
    nn.AvgPool2d(2),
    nn.AvgPool2d(3, 2, ceil_mode=True),
    nn.AvgPool2d(3, 1, padding=1, count_include_pad=False),
    nn.AdaptiveAvgPool2d(2),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveMaxPool2d(2),
    nn.Upsample(scale_factor=2),
    nn.Upsample(scale_factor=2, mode="bilinear"),
    nn.Upsample(size=(7, 7), mode="bicubic"),
    nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
    nn.AdaptiveAvgPool2d((None, 1)),
]
CHANGES = [nn.AvgPool2d(3, 1, padding=1), nn.AvgPool2d(2, divisor_override=3), nn.LPPool2d(2, 2), nn.ZeroPad2d(1)]


@pytest.mark.parametrize("pool", KEEPS, ids=str)
def test_pooling_keeps_a_constant(pool):
    net = image(pool)
    dead(net.lin, 1, bias=0.5)
    golden = {} if isinstance(pool, nn.AdaptiveMaxPool2d) else {"lin.out_channels": 5}
    check(net, rand(1, 3, 6, 6), golden=golden)


@pytest.mark.parametrize("pool", CHANGES, ids=str)
def test_pooling_that_changes_a_constant(pool):
    net = image(pool)
    dead(net.lin, 1, bias=0.5)
    dead(net.lin, 2, bias=0.0)
    squeezed = check(net, rand(1, 3, 6, 6), gradients=False)
    assert squeezed.model.lin.out_channels in ((5,) if not isinstance(pool, nn.LPPool2d) else (4, 5, 6))


def test_pooling_that_returns_indices_does_not_take_them_for_values():
    def pool(x):
        y, where = F.max_pool2d(x, 2, return_indices=True)
        return y + where

    net = image(pool)
    dead(net.lin, 1, bias=0.5)
    check(net, rand(1, 3, 6, 6))


@pytest.mark.parametrize(
    "code, out, left",
    [
        (lambda x: x.mean(1), 6, 5),
        (lambda x: x.mean(1, keepdim=True), 6, 5),
        (lambda x: x.amax(1), 6, 5),
        (lambda x: x.sum(1), 6, None),
        (lambda x: x.max(1).values, 6, None),
        (lambda x: x.softmax(1), 6, None),
        (lambda x: x.cumsum(1), 6, None),
        (lambda x: x.std(1), 6, None),
        (lambda x: x.softmax(-1), 6, 6),
        (lambda x: x.log_softmax(-1), 6, 6),
        (lambda x: x - x.mean(-1, keepdim=True), 6, 6),
        (lambda x: x.mean(-1, keepdim=True).expand_as(x), 6, 6),
        (lambda x: x - x.amax(-1, keepdim=True), 6, 6),
        (lambda x: x + x.mean(), 6, 6),
        (lambda x: x.sum((1, 2), keepdim=True) + x, 6, 6),
        (lambda x: x.norm(dim=-1, keepdim=True) * x, 6, 6),
        (lambda x: x.argmax(1).to(x.dtype), 6, None),
        (lambda x: x.logsumexp(1), 6, None),
    ],
)
def test_reductions(code, out, left):
    net = around(code, out=out)
    dead(net.lin, 1, bias=0.5)
    check(net, rand(2, 5, 4), golden={"lin.out_features": left} if left else {}, gradients=False)


class Paths(nn.Module):
    """Two paths that are mixed by a softmax between them, channel by channel (selective kernels)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.gate = (nn.Linear(4, n) for n in (6, 6, 12))
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        paths = torch.stack([self.one(x), self.two(x)], 1)
        gate = self.gate(x.mean(1)).unflatten(1, (2, -1))[:, :, None].softmax(1)
        return self.out((paths * gate).sum(1))


@pytest.mark.parametrize("rows, left", [([1, 7, 4, 10], 4), ([1, 4, 10], 5), ([1, 4], 6)])
def test_softmax_and_sum_of_constants_are_constant_where_all_parts_are(rows, left):
    """The gate of channel k is constant where both of its rows are; then so is the sum of constant paths."""
    net = noisy(Paths())
    dead(net.gate, *rows)
    for path in (net.one, net.two):
        dead(path, 1, 4)
    golden = {"one.out_features": left, "two.out_features": left, "gate.out_features": 2 * left}
    check(net, rand(2, 5, 4), golden=golden)


def test_a_sum_over_positions_is_no_constant():
    """There may be more of them in another call."""
    net = noisy(Net(lambda s, x: s.out(s.lin(x).sum(1)), lin=nn.Linear(4, 6), out=nn.Linear(6, 3)))
    dead(net.lin, 1, 4)
    small = check(net, rand(2, 5, 4), golden={"lin.out_features": 6}).model
    assert torch.allclose(small(longer := rand(2, 9, 4)), net(longer))


# ------------------------------------------------------------------------------------------------------------- lookups


def test_embedding_loses_unread_and_constant_columns():
    net = Net(lambda s, x: s.out(s.table(x)), table=nn.Embedding(7, 6), out=nn.Linear(6, 3))
    with torch.no_grad():
        net.table.weight[:, 1] = 0.3
    unread(net.out, 4)
    check(
        net,
        torch.tensor([[0, 1, 5]]),
        golden={"table.weight": (7, 4), "table.embedding_dim": 4, "table.num_embeddings": 7},
    )


@pytest.mark.parametrize("bias", [True, False])
def test_embedding_tied_to_the_output(bias):
    net = Net(
        lambda s, x: s.out(torch.tanh(s.mid(s.table(x)))),
        table=nn.Embedding(7, 6),
        mid=nn.Linear(6, 6),
        out=nn.Linear(6, 7, bias=bias),
    )
    net.out.weight = net.table.weight
    with torch.no_grad():
        net.table.weight[:, 1] = 0.3
        net.table.weight[:, 2] = 0
    dead(net.mid, 1, 2)
    squeezed = check(
        net, torch.tensor([[0, 1, 5]]), golden={"table.embedding_dim": 4, "mid.weight": (4, 4), "out.in_features": 4}
    )
    assert squeezed.model.out.weight is squeezed.model.table.weight


def selected(code) -> Net:
    net = Net(code, a=nn.Linear(4, 6), b=nn.Linear(4, 6), one=nn.Linear(3, 3), two=nn.Linear(3, 3))
    net.register_buffer("index", torch.tensor([4, 0, 2]))
    return noisy(net)  # type: ignore[return-value]


def test_index_select_by_a_buffer():
    net = selected(lambda s, x: s.one(s.a(x).index_select(1, s.index)))
    unread(net.one, 1)
    check(net, rand(2, 4), golden={"a.out_features": 2, "index": (2,), "one.in_features": 2})


def test_index_buffer_used_twice():
    net = selected(lambda s, x: s.one(s.a(x).index_select(1, s.index)) + s.two(s.b(x).index_select(1, s.index)))
    dead(net.a, 1, 3)
    check(net, rand(2, 4))


def test_index_buffer_read_elsewhere():
    net = selected(lambda s, x: s.one(s.a(x).index_select(1, s.index)) + s.index.sum())
    dead(net.a, 1, 3)
    check(net, rand(2, 4))


@pytest.mark.parametrize(
    "total", [lambda x: x.sum(-1), lambda x: x.norm(dim=-1), lambda x: x.norm(p=torch.inf, dim=-1)]
)
@pytest.mark.parametrize("bias, left", [(0.0, 4), (0.3, 6)])
def test_sums_over_channels_lose_what_is_zero(total, bias, left):
    net = noisy(Net(lambda s, x: total(s.a(x)), a=nn.Linear(4, 6)))
    dead(net.a, 1, 4, bias=bias)
    check(net, rand(3, 4), golden={"a.out_features": left})


def test_sums_over_the_channels_of_each_head():
    """Heads stay equally wide: the second has a zero more, which stays."""
    net = noisy(
        Net(
            lambda s, x: s.out(s.a(x).unflatten(1, (s.heads, -1)).norm(dim=-1)),
            a=nn.Linear(4, 12),
            out=nn.Linear(3, 2),
            heads=3,
        )
    )
    dead(net.a, 0, 5, 6, 11, bias=0.0)
    check(net, rand(3, 4), golden={"a.out_features": 9, "out.in_features": 3})
    unread(net.out, 1)
    check(net, rand(3, 4), golden={"a.out_features": 6, "out.in_features": 2})


def test_a_sum_over_heads_binds_what_enters_it():
    net = noisy(Net(lambda s, x: s.out(s.a(x).unflatten(1, (3, -1)).sum(1)), a=nn.Linear(4, 12), out=nn.Linear(4, 2)))
    dead(net.a, 0, 5, 11, bias=0.0)
    check(net, rand(3, 4), golden={"a.out_features": 12})
    unread(net.out, 2)
    check(net, rand(3, 4), golden={"a.out_features": 9, "out.in_features": 3})


def test_a_norm_of_order_zero_or_less_keeps_zeros():
    net = noisy(Net(lambda s, x: s.a(x).abs().norm(p=-1.0, dim=-1), a=nn.Linear(4, 6)))
    dead(net.a, 1, bias=0.0)
    check(net, rand(3, 4), golden={"a.out_features": 6})
