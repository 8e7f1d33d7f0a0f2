"""Widths in the user's own code: attributes that are set, shapes, differences; who is blamed where none will do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, dead, rand, reasons, unread
from torch import Tensor, nn

from squeeze_release import CompensatedLayerNorm
from squeeze_release.follow.attributes import follows_parameters
from squeeze_release.modules import INDEXED, PLACED


class Partial(nn.Module):
    """SHViT: `dim` shows up only in a difference."""

    def __init__(self, dim: int, partial: int) -> None:
        super().__init__()
        self.dim, self.partial, self.norm = dim, partial, nn.BatchNorm1d(partial)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, [self.partial, self.dim - self.partial], dim=1)
        return torch.cat([self.norm(a), torch.tanh(b)], 1)


def partial() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 10), Partial(10, 4), nn.Linear(10, 3))
    return noisy(net)  # type: ignore[return-value]


def test_a_width_that_is_only_subtracted_from():
    net = partial()
    unread(net[2], 1, 6, 7)
    check(net, rand(3, 4), golden={"0.out_features": 7, "1.partial": 3, "1.dim": 7, "1.norm.num_features": 3})


def test_a_width_that_is_only_subtracted_from_and_nothing_dead():
    check(partial(), rand(3, 4), golden={"0.out_features": 10, "1.partial": 4, "1.dim": 10})


def test_a_width_that_is_only_subtracted_from_in_modules_of_several_sizes():
    """One meaning for all: the attributes of four sizes are not tried one by one."""
    sizes = [10, 11, 12, 13, 14, 15]
    layers = [
        layer for a, b in zip([4, *sizes], sizes, strict=False) for layer in (nn.Linear(a, b), Partial(b, b // 2 - 1))
    ]
    net = noisy(nn.Sequential(*layers, nn.Linear(15, 3)))
    for i in range(2, len(net), 2):
        unread(net[i], 1, 6, 7)
    golden = {f"{2 * i + 1}.dim": size - 3 for i, size in enumerate(sizes)}
    check(net, rand(3, 4), golden=golden)


class Scale(nn.Module):
    """timm's MetaFormer: the shape of a scale is an attribute."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale, self.shape = nn.Parameter(torch.randn(dim)), (dim, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(self.shape)


def test_a_shape_in_an_attribute():
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), Scale(6), nn.Conv2d(6, 2, 1)))
    unread(net[2], 1)
    check(net, rand(2, 3, 4, 4), golden={"0.out_channels": 5, "1.scale": (5,), "1.shape": (5, 1, 1)})


class Literal(Scale):
    """The shape is a number in the code: nobody can set it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(6, 1, 1)


def test_a_shape_in_the_code_stays():
    net = noisy(nn.Sequential(nn.Conv2d(3, 6, 1), Literal(6), nn.Conv2d(6, 2, 1)))
    unread(net[2], 1)
    check(net, rand(2, 3, 4, 4), golden={"0.out_channels": 6, "1.shape": (6, 1, 1)})


class Twice(nn.Module):
    """One attribute for two widths that no longer agree. What breaks is a layer inside: its caller is at fault."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 6
        self.norm, self.mix, self.out = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, [self.width, x.size(1) - self.width], dim=1)
        v, c = torch.split(self.mix(self.norm(a)), [self.width, 2], dim=1)
        return x + self.out(torch.tanh(v)) * c.sum(1, keepdim=True) + b.sum(1, keepdim=True)


def test_the_caller_keeps_its_widths_and_the_rest_of_the_model_does_not():
    net = Net(
        lambda s, x: s.head(torch.relu(s.a(s.twice(s.stem(x))))),
        stem=nn.Linear(4, 8),
        twice=Twice(),
        a=nn.Linear(8, 9),
        head=nn.Linear(9, 2),
    )
    noisy(net)
    dead(net.twice.mix, 1, 2)
    dead(net.a, 3)
    unread(net.head, 4)
    squeezed = check(net, rand(3, 4), golden={"twice.mix.out_features": 8, "a.out_features": 7, "head.in_features": 7})
    assert "twice" in reasons(squeezed.report)


class Nested(nn.Module):
    """A class that holds itself: going up from the inner one must end."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.lin, self.back = inner, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x if self.inner is None else self.inner(x)))
        return x + self.back(y.reshape(x.size(0), 2, 3).flip(1).reshape(x.size(0), 6))


def test_widths_in_the_code_of_a_class_that_holds_itself():
    net = noisy(
        nn.Sequential(nn.Linear(4, 6), Nested(Nested(Nested(None))), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2))
    )
    for block in (net[1], net[1].inner, net[1].inner.inner):
        dead(block.lin, 1, 4)
        unread(block.back, 0, 3)
    dead(net[2], 2)
    check(net, rand(3, 4), golden={"1.lin.out_features": 6, "1.inner.inner.lin.out_features": 6, "2.out_features": 6})


class OneWidth(nn.Module):
    """timm's BEiT and others: the width of the input is taken for that of all heads together."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads).permute(2, 0, 3, 1, 4)
        y = ((q * 0.3) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


def one_width(*channels: int, heads: tuple[int, ...] = ()) -> nn.Module:
    net = Net(
        lambda s, x: s.out(s.attn(y := s.stem(x)) + y),
        stem=nn.Linear(4, 16),
        attn=OneWidth(16, 4),
        out=nn.Linear(16, 3),
    )
    noisy(net)
    for channel in channels:
        dead(net.stem, channel, bias=0.0)
        dead(net.attn.proj, channel, bias=0.0)
    for head in heads:
        unread(net.attn.proj, *range(4 * head, 4 * head + 4))
    return net


def test_widths_that_the_code_takes_for_one_shrink_together():
    net = one_width(0, 5, 6, 11, heads=(2,))
    golden = {"stem.out_features": 12, "attn.qkv.weight": (36, 12), "attn.num_heads": 3, "out.in_features": 12}
    check(net, rand(2, 5, 4), golden=golden)


def test_the_smaller_loss_counts_where_the_code_takes_two_widths_for_one():
    net = one_width(0, 5, 6, 11, 12, 15, heads=(2,))
    check(net, rand(2, 5, 4), golden={"stem.out_features": 12, "attn.num_heads": 3})


def test_widths_that_the_code_takes_for_one_stay_if_one_of_them_stays():
    check(one_width(0, 5, 6, 11), rand(2, 5, 4), golden={"stem.out_features": 16, "attn.num_heads": 4})
    check(one_width(heads=(2,)), rand(2, 5, 4), golden={"stem.out_features": 16, "attn.num_heads": 4})


def test_single_dimensions_of_heads_keep_pace_with_the_stream():
    """One of q and k and another one of v in every head: what ties them must not pick dimensions of its own."""
    net = one_width(0, 5, 6, 11)
    for head in range(4):
        dead(net.attn.qkv, 4 * head + 1, 16 + 4 * head + 1, bias=0.0)
        dead(net.attn.qkv, 32 + 4 * head + 2, bias=0.4)
    check(net, rand(2, 5, 4), golden={"stem.out_features": 12, "attn.qkv.weight": (36, 12), "attn.num_heads": 4})


def test_a_dimension_that_lives_in_one_head_stays_in_all_and_so_does_the_stream():
    net = one_width(0, 5, 6, 11)
    for head in range(4):
        dead(net.attn.qkv, 4 * head + 1, 16 + 4 * head + 1, bias=0.0)
    dead(net.attn.qkv, 38, 42, 46, bias=0.4)  # not 34, in the first head
    check(net, rand(2, 5, 4), golden={"stem.out_features": 16, "attn.qkv.weight": (48, 16), "attn.num_heads": 4})


class SplitProjections(OneWidth):
    """PVT v2: q has a reshape of its own, k and v share one, and the input's width is that of all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.q, self.kv, self.head_dim = nn.Linear(width, width), nn.Linear(width, 2 * width), width // heads
        del self.qkv

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q = self.q(x).reshape(batch, tokens, self.num_heads, -1).permute(0, 2, 1, 3)
        k, v = self.kv(x).reshape(batch, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, width))


def test_heads_of_one_width_need_their_own_dimensions_first():
    """Heads could lose 8 of 16, the stream 7: what ties them looks when all have said what they need, and 6 go."""
    channels, dims = (0, 3, 5, 6, 9, 11, 14), (0, 1, 6, 7, 8, 9, 14, 15)
    net = one_width(*channels)
    net.attn = noisy(SplitProjections(16, 2))
    dead(net.attn.proj, *channels, bias=0.0)
    dead(net.attn.q, *dims, bias=0.0)
    dead(net.attn.kv, *(16 + d for d in dims), bias=0.4)
    golden = {"stem.out_features": 10, "attn.q.weight": (10, 10), "attn.kv.weight": (20, 10), "attn.head_dim": 5}
    check(net, rand(2, 5, 4), golden=golden)


class Strided(nn.Module):
    """Hiera: a stride that has the value of the heads in one stage, and not in the next."""

    def __init__(self, heads: int, stride: int, width: int = 3) -> None:
        super().__init__()
        self.every, self.n, self.width = stride, heads, width
        self.mix, self.out = nn.Linear(8, heads * width), nn.Linear(heads * width, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        y = self.mix(x).view(b, t, self.n, self.width).tanh()
        return x + self.out(
            y.view(b, self.every, -1, self.n, self.width)
            .mean(1, keepdim=True)
            .expand(b, self.every, t // self.every, self.n, self.width)
            .reshape(b, t, self.n * self.width)
        )


def strided(*heads: int) -> nn.Sequential:
    return noisy(nn.Sequential(nn.Linear(4, 8), *(Strided(n, 4) for n in heads), nn.Linear(8, 2)))  # type: ignore


def test_an_attribute_follows_a_width_that_it_equals_in_every_module_of_its_class():
    net = strided(4, 2)
    unread(net[1].out, 0, 1, 2)
    check(net, rand(2, 8, 4), golden={"1.n": 3, "1.every": 4, "1.mix.out_features": 9, "2.n": 2, "2.every": 4})


class Wide(nn.Module):
    """transformers' Conv1D: reads one width and writes another, and an attribute has the value of both."""

    def __init__(self, read: int, width: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = (
            width,
            nn.Parameter(torch.randn(read, width)),
            nn.Parameter(torch.randn(width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.shape[:-1], self.nf))


def test_the_same_attribute_follows_the_same_place_of_the_code_in_every_module():
    net = noisy(nn.Sequential(Wide(4, 6), nn.Tanh(), Wide(6, 6), nn.Tanh(), Wide(6, 9), nn.Tanh(), nn.Linear(9, 2)))
    with torch.no_grad():
        net[2].weight[:2].zero_()  # of the first, two are unread
        net[4].weight[1].zero_()
    unread(net[6], 1, 4, 5)
    golden = {"0.nf": 4, "2.nf": 5, "4.nf": 6, "2.weight": (4, 5)}
    check(net, rand(2, 3, 4), golden=golden)


class Sizes(nn.Module):
    """EfficientViT: the sizes of a split are a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, self.sizes, dim=-1)
        return torch.cat([a.tanh(), b.relu()], -1)


class Windowed(nn.Module):
    """Hiera: the same ops on windows of tokens, or on all of them; heads and their width in other dimensions."""

    def __init__(self, heads: int, windows: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.windows = heads, 4, windows
        self.qkv, self.proj = nn.Linear(12, 12 * heads), nn.Linear(4 * heads, 12)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.windows:
            y = self.qkv(x).reshape(batch, -1, self.windows, 3, self.heads, self.head_dim).permute(3, 0, 4, 2, 1, 5)
        else:
            y = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = y.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, -2)
        return x + self.proj(y.reshape(batch, tokens, self.heads * self.head_dim))


def windowed() -> nn.Sequential:
    return noisy(nn.Sequential(Windowed(2, 3), Windowed(2, 3), Windowed(3, 0), Windowed(3, 0)))


def test_the_same_ops_on_more_dimensions_are_other_code():
    net = windowed()
    for block in net:
        for head in range(block.heads):
            width = 4 * block.heads
            dead(block.qkv, 4 * head + 1, width + 4 * head + 1, bias=0.0)
            dead(block.qkv, 2 * width + 4 * head + 3, bias=0.4)
    golden = {"0.head_dim": 3, "0.heads": 2, "0.qkv.out_features": 18, "2.head_dim": 3, "2.qkv.out_features": 27}
    check(net, rand(2, 6, 12), golden=golden)


def test_the_same_ops_on_more_dimensions_and_nothing_dead():
    check(windowed(), rand(2, 6, 12), golden={"0.head_dim": 4, "2.head_dim": 4, "2.qkv.out_features": 36})


class Table(nn.Module):
    """timm's RelPosBias: a method of a module that is never called, and a shape in its attributes."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias_shape, self.table = (3, 3, heads), nn.Parameter(torch.randn(9, heads))

    def get_bias(self) -> Tensor:
        return self.table[torch.arange(9)].view(self.bias_shape).permute(2, 0, 1)


class Biased(OneWidth):
    """Heads of a width in an attribute, with a bias for each that another module makes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.head_dim, self.rel_pos = width // heads, Table(heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        q, k, v = y.permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-2, -1) * 0.3 + self.rel_pos.get_bias()).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


def biased(*heads: int) -> nn.Module:
    net = noisy(nn.Sequential(nn.Linear(4, 16), Biased(16, 4), nn.Linear(16, 3)))
    for head in heads:
        unread(net[1].proj, *range(4 * head, 4 * head + 4))
    return net


def test_an_attribute_of_a_module_whose_methods_are_called():
    golden = {"1.num_heads": 3, "1.qkv.out_features": 36, "1.rel_pos.bias_shape": (3, 3, 3), "1.rel_pos.table": (9, 3)}
    check(biased(2), rand(2, 3, 4), golden=golden)


def test_an_attribute_of_a_module_whose_methods_are_called_and_nothing_dead():
    check(biased(), rand(2, 3, 4), golden={"1.num_heads": 4, "1.rel_pos.bias_shape": (3, 3, 4)})


def test_a_list_of_widths():
    net = noisy(nn.Sequential(nn.Linear(4, 10), Sizes(4, 6), nn.Linear(10, 2)))
    unread(net[2], 1, 2, 7)
    small = check(net, rand(3, 4), golden={"0.out_features": 7, "1.sizes": [2, 5]}).model
    assert net[1].sizes == [4, 6] and small[1].sizes is not net[1].sizes


class OneHeadDim(nn.Module):
    """transformers: one `head_dim` for q, k and v, and the stream has another width by now."""

    def __init__(self, dim: int = 12, heads: int = 3, v_dim: int | None = None) -> None:
        super().__init__()
        self.head_dim, self.v_dim = dim // heads, v_dim
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        v_shape = shape if self.v_dim is None else (*x.shape[:-1], -1, self.v_dim)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(v_shape)
        y = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return x + self.o(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


def attends(block: OneHeadDim) -> nn.Sequential:
    """Two dimensions of every head of v are unread, one of q and k is dead; four channels of the stream are."""
    net = noisy(nn.Sequential(nn.Linear(5, 12), block, nn.Linear(12, 2)))
    unread(net[1].o, 0, 1, 4, 5, 8, 9)  # type: ignore[union-attr, arg-type]
    dead(net[1].q, 2, 6, 10)  # type: ignore[union-attr, arg-type]
    dead(net[1].k, 2, 6, 10)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        for layer in (net[1].q, net[1].k):  # type: ignore[union-attr]
            layer.bias[[2, 6, 10]] = 0
    for reader in (net[1].q, net[1].k, net[1].v, net[2]):  # type: ignore[union-attr]
        unread(reader, 3, 7, 8, 11)  # type: ignore[arg-type]
    return net  # type: ignore[return-value]


def test_code_that_gives_all_heads_one_width_does_not_tie_them_to_the_stream():
    golden = {"0.out_features": 8, "1.head_dim": 3, "1.q.out_features": 9, "1.v.out_features": 9, "1.o.in_features": 9}
    check(attends(OneHeadDim()), rand(2, 4, 5), golden=golden)


def test_widths_of_heads_that_the_code_tells_apart_go_apart():
    golden = {"0.out_features": 8, "1.head_dim": 3, "1.v_dim": 2, "1.q.out_features": 9, "1.v.out_features": 6}
    check(attends(OneHeadDim(v_dim=4)), rand(2, 4, 5), golden=golden)


class Serving(nn.Module):
    """SHViT: `partial` is the width of a part of the stream and of what is computed from it."""

    def __init__(self, dim: int, partial: int, extra: int) -> None:
        super().__init__()
        self.dim, self.partial, self.extra = dim, partial, extra
        self.inner = nn.Linear(partial, partial + extra)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(x, [self.partial, self.dim - self.partial], dim=1)
        c, gate = torch.split(self.inner(a), [self.partial, self.extra], dim=1)
        return x + self.out(torch.cat([c * gate.sum(1, keepdim=True).tanh(), b], 1))


def serving() -> nn.Sequential:
    stages = [nn.Linear(4, 12), Serving(12, 5, 2), Serving(12, 5, 2), nn.Linear(12, 16), Serving(16, 6, 3)]
    return noisy(nn.Sequential(*stages, nn.Linear(16, 3)))  # type: ignore[return-value]


def kill_stream(net: nn.Sequential, at: list[int], channels: list[int], reader: int) -> None:
    for module in (net[i] for i in at):
        layer = module.out if isinstance(module, Serving) else module
        dead(layer, *channels)
        if isinstance(module, Serving):
            unread(module.out, *[c for c in channels if c >= module.partial])
    unread(net[reader], *channels)


def test_a_width_that_serves_twice_keeps_its_part_of_the_stream_and_no_more():
    """All of `inner` is alive, so all that it reads stays; the other part of the stream goes, in every stage."""
    net = serving()
    kill_stream(net, [0, 1, 2], [1, 7, 9], 3)
    kill_stream(net, [3, 4], [2, 8, 10], 5)
    golden = {"1.dim": 10, "1.partial": 5, "2.dim": 10, "3.in_features": 10, "4.dim": 14, "4.partial": 6}
    check(net, rand(3, 4), golden=golden)


def test_a_width_that_serves_twice_shrinks_where_both_do():
    net = serving()
    kill_stream(net, [0, 1, 2], [1, 7], 3)
    for module in (net[1], net[2]):
        dead(module.inner, 3)
        module.inner.bias.data[3] = 0
    check(net, rand(3, 4), golden={"1.dim": 10, "1.partial": 4, "2.partial": 4, "4.partial": 6, "4.dim": 16})


class Fussy(nn.Module):
    """One width more or less, and its code takes another path, in front of a layer that has nothing to do with it."""

    def __init__(self, fussy: bool) -> None:
        super().__init__()
        self.fussy, self.mid, self.a, self.b = fussy, nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) if self.fussy and self.a.weight.size(0) < 8 else x
        return x + self.b(torch.tanh(self.a(self.mid(y))))


def test_one_module_that_does_not_follow_keeps_no_others_of_its_class():
    net = noisy(nn.Sequential(nn.Linear(4, 6), Fussy(False), Fussy(True), Fussy(False), nn.Linear(6, 2)))
    for block in net[1:4]:
        dead(block.a, 3)
    golden = {"1.a.out_features": 7, "2.a.out_features": 8, "3.a.out_features": 7}
    squeezed = check(net, rand(3, 4), golden=golden)
    assert "2: its code takes another path" in reasons(squeezed.report)


def test_which_modules_are_not_the_users():
    """Told by where their classes are."""
    stand_ins = (kind.__new__(kind) for kind in (*INDEXED.values(), *PLACED.values()))
    assert all(map(follows_parameters, (nn.Linear(2, 2), nn.Sequential(), CompensatedLayerNorm(3), *stand_ins)))
    assert not follows_parameters(Partial(10, 4))
