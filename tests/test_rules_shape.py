"""Shape ops, pooling, reductions and lookups: labels travel with the elements, and what stays is rectangular."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from check import check, close, noisy
from nets import Net, dead, rand, reasons, unread
from torch import Tensor, nn

import squeeze_release as sr


def around(code, width: int = 6, out: int | None = None) -> Net:
    """lin -> code -> out, over features."""
    net = Net(lambda s, x: s.out(code(s.lin(x))), lin=nn.Linear(4, width), out=nn.Linear(out or width, 3))
    return noisy(net)  # type: ignore[return-value]


def image(code, width: int = 6, out: int | None = None, **reader) -> Net:
    """conv -> code -> conv, over images."""
    net = Net(
        lambda s, x: s.out(code(s.lin(x))), lin=nn.Conv2d(3, width, 1), out=nn.Conv2d(out or width, 2, 1, **reader)
    )
    return noisy(net)  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- views and permutes


def test_flatten_into_linear():
    net = noisy(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5), nn.Tanh(), nn.Linear(5, 2))
    )
    dead(net[0], 1)
    unread(net[3], *range(27, 36))  # all nine positions of channel 3
    unread(net[3], 0, 1)  # two positions of channel 0: it stays, whole
    check(net, rand(1, 3, 5, 5), golden={"0.out_channels": 2, "3.weight": (5, 18)})


def test_flatten_keeps_a_channel_with_one_position_read():
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 5)))
    unread(net[2], *range(27, 35))
    check(net, rand(1, 3, 5, 5), golden={"0.out_channels": 4})


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.view(x.size(0), 1, -1).flatten(1),
        lambda x: x[:, None].transpose(1, 2).squeeze(2),
        lambda x: x.t().t(),
        lambda x: x.clone().contiguous(),
        lambda x: x.reshape(-1, x.shape[-1]),
        lambda x: x[None].movedim(0, 1)[:, 0],
        lambda x: x.unflatten(0, (-1, 1)).flatten(0, 1),
        lambda x: x[..., :],
        lambda x: x.mT if x.dim() == 3 else x,
        lambda x: x.view_as(x),
    ],
)
def test_moves_that_keep_the_channels(code):
    net = around(code)
    dead(net.lin, 1, 2)
    check(net, rand(2, 4), golden={"lin.out_features": 4, "out.in_features": 4})


def test_permute_to_channels_last_and_back():
    net = Net(
        lambda s, x: s.out(s.mid(s.lin(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        lin=nn.Conv2d(3, 6, 1),
        mid=nn.Linear(6, 5),
        out=nn.Conv2d(5, 2, 1),
    )
    noisy(net)
    dead(net.lin, 1)
    unread(net.out, 3)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 5, "mid.weight": (4, 5), "out.in_channels": 4})


def test_reshape_that_mixes_channels_and_positions():
    net = Net(
        lambda s, x: s.out(s.lin(x).transpose(1, 2).reshape(x.size(0), 5, -1)), lin=nn.Linear(4, 6), out=nn.Linear(6, 3)
    )
    noisy(net)
    dead(net.lin, 1)
    check(net, rand(2, 5, 4), golden={"lin.out_features": 6})


def test_reshape_without_transpose_mixes_too():
    net = image(lambda x: x.reshape(x.size(0), x.size(2), x.size(1), x.size(3)).transpose(1, 2), width=4)
    dead(net.lin, 1)
    unread(net.out, 2)
    check(net, rand(1, 3, 6, 5))


def test_pixel_shuffle_written_out_and_as_a_module():
    for code in (
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: x.view(-1, x.size(1) // 4, 2, 2, 3, 3).permute(0, 1, 4, 2, 5, 3).reshape(x.size(0), -1, 6, 6),
    ):
        net = image(code, width=8, out=2)
        dead(net.lin, 0, 1, 2, 3)
        unread(net.out, 0)
        check(net, rand(1, 3, 3, 3))


def test_patchify_reads_channels_of_every_pixel():
    def patches(x):
        n, c, h, w = x.shape
        return x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).flatten(3)

    net = Net(lambda s, x: s.out(patches(s.lin(x))), lin=noisy(nn.Conv2d(3, 4, 1)), out=nn.Linear(16, 3))
    dead(net.lin, 1)
    unread(net.out, 12, 13, 14, 15)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 2, "out.in_features": 8})


def shuffle(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def test_channel_shuffle_loses_the_same_channel_of_each_group():
    net = image(shuffle, width=8)
    dead(net.lin, 1, 5)
    squeezed = check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 6, "out.in_channels": 6})
    assert squeezed.report.slices["lin.weight"][0].tolist() == [0, 2, 3, 4, 6, 7]


def test_channel_shuffle_keeps_different_channels():
    net = image(shuffle, width=8)
    dead(net.lin, 1, 6)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 8})


# -------------------------------------------------------------------------------------------------- cat, stack, split


def test_dense_net_with_uneven_removal():
    def dense(s, x):
        a = s.stem(x)
        b = s.one(a)
        c = s.two(torch.cat([a, b], 1))
        return s.out(torch.relu(torch.cat([a, b, c], 1)))

    net = Net(dense, stem=nn.Conv2d(3, 4, 1), one=nn.Conv2d(4, 5, 1), two=nn.Conv2d(9, 3, 1), out=nn.Conv2d(12, 2, 1))
    noisy(net)
    dead(net.stem, 0)
    dead(net.one, 1, 2)
    unread(net.out, 0, 5, 6, 9)
    unread(net.out, 3)  # still read by `one` and `two`
    check(
        net,
        rand(1, 3, 4, 4),
        golden={"stem.out_channels": 3, "one.weight": (3, 3, 1, 1), "two.weight": (2, 6, 1, 1), "out.in_channels": 8},
    )


def test_cat_with_the_input():
    net = Net(lambda s, x: s.out(torch.cat([x, s.lin(x)], 1)), lin=nn.Linear(4, 6), out=nn.Linear(10, 3))
    noisy(net)
    dead(net.lin, 1)
    unread(net.out, 0)
    check(net, rand(2, 4), golden={"lin.out_features": 5, "out.in_features": 9})


def test_cat_of_a_class_token():
    net = Net(
        lambda s, x: s.out(torch.cat([s.token.expand(x.size(0), -1, -1), s.lin(x)], 1) + s.position),
        lin=nn.Linear(4, 6),
        token=nn.Parameter(torch.randn(1, 1, 6)),
        position=nn.Parameter(torch.randn(1, 6, 6)),
        out=nn.Linear(6, 3),
    )
    noisy(net)
    dead(net.lin, 1, 2)
    unread(net.out, 3)
    with torch.no_grad():
        net.token[..., 1] = net.lin.bias[1]  # the same number in every token ...
        net.position[..., 1] = 0.4  # ... at every place: a constant
    check(net, rand(2, 5, 4), golden={"lin.out_features": 4, "token": (1, 1, 4), "position": (1, 6, 4)})


def test_glu_by_chunk():
    def glu(x):
        a, b = x.chunk(2, -1)
        return a * torch.sigmoid(b)

    net = around(glu, width=12, out=6)
    unread(net.out, 1)
    dead(net.lin, 2, 8)  # constant in both halves
    dead(net.lin, 3, bias=0.0)  # 0 in the half that counts
    dead(net.lin, 10)  # constant in the gate alone: stays
    check(net, rand(2, 4), golden={"lin.out_features": 6, "out.in_features": 3})


@pytest.mark.parametrize(
    "code",
    [
        lambda x: F.glu(x, -1),
        lambda x: nn.functional.silu(x[..., :6]) * x[..., 6:],
        lambda x: torch.mul(*x.split(6, -1)),
        lambda x: torch.mul(*x.split([6, 6], -1)),
    ],
)
def test_glu_with_literals_is_exact(code):
    net = around(code, width=12, out=6)
    unread(net.out, 1)
    dead(net.lin, 2, 8)
    squeezed = check(net, rand(2, 4))
    assert squeezed.model.lin.out_features == 8 or reasons(squeezed.report)


@pytest.mark.parametrize(
    "code",
    [
        lambda x: torch.mul(*x.split(x.size(-1) // 2, -1)),
        lambda x: torch.mul(*x.tensor_split(2, -1)),
        lambda x: x[..., : x.size(-1) // 2] * x[..., x.size(-1) // 2 :],
        lambda x: x.unflatten(-1, (2, -1)).prod(-2) if False else torch.mul(*x.unflatten(-1, (2, -1)).unbind(-2)),
    ],
)
def test_glu_with_derived_widths_follows(code):
    net = around(code, width=12, out=6)
    unread(net.out, 1)
    dead(net.lin, 2, 8)
    check(net, rand(2, 4), golden={"lin.out_features": 8, "out.in_features": 4})


def test_uneven_split():
    def parts(s, x):
        a, b = s.lin(x).split([2, 4], -1)
        return s.one(a) + s.two(b)

    net = noisy(Net(parts, lin=nn.Linear(4, 6), one=nn.Linear(2, 3), two=nn.Linear(4, 3)))
    dead(net.lin, 3)
    check(net, rand(2, 4))


def test_unbind_over_channels_keeps_them():
    net = around(lambda x: torch.stack([a + b for a, b in zip(x.unbind(1), x.unbind(1)[1:], strict=False)], 1), out=5)
    dead(net.lin, 1, 2)
    check(net, rand(2, 4), golden={"lin.out_features": 6})


def test_unbind_and_stack_over_positions():
    net = around(lambda x: torch.stack([torch.tanh(t) for t in x.unbind(1)], 1))
    dead(net.lin, 1, 2)
    check(net, rand(2, 3, 4), golden={"lin.out_features": 4})


def test_stack_of_two_branches():
    net = Net(
        lambda s, x: s.out(torch.stack([s.a(x), s.b(x)], 1).flatten(1)),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        out=nn.Linear(12, 3),
    )
    noisy(net)
    dead(net.a, 1, 2)
    dead(net.b, 4, 5)
    check(net, rand(2, 4), golden={"a.out_features": 4, "b.out_features": 4, "out.in_features": 8})


def test_stack_of_branches_with_other_counts_stays_rectangular():
    net = Net(
        lambda s, x: s.out(torch.stack([s.a(x), s.b(x)], 1).flatten(1)),
        a=nn.Linear(4, 6),
        b=nn.Linear(4, 6),
        out=nn.Linear(12, 3),
    )
    noisy(net)
    dead(net.a, 1, 2, 3)
    dead(net.b, 4)
    check(net, rand(2, 4), golden={"a.out_features": 5, "b.out_features": 5, "out.in_features": 10})


# -------------------------------------------------------------------------------------------------------------- slices


@pytest.mark.parametrize(
    "piece, left",
    [
        (slice(0, 3), None),
        (slice(1, 3), None),
        (slice(2, None), None),
        (slice(-3, None), None),
        (slice(-3, -1), None),
        (slice(3, 6), None),
    ],
)
@pytest.mark.parametrize("gone", [(0,), (5,), (2,), (0, 1, 2), (1, 4)])
def test_slices_with_literal_borders_are_exact(piece, left, gone):
    net = around(lambda x: x[:, piece], out=len(range(6)[piece]))
    dead(net.lin, *gone)
    squeezed = check(net, rand(2, 4), gradients=False)
    assert squeezed.report.params_after < squeezed.report.params_before or reasons(squeezed.report)


def test_slice_drops_what_lies_behind_it():
    net = around(lambda x: x[:, :4], out=4)
    check(net, rand(2, 4), golden={"lin.out_features": 4})


def test_slice_with_the_first_channel_dead_keeps_it():
    net = around(lambda x: x[:, 1:3], out=2)
    dead(net.lin, 0)
    unread(net.out, 1)
    squeezed = check(net, rand(2, 4))
    assert squeezed.model.lin.out_features in (2, 3, 6)


@pytest.mark.parametrize(
    "code, out",
    [
        (lambda x: x[:, ::2], 3),
        (lambda x: x[:, 1::2], 3),
        (lambda x: x[:, 2], None),
        (lambda x: x.flip(1), 6),
        (lambda x: x.roll(2, 1), 6),
        (lambda x: x[:, [0, 2, 4]], 3),
        (lambda x: x.roll(1), 6),
        (lambda x: x.index_select(1, torch.tensor([5, 0, 2])), 3),
    ],
)
def test_orders_and_strides_over_channels_are_exact(code, out):
    net = around(code if out else lambda x: code(x)[:, None], out=out or 1)
    dead(net.lin, 1, 3)
    squeezed = check(net, rand(2, 4))
    assert squeezed.report.params_after < squeezed.report.params_before or reasons(squeezed.report)


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x[:, :, ::2, ::2],
        lambda x: x.flip(2, 3),
        lambda x: x.roll((1, 1), (2, 3)),
        lambda x: x[:, :, 1:3],
        lambda x: x.repeat(1, 1, 2, 2),
        lambda x: x[:, :, 0:1].expand(-1, -1, 4, -1),
    ],
)
def test_orders_and_strides_over_positions_pass(code):
    net = image(code)
    dead(net.lin, 1, 3)
    check(net, rand(1, 3, 4, 4), golden={"lin.out_channels": 4})


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.repeat(1, 2),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.cat([x, x], 1),
        lambda x: x[:, None].expand(-1, 2, -1).flatten(1),
    ],
)
def test_channels_that_are_repeated_go_together(code):
    net = around(code, out=12)
    dead(net.lin, 1)
    unread(net.out, 4)  # one of the two copies of its channel: stays
    check(net, rand(2, 4), golden={"lin.out_features": 5, "out.in_features": 10})


def test_an_empty_slice_of_heads_in_a_concat():
    """timm's rotary attention without prefix tokens."""

    def run(s, x):
        heads = s.fc(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        return s.out(torch.cat([heads[:, :, :0], heads * 2], 2).transpose(1, 2).flatten(2))

    net = noisy(Net(run, fc=nn.Linear(8, 12), out=nn.Linear(12, 3)))
    dead(net.fc, 4, 5, 6, 7)
    check(net, rand(2, 5, 8), golden={"fc.out_features": 8, "out.in_features": 8})
    unread(net.out, 0, 1)  # two of one head: the others stay as wide
    check(net, rand(2, 5, 8), golden={"fc.out_features": 8})


def normed(move: Callable[[Tensor], Tensor]) -> nn.Module:
    """Constants go through a norm, are moved, and are read: two carriers do for five of them."""
    net = Net(
        lambda s, x: s.out(move(s.norm(s.lin(x)))), lin=nn.Linear(4, 9), norm=nn.LayerNorm(9), out=nn.Linear(9, 3)
    )
    dead(noisy(net).lin, 1, 3, 4, 6, 8)  # type: ignore[arg-type]
    return net


@pytest.mark.parametrize(
    ("move", "width"),
    [
        (lambda x: x.roll(1, 1), 6),
        (lambda x: F.pad(x, (0, 0, 0, -x.size(1) % 5)), 7),
        (lambda x: F.pad(x, (0, 0, 1, 1)), 7),
    ],
)
def test_constants_behind_a_norm_pass_shifted_windows(move, width):
    """Padding is one more function of the position, which takes a carrier more: also where this input needs none."""
    net = normed(move)
    small = check(net, rand(3, 5, 4), golden={"lin.out_features": width, "norm": sr.CompensatedLayerNorm}).model
    close(small(x := rand(2, 7, 4)), net(x))


@pytest.mark.parametrize("move", [lambda x: x.roll(1, -1), lambda x: F.pad(x, (0, 0, 0, 1), mode="replicate")])
def test_constants_behind_a_norm_stay_where_channels_roll_or_positions_are_copied(move):
    check(normed(move), rand(3, 5, 4), golden={"lin.out_features": 9, "norm": nn.LayerNorm})


def test_a_constant_is_none_where_another_length_is_padded():
    net = around(lambda x: F.pad(x, (0, 0, 0, -x.size(1) % 5)))
    dead(net.lin, 1, 3, 4)
    small = check(net, rand(3, 5, 4), golden={"lin.out_features": 4}).model  # one of three carries the others
    close(small(x := rand(2, 7, 4)), net(x))
