"""Grouped queries, rotary tables, biases for each head, and widths inside a head that cannot change."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, rand, reasons
from torch import Tensor, nn

X = (2, 5, 24)


class Grouped(nn.Module):
    """Six query heads of width 4 on `kv` key heads. How each key head meets its queries is what differs."""

    def __init__(self, kv: int = 3, heads: int = 6, size: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.size, self.groups = heads, kv, size, heads // kv
        self.q, self.proj = nn.Linear(24, heads * size), nn.Linear(heads * size, 24)
        self.k, self.v = nn.Linear(24, kv * size), nn.Linear(24, kv * size)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)))
        return self.proj(out.transpose(1, 2).flatten(2))


class Repeated(Grouped):
    """transformers' repeat_kv: unsqueeze, expand, reshape."""

    def repeat(self, x: Tensor) -> Tensor:
        b, kv, n, d = x.shape
        return x[:, :, None].expand(b, kv, self.groups, n, d).reshape(b, kv * self.groups, n, d)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v))


class RepeatedWritten(Repeated):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ self.repeat(k).transpose(-2, -1) * 0.5
        return scores.softmax(-1) @ self.repeat(v)


class Interleaved(Grouped):
    """Copies by repeat_interleave: each key head has its queries, and they go together."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *(x.repeat_interleave(self.groups, 1) for x in (k, v)))


class Broadcast(Grouped):
    """One key head for all queries, without any copy."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v


class Expanded(Grouped):
    """One key head for all queries, expanded."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *(x.expand(-1, self.num_heads, -1, -1) for x in (k, v)))


def model(attention: nn.Module) -> nn.Module:
    return noisy(
        Net(lambda s, x: s.out(x + s.attn(s.stem(x))), stem=nn.Linear(24, 24), attn=attention, out=nn.Linear(24, 3))
    )


@torch.no_grad()
def kill(attention: nn.Module, *heads: int, size: int = 4) -> None:
    for head in heads:
        attention.proj.weight[:, head * size : (head + 1) * size] = 0


def widths(q: int, k: int, v: int | None = None) -> dict[str, object]:
    return {"attn.q.out_features": q, "attn.k.out_features": k, "attn.v.out_features": k if v is None else v}


KINDS = [Grouped, Repeated, RepeatedWritten]


@pytest.mark.parametrize("kind", [*KINDS, Interleaved])
def test_a_key_head_goes_with_all_its_queries(kind: type[Grouped]) -> None:
    net = model(kind())
    kill(net.attn, 2, 3)
    check(net, rand(*X), golden=widths(16, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dead", [(0, 2, 4), (1, 2, 5)], ids=str)
def test_one_query_head_of_every_group_goes(kind: type[Grouped], dead: tuple[int, ...]) -> None:
    """Any one: all queries of a group read the same key."""
    net = model(kind())
    kill(net.attn, *dead)
    check(net, rand(*X), golden={**widths(12, 12), "attn.groups": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_three_lose_one_each(kind: type[Grouped]) -> None:
    net = model(kind(kv=2))
    kill(net.attn, 0, 5)
    check(net, rand(*X), golden={**widths(16, 8), "attn.groups": 2})


@pytest.mark.parametrize("kind", KINDS)
def test_groups_stay_equally_large(kind: type[Grouped]) -> None:
    net = model(kind())
    kill(net.attn, 0, 3)
    squeezed = check(net, rand(*X), golden=widths(24, 12))
    assert "equally many" in reasons(squeezed.report)


class Counted(Grouped):
    """The number of heads is what the code knows, their width follows."""

    def forward(self, x: Tensor) -> Tensor:
        counts = ((self.q, self.num_heads), (self.k, self.num_kv_heads), (self.v, self.num_kv_heads))
        q, k, v = (layer(x).unflatten(-1, (count, -1)).transpose(1, 2) for layer, count in counts)
        return self.proj(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))


@torch.no_grad()
def kill_values(attention: nn.Module, *dims: int) -> None:
    """One dimension of each query head that nothing reads."""
    for head, d in enumerate(dims):
        attention.proj.weight[:, 4 * head + d] = 0


def test_a_value_dimension_goes_if_no_query_head_reads_it() -> None:
    net = model(Counted())
    kill_values(net.attn, 0, 0, 1, 1, 3, 3)
    check(net, rand(*X), golden=widths(24, 12, 9))


def test_a_value_dimension_stays_while_a_query_head_reads_it() -> None:
    net = model(Counted())
    kill_values(net.attn, 0, 0, 1, 2, 3, 3)
    check(net, rand(*X), golden=widths(24, 12, 12))


def test_a_query_dimension_goes_with_that_of_its_key_head() -> None:
    net = model(Counted())
    with torch.no_grad():
        for row in (1, 4, 11):  # another one in each key head
            net.attn.k.weight[row] = net.attn.k.bias[row] = 0
    check(net, rand(*X), golden=widths(18, 9, 12))


def test_a_query_dimension_stays_while_a_key_head_has_it() -> None:
    net = model(Counted())
    with torch.no_grad():
        for row in (1, 4):
            net.attn.k.weight[row] = net.attn.k.bias[row] = 0
        net.attn.q.weight[9] = net.attn.q.bias[9] = 0  # 0 in one of two query heads
    check(net, rand(*X), golden=widths(24, 12, 12))


@pytest.mark.parametrize("kind", [Broadcast, Expanded, Grouped])
def test_one_key_head_for_all(kind: type[Grouped]) -> None:
    net = model(kind(kv=1))
    kill(net.attn, 1, 4)
    check(net, rand(*X), golden=widths(16, 4))


@pytest.mark.parametrize("kind", [Broadcast, Expanded, Grouped])
def test_one_key_head_stays_while_it_is_read(kind: type[Grouped]) -> None:
    net = model(kind(kv=1))
    kill(net.attn, 0, 1, 2, 3, 4)
    check(net, rand(*X), golden=widths(4, 4))


# --------------------------------------------------------------------------------------------- tables of fixed width


def turn(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


class Rotary(Grouped):
    """A table that the code computes itself: its width is fixed, the number of heads is not."""

    def table(self, n: int) -> Tensor:
        frequencies = 10.0 ** -torch.arange(0, 1, 0.5, dtype=torch.float64)
        angles = torch.outer(torch.arange(n, dtype=torch.float64), frequencies)
        return torch.cat([angles, angles], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = self.table(q.size(-2))
        q, k = (x * angles.cos() + turn(x) * angles.sin() for x in (q, k))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Pairs(Rotary):
    """Neighbours form a pair, by slices with a step."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = self.table(q.size(-2)).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        q, k = (
            x * angles.cos() + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * angles.sin() for x in (q, k)
        )
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Stored(Rotary):
    """transformers': frequencies in a buffer, which can be narrowed."""

    def __init__(self, kv: int = 3) -> None:
        super().__init__(kv)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1], dtype=torch.float64), persistent=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads if x.size(-1) > 12 else self.num_kv_heads, -1)).transpose(1, 2)

    def table(self, n: int) -> Tensor:
        angles = torch.arange(n, dtype=torch.float64)[:, None] * self.frequencies
        return torch.cat([angles, angles], -1)


@pytest.mark.parametrize("kind", [Rotary, Pairs, Stored])
def test_a_rotary_table_does_not_fix_the_heads(kind: type[Grouped]) -> None:
    net = model(kind())
    kill(net.attn, 2, 3)
    check(net, rand(*X), golden=widths(16, 8))


@pytest.mark.parametrize("kind", [Rotary, Pairs])
def test_a_rotary_table_fixes_their_width(kind: type[Grouped]) -> None:
    net = model(kind())
    with torch.no_grad():
        for layer in (net.attn.q, net.attn.k):  # dimensions 1 and 3 form a pair, dead in every head
            for d in (1, 3):
                layer.weight[d::4] = layer.bias[d::4] = 0
    check(net, rand(*X), golden=widths(24, 12))


# ------------------------------------------------------------------------------------------------- one number a head


class Biased(nn.Module):
    """A table of relative positions with a column for each head, looked up by an index."""

    written = False

    def __init__(self, heads: int = 6) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.table = nn.Parameter(torch.randn(9, heads))
        place = torch.arange(5)
        self.register_buffer("index", place[:, None] - place[None, :] + 4, persistent=False)

    def bias(self) -> Tensor:
        return self.table[self.index.reshape(-1)].reshape(5, 5, -1).permute(2, 0, 1)[None]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 4)).permute(2, 0, 3, 1, 4)
        if self.written:
            out = (q @ k.transpose(-2, -1) * 0.5 + self.bias()).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, self.bias())
        return self.proj(out.transpose(1, 2).flatten(2))


class BiasedWritten(Biased):
    written = True


class Windowed(Biased):
    """Swin: a mask is expanded to the heads and added to the bias."""

    def bias(self) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.float64).tril().log().view(1, 1, 5, 5)
        return super().bias() + mask.expand(-1, self.num_heads, -1, -1)


class FixedBias(Biased):
    """Slopes that the code computes: there is nothing to narrow."""

    def bias(self) -> Tensor:
        slopes = torch.tensor([2.0**-h for h in range(6)], dtype=torch.float64)
        return slopes.view(1, 6, 1, 1) * torch.arange(5, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Biased, BiasedWritten, Windowed])
def test_a_bias_for_each_head_follows(kind: type[Biased]) -> None:
    net = model(kind())
    kill(net.attn, 1, 4)
    check(net, rand(*X), golden={"attn.num_heads": 4, "attn.table": (9, 4), "attn.qkv.out_features": 48})


@pytest.mark.parametrize("kind", [Biased, BiasedWritten, Windowed])
def test_a_head_that_is_read_keeps_its_bias(kind: type[Biased]) -> None:
    net = model(kind())
    kill(net.attn, 1, 4)
    with torch.no_grad():
        net.attn.proj.weight[3, 5] = 0.5  # head 1 again
        net.attn.table[:, 1] = 0
    check(net, rand(*X), golden={"attn.num_heads": 5, "attn.table": (9, 5)})


def test_a_bias_that_is_computed_fixes_the_heads() -> None:
    net = model(FixedBias())
    kill(net.attn, 1, 4)
    squeezed = check(net, rand(*X), golden={"attn.num_heads": 6, "attn.qkv.out_features": 72})
    assert "fixed number of heads" in reasons(squeezed.report)


def test_attention_between_channels_loses_whole_heads() -> None:
    """XCiT: the scores are d x d for each head, with a temperature of its own."""

    class Channels(Biased):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.rand(6, 1, 1) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 4)).permute(2, 0, 3, 4, 1)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            out = ((q @ k.transpose(-2, -1)) * self.table).softmax(-1) @ v
            return self.proj(out.permute(0, 3, 1, 2).flatten(2))

    net = model(Channels())
    kill(net.attn, 1)
    with torch.no_grad():
        net.attn.proj.weight[:, 0] = 0  # one dimension of another head stays
    check(net, rand(*X), golden={"attn.num_heads": 5, "attn.table": (5, 1, 1), "attn.qkv.out_features": 60})


def test_softcap_and_sinks_keep_constant_keys() -> None:
    """What all keys share cancels in a softmax, but not behind a tanh, nor beside a logit of its own."""

    class Sinks(Grouped):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(4)
            sink = torch.zeros(1, dtype=scores.dtype).expand(*scores.shape[:-1], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v

    class Capped(Grouped):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (torch.tanh(q @ k.transpose(-2, -1) / 4) * 2).softmax(-1) @ v

    for kind in (Sinks, Capped):
        net = model(kind(kv=6))
        with torch.no_grad():
            net.attn.k.weight[1::4] = 0  # constant, not 0
        kill(net.attn, 3)
        check(net, rand(*X), golden=widths(20, 20))
