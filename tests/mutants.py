"""Networks for planted bugs, each with a model and its input: small ones on which one rule has something to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from check import noisy
from nets import Net, dead, rand, unread
from networks import Attention, Branches, Multihead, Residual
from test_attention_grouped import Grouped, kill
from test_attention_grouped import model as around_attention
from torch import Tensor, nn

Network = tuple[nn.Module, Tensor]


def hidden(act: type[nn.Module] = nn.Tanh) -> Network:
    """Unit 1 is a constant, unit 4 is not read."""
    net = noisy(nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, 3)))
    dead(net[0], 1)
    unread(net[2], 4)
    return net, rand(3, 4)


def images(between: nn.Module, **how: Any) -> Network:
    """Channel 1 is a constant; a convolution reads it."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 1), between, nn.Conv2d(4, 2, 3, **how)))
    dead(net[0], 1, bias=0.7)
    return net, rand(2, 3, 7, 7)


def normed(constants: tuple[int, ...] = (1, 2), unread_columns: tuple[int, ...] = (1, 2)) -> Network:
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)))
    dead(net[0], *constants)
    unread(net[2], *unread_columns)
    return net, rand(3, 4)


def narrow_heads(style: str) -> Network:
    """Dimension 1 of the first head and 2 of the second: their queries are 0, and no one reads their values."""
    net = noisy(Attention(6, 2, 4, style))
    dead(net.q, 1, 6, bias=0.0)
    unread(net.proj, 1, 6)
    return net, rand(2, 5, 6)


def constant_values(scores: Callable[[Tensor], Tensor]) -> Network:
    """Written out: value channel 1 and key channel 2 are the same for every token."""
    parts = {name: nn.Linear(6, 4) for name in ("q", "k", "v")}
    net = noisy(
        Net(lambda s, x: s.out(scores(s.q(x) @ s.k(x).transpose(-2, -1)) @ s.v(x)), **parts, out=nn.Linear(4, 3))
    )
    dead(net.v, 1)
    dead(net.k, 2)
    return net, rand(2, 5, 6)


def meeting(code: Callable[..., Tensor], **parts: nn.Module) -> Network:
    """Two layers of 6 units side by side; unit 1 of one and unit 2 of the other are constants."""
    net = noisy(Net(code, one=nn.Linear(4, 6), two=nn.Linear(4, 6), out=nn.Linear(6, 3), **parts))
    dead(net.one, 1)
    dead(net.two, 2)
    return net, rand(3, 4)


def zero_meets_x() -> Network:
    net, x = meeting(lambda s, x: s.out(s.one(x) + s.two(x)))
    dead(net.one, 3, bias=0.0)
    return net, x


def sums_to_zero() -> Network:
    net, x = hidden()
    with torch.no_grad():
        net[0].weight[2] = torch.tensor([1.0, -1.0, 0.5, -0.5])
    return net, x


def groups() -> Network:
    """The first group does not read its first channel, the second group not its last: each loses its own."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Tanh(), nn.Conv2d(6, 4, 3, groups=2)))
    with torch.no_grad():
        net[2].weight[:2, 0] = 0
        net[2].weight[2:, 2] = 0
    return net, rand(2, 3, 7, 7)


def shuffled() -> Network:
    """Constants at different places of two groups that a shuffle interleaves: all channels stay."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), nn.ChannelShuffle(2), nn.Conv2d(6, 4, 1)))
    return dead(net[0], 0, 5) and net, rand(2, 3, 7, 7)


def padded() -> Network:
    """Three constants in front of zero padding: one of them carries the others."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, padding=1)))
    return dead(net[0], 1, 2, 4) and net, rand(2, 3, 7, 7)


def depthwise_on_constants() -> Network:
    """Living depthwise filters on three constants: they all gather one."""
    layers = (nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Tanh(), nn.Conv2d(6, 2, 1))
    net = noisy(nn.Sequential(*layers))
    return dead(net[0], 1, 2, 4) and net, rand(2, 3, 7, 7)


def rms_normed() -> Network:
    """Constants that an RMS norm counts and that a Linear reads behind it."""
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, eps=1e-5), nn.Linear(6, 3)))
    return dead(net[0], 1, 2, 4) and net, rand(3, 4)


def rescaled() -> Network:
    """Three constants behind a norm, scaled and shifted channel by channel before a Linear reads them."""
    parts = {"scale": nn.Parameter(rand(6)), "shift": nn.Parameter(rand(6)), "norm": nn.RMSNorm(6, eps=1e-5)}
    net = noisy(
        Net(lambda s, x: s.out(s.norm(s.lin(x)) * s.scale + s.shift), lin=nn.Linear(4, 6), out=nn.Linear(6, 3), **parts)
    )
    return dead(net.lin, 1, 2, 4) and net, rand(3, 4)


def two_norms() -> Network:
    """Constants behind two norms side by side: 1/rms of one is not that of the other, so each has its carrier."""
    one, two = (nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, eps=1e-5)) for _ in range(2))
    net = noisy(nn.Sequential(Branches(one, two, -1), nn.Linear(12, 3)))
    dead(one[0], 1, 2)
    dead(two[0], 3, 4)
    return net, rand(3, 4)


def constant_queries() -> Network:
    """Dimensions 1 and 3 of both heads ask the same of every token: one of them carries the other."""
    net = noisy(Attention(6, 2, 4, "separate"))
    dead(net.q, 1, 3, 5, 7)
    unread(net.proj, 1, 5)
    return net, rand(2, 5, 6)


def group_normed(*unread_columns: int) -> Network:
    """Four groups of two channels."""
    net = noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8), nn.Conv2d(8, 2, 1)))
    return unread(net[2], *unread_columns) and net, rand(2, 3, 5, 5)


def grouped_queries() -> Network:
    """Query heads 0 and 3 are read by nobody. They belong to different key heads, so both stay."""
    net = around_attention(Grouped())
    kill(net.attn, 0, 3)
    return net, rand(2, 5, 24)


def unaligned() -> Network:
    """A stream whose two writers each leave out one half, and one of whose readers leaves out four channels."""
    parts = {"one": nn.Linear(12, 16), "two": nn.Linear(12, 16), "all": nn.Linear(16, 12), "out": nn.Linear(16, 12)}
    net = noisy(Net(lambda s, x: s.out(y := torch.tanh(s.one(x)) + torch.tanh(s.two(x))) + s.all(y), **parts))
    dead(net.one, *range(8))
    dead(net.two, *range(8, 16))
    unread(net.out, *range(4))
    return net, rand(3, 12)


def half_read() -> Network:
    """Units 4 and 5 are read by the last two rows only."""
    net = noisy(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)))
    with torch.no_grad():
        net[2].weight[:2, 4:] = 0
    return net, rand(3, 4)


def unread_inputs() -> Network:
    net = noisy(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    return unread(net[0], 0, 3) and net, rand(3, 6)


def depthwise() -> Network:
    """The stream keeps all its channels; the depthwise filters 0 and 3 are dead and nobody reads them."""
    body = nn.Sequential(nn.Conv2d(5, 5, 3, padding=1, groups=5), nn.Conv2d(5, 5, 1))
    net = noisy(nn.Sequential(nn.Conv2d(3, 5, 1), Residual(body), nn.Conv2d(5, 2, 1)))
    dead(body[0], 0, 3)
    unread(body[1], 0, 3)
    return net, rand(2, 3, 7, 7)


def dead_block() -> Network:
    body = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))
    net = noisy(nn.Sequential(nn.Linear(4, 5), Residual(body), nn.Linear(5, 3)))
    dead(body[2], *range(5))
    return net, rand(3, 4)


def constant_block() -> Network:
    net = noisy(Net(lambda s, x: s.out(torch.cat([s.one(x), s.two(x)], -1)), one=nn.Linear(4, 4), two=nn.Linear(4, 3)))
    net.out = nn.Sequential(nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    dead(net.two, *range(3))
    return noisy(net), rand(3, 4)


def side_by_side() -> Network:
    net = noisy(nn.Sequential(Branches(nn.Linear(4, 3), nn.Linear(4, 3), -1), nn.Tanh(), nn.Linear(6, 3)))
    return unread(net[2], 1) and net, rand(3, 4)


def sliced() -> Network:
    """Units 2 to 5 are cut out by fixed numbers; unit 0 is read by nobody, 6 and 7 by another layer."""
    net = noisy(
        Net(
            lambda s, x: s.out(s.lin(x)[..., 2:6]) + s.all(s.lin(x)),
            lin=nn.Linear(4, 8),
            out=nn.Linear(4, 3),
            all=nn.Linear(8, 3),
        )
    )
    unread(net.all, 0)
    return net, rand(3, 4)


def positions() -> Network:
    """Position embeddings for 8 tokens, 5 of which the example has."""
    net = noisy(
        Net(lambda s, x: s.out(x + s.pos[:, : x.shape[1]]), pos=nn.Parameter(rand(1, 8, 4)), out=nn.Linear(4, 3))
    )
    return net, rand(2, 5, 4)


def called_twice() -> Network:
    """One layer reads two others, whose unit 1 is constant at different numbers."""
    net, x = meeting(lambda s, x: s.out(s.one(x)) + s.out(s.two(x)))
    dead(net.two, 1)
    return net, x


def multihead() -> Network:
    """Dimension 1 of the first head and 2 of the second: their keys are constant, and no one reads their values."""
    net = noisy(Multihead(8, 2))
    with torch.no_grad():
        net.attention.in_proj_weight[[9, 14]] = 0
    unread(net.attention.out_proj, 1, 6)
    return net, rand(2, 5, 8)
