"""Networks that were written to break the analysis: whatever they do, the result is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import Tensor, nn

import squeeze_release as sr


def two(code: Callable[..., object], **parts: object) -> Net:
    """lin (4 -> 6), whose unit 1 is constant, and out (6 -> 3)."""
    net = noisy(Net(code, lin=nn.Linear(4, 6), out=nn.Linear(6, 3), **parts))
    dead(net.lin, 1)
    return net  # type: ignore[return-value]


# ------------------------------------------------------------------------------- weights and numbers from other places


def test_a_slice_of_a_weight():
    net = two(lambda s, x: F.linear(torch.tanh(s.lin(x)), s.out.weight[:2], s.out.bias[:2]))
    check(net, rand(2, 4))


def test_a_transposed_weight():
    net = two(lambda s, x: F.linear(torch.tanh(s.lin(x)), s.lin.weight.t()) + s.out(s.lin(x)).sum())
    check(net, rand(2, 4))


def test_a_computed_weight():
    net = two(lambda s, x: F.linear(torch.tanh(s.lin(x)), s.out.weight * s.gain), gain=nn.Parameter(torch.rand(3, 6)))
    check(net, rand(2, 4))


def test_a_convolution_used_padded_and_unpadded():
    def run(s, x):
        h = torch.relu(s.lin(x))
        return s.out(h).mean() + F.conv2d(h, s.out.weight, s.out.bias, padding=1)

    net = noisy(Net(run, lin=nn.Conv2d(3, 6, 1), out=nn.Conv2d(6, 2, 3)))
    dead(net.lin, 1, bias=0.5)
    dead(net.lin, 2, bias=-0.5)
    check(net, rand(1, 3, 6, 6), golden={"lin.out_channels": 5})


def test_a_plain_tensor_attribute_fixes_the_width():
    net = two(lambda s, x: s.out(torch.tanh(s.lin(x)) * s.numbers), numbers=torch.rand(6, dtype=torch.float64))
    check(net, rand(2, 4), golden={"lin.out_features": 6})


def test_a_buffer_follows_the_width():
    net = two(lambda s, x: s.out(torch.tanh(s.lin(x)) * s.numbers))
    net.register_buffer("numbers", torch.rand(6), persistent=False)
    check(net, rand(2, 4), golden={"lin.out_features": 5, "numbers": (5,)})


def test_a_parameter_list():
    net = two(lambda s, x: s.out(torch.tanh(s.lin(x)) * s.p[0] + s.p[1]), p=nn.ParameterList([torch.rand(6)] * 2))
    check(net, rand(2, 4), golden={"lin.out_features": 5, "p.0": (5,)})


def test_positions_that_the_example_does_not_reach():
    net = two(lambda s, x: s.out(s.lin(x) + s.pos[:, : x.size(1)]), pos=nn.Parameter(torch.randn(1, 9, 6)))
    dead(net.lin, 2)
    with torch.no_grad():
        net.pos[..., 1] = 0.5
        net.pos[:, :5, 2] = 0.5  # one number only where the example looks: no constant
    small = check(net, rand(2, 5, 4), golden={"lin.out_features": 5, "pos": (1, 9, 5)}).model
    x = rand(2, 9, 4)
    assert torch.allclose(small(x), net(x), atol=1e-12)


def test_positions_by_lookup():
    net = two(lambda s, x: s.out(s.lin(x) + s.pos(torch.arange(x.size(1)))), pos=nn.Embedding(9, 6))
    with torch.no_grad():
        net.pos.weight[:, 1] = 0.5
    check(net, rand(2, 5, 4), golden={"lin.out_features": 5, "pos.weight": (9, 5)})


def test_large_constants_that_cancel():
    """The original loses digits here, and folding does not: no reason to say that a rule is wrong."""
    net = two(lambda s, x: s.out(s.lin(x))).double()
    dead(net.lin, 1, 2, bias=1e9)
    with torch.no_grad():
        net.out.weight[:, 1], net.out.weight[:, 2] = 1, -1
    sr.squeeze(net, rand(2, 4))


# ----------------------------------------------------------------------------------------- code that knows its width


def branch(s, x):
    h = s.lin(x)
    return s.out(h * 2 if h.size(1) == 6 else h)


def loop(s, x):
    h = s.lin(x)
    return s.out(h) + sum(h[:, c : c + 1] for c in range(h.size(1)))


def without_gradients(s, x):
    with torch.no_grad():
        h = torch.tanh(s.lin(x))
    return s.out(h)


def without_autocast(s, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        h = torch.tanh(s.lin(x))
    return s.out(h)


def spectrum(s, x):
    return s.out(torch.fft.irfft(torch.fft.rfft(s.lin(x), dim=-1), n=6, dim=-1))


def summed(s, x):
    return torch.einsum("bc,dc->bd", torch.tanh(s.lin(x)), s.out.weight)


def chosen(s, x):
    return s.out(torch.where(x[:, :1] > 0, torch.tanh(s.lin(x)), s.lin.bias))


@pytest.mark.parametrize("code", [branch, loop, without_gradients, without_autocast, spectrum, summed, chosen])
def test_whatever_the_code_does(code):
    check(two(code), rand(5, 4), gradients=False)


def test_code_that_checks_its_own_width():
    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dim, self.inner = 6, nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[-1] == self.dim
            return self.inner(x)

    net = noisy(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Checked(), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    )
    dead(net[0], 1)  # it stays, or `dim` follows
    dead(net[2].inner, 1)
    dead(net[4], 1)  # nothing to do with the check
    squeezed = check(net, rand(2, 4), golden={"2.inner.out_features": 4, "4.out_features": 3})
    assert squeezed.model[0].out_features == 5 or "2" in reasons(squeezed.report)


def test_every_size_is_the_same():
    net = noisy(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)))
    dead(net[0], 1)
    dead(net[2], 3)
    unread(net[4], 3)
    check(net, rand(6, 6, 6), golden={"0.out_features": 5, "2.weight": (5, 5), "4.in_features": 5})


@pytest.mark.parametrize("cell", [nn.LSTM(6, 5, batch_first=True), nn.GRU(6, 5, batch_first=True), nn.RNN(6, 5)])
def test_recurrent_layers_keep_their_width(cell):
    net = Net(lambda s, x: s.out(s.cell(s.lin(x))[0]), lin=nn.Linear(4, 6), cell=cell, out=nn.Linear(5, 2))
    dead(net.lin, 1)
    unread(net.out, 1)
    check(net, rand(2, 3, 4), golden={"lin.out_features": 6, "out.in_features": 5}, gradients=False)


def test_bilinear_and_embedding_bag():
    net = two(lambda s, x: s.pair(torch.tanh(s.lin(x)), s.out(x.repeat(1, 2)[:, :6])), pair=nn.Bilinear(6, 3, 2))
    check(net, rand(2, 4))
    bag = Net(lambda s, x: s.out(s.table(x)), table=nn.EmbeddingBag(7, 6), out=nn.Linear(6, 3))
    unread(bag.out, 1)
    check(bag, torch.tensor([[0, 1, 5], [2, 2, 2]]))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), nn.LayerNorm(16)], ids=str)
def test_norm_of_flattened_channels(norm):
    net = noisy(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), norm, nn.Linear(16, 3)))
    dead(net[0], 1)
    unread(net[3], 4, 5, 6, 7)
    check(net, rand(2, 3, 2, 2), golden={"0.out_channels": 3, "3.in_features": 12})


# ------------------------------------------------------------------------------------------------------------ attention


def test_learned_queries():
    net = Net(
        lambda s, x: s.out(F.scaled_dot_product_attention(s.q.expand(x.size(0), -1, -1), s.k(x), s.v(x))),
        q=nn.Parameter(torch.randn(1, 3, 6)),
        k=nn.Linear(4, 6),
        v=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
    )
    noisy(net)
    dead(net.v, 3)
    unread(net.out, 4)
    check(net, rand(2, 5, 4), golden={"q": (1, 3, 6), "v.out_features": 4, "out.in_features": 4})


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = 3, nn.Linear(12, 36), nn.Linear(12, 12)
        angle = torch.arange(5)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turn(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.size(0), x.size(1), 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v)
        return self.proj(out.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_rotary_attention_loses_a_dead_head():
    net = noisy(nn.Sequential(nn.Linear(4, 12), Rotary(), nn.Linear(12, 2)))
    net[1].proj.weight[:, 4:8] = 0
    check(net, rand(2, 5, 4), golden={"1.heads": 2, "1.qkv.out_features": 24, "1.cos": (5, 4)}, gradients=False)


@pytest.mark.parametrize("dims", [(0,), (0, 2), (1, 2)])
def test_rotary_attention_with_dead_dimensions_is_exact(dims):
    net = noisy(nn.Sequential(nn.Linear(4, 12), Rotary(), nn.Linear(12, 2)))
    rows = [part + 4 * head + d for part in (0, 12, 24) for head in range(3) for d in dims]
    dead(net[1].qkv, *rows, bias=0.0)
    check(net, rand(2, 5, 4))


# ---------------------------------------------------------------------------------------- squeezed, pruned, squeezed


def test_pruned_again_depthwise():
    net = Net(
        lambda s, x: s.head((y := s.stem(x)) + s.pw2(torch.relu(s.pw1(s.dw(y))))),
        stem=nn.Conv2d(3, 6, 1),
        dw=nn.Conv2d(6, 6, 3, padding=1, groups=6),
        pw1=nn.Conv2d(6, 8, 1),
        pw2=nn.Conv2d(8, 6, 1),
        head=nn.Conv2d(6, 2, 1),
    )
    dead(noisy(net).dw, 2)
    small = check(net, rand(1, 3, 5, 5)).model
    dead(small.dw, 0, 3)
    dead(small.stem, 1, bias=0.0)
    dead(small.pw2, 1, bias=0.0)  # the stream loses channel 1, and with it the filter that reads it
    again = check(small, rand(1, 3, 5, 5), golden={"stem.out_channels": 5, "dw.groups": 2, "pw1.in_channels": 2}).model
    assert again.dw.index.tolist() == [2, 4]


def test_pruned_again_unread_inputs():
    net = noisy(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)))
    unread(net[0], 1)
    small = check(net, rand(2, 6)).model
    unread(small[0], 0, 2)
    assert check(small, rand(2, 6)).model[0].index.tolist() == [2, 4, 5]


def test_pruned_again_multihead_attention():
    net = Net(
        lambda s, x: s.out(s.attn(h := s.stem(x), h, h, need_weights=False)[0]),
        stem=nn.Linear(12, 12),
        attn=nn.MultiheadAttention(12, 3, batch_first=True),
        out=nn.Linear(12, 2),
    )
    with torch.no_grad():
        noisy(net).attn.out_proj.weight[:, 4:8] = 0
    small = check(net, rand(2, 5, 12), golden={"attn.num_heads": 2}).model
    with torch.no_grad():
        small.attn.out_proj.weight[:, :4] = 0
    check(small, rand(2, 5, 12), golden={"attn.num_heads": 1, "attn.in_proj_weight": (12, 12)})
