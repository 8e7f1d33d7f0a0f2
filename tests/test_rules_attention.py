"""Attention: heads and their dimensions go where the code can follow; scales and masks stay right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, rand, reasons
from torch import Tensor, nn


class Attention(nn.Module):
    """q, k and v of their own; the head count in an attribute, the rest derived from shapes."""

    def __init__(self, width: int = 12, heads: int = 3, **options: object) -> None:
        super().__init__()
        self.num_heads, self.options = heads, options
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        out = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return self.proj(out.transpose(1, 2).flatten(2))


class Packed(Attention):
    """timm's: one qkv, heads and head_dim in attributes."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.head_dim = heads, width // heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, self.num_heads * self.head_dim))


def model(attention: nn.Module, width: int = 12) -> nn.Module:
    """A linear layer in front and behind, so that the width of the stream is not what is tested."""
    return noisy(
        Net(
            lambda s, x, *more: s.out(x + s.attn(s.stem(x), *more)),
            stem=nn.Linear(width, width),
            attn=attention,
            out=nn.Linear(width, width),
        )
    )


@torch.no_grad()
def kill_head(attention: nn.Module, head: int, size: int = 4) -> None:
    """Nothing of a head is read."""
    attention.proj.weight[:, head * size : (head + 1) * size] = 0


@torch.no_grad()
def kill_value(attention: nn.Module, *rows: int, bias: float = 0.5) -> None:
    attention.v.weight[list(rows)] = 0
    attention.v.bias[list(rows)] = bias


@torch.no_grad()
def kill_scores(attention: nn.Module, *rows: int) -> None:
    """Dimensions of q and k that are 0."""
    for layer in (attention.q, attention.k):
        layer.weight[list(rows)] = 0
        layer.bias[list(rows)] = 0


X = (2, 5, 12)


# -------------------------------------------------------------------------------------------------------- sdpa: heads


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
def test_dead_head_goes(options):
    net = model(Attention(**options))
    kill_head(net.attn, 1)
    check(
        net,
        rand(*X),
        golden={"attn.num_heads": 2, "attn.q.out_features": 8, "attn.v.out_features": 8, "attn.proj.in_features": 8},
    )


def test_head_with_one_living_channel_stays():
    net = model(Attention())
    kill_head(net.attn, 1)
    with torch.no_grad():
        net.attn.proj.weight[3, 5] = 1.0
    check(net, rand(*X), golden={"attn.num_heads": 3})


def test_constant_value_channels_pass_and_fold():
    net = model(Attention())
    kill_value(net.attn, 0, 5, 10)  # one of each head
    check(net, rand(*X), golden={"attn.v.out_features": 9, "attn.q.out_features": 12, "attn.proj.in_features": 9})


def test_constant_value_channels_of_one_head_alone_stay():
    net = model(Attention())
    kill_value(net.attn, 0, 1)
    squeezed = check(net, rand(*X), golden={"attn.v.out_features": 12})
    assert "equally many" in reasons(squeezed.report)


def test_constant_head_goes():
    net = model(Attention())
    kill_value(net.attn, 4, 5, 6, 7)
    check(net, rand(*X), golden={"attn.num_heads": 2, "attn.k.out_features": 8, "attn.v.out_features": 8})


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=str)
def test_zero_score_dimensions_go_and_the_scale_stays(options):
    net = model(Attention(**options))
    kill_scores(net.attn, 0, 5, 10)
    check(net, rand(*X), golden={"attn.q.out_features": 9, "attn.k.out_features": 9, "attn.v.out_features": 12})


def test_key_that_is_the_same_for_every_token_cancels():
    net = model(Attention())
    with torch.no_grad():
        net.attn.k.weight[[0, 5, 10]] = 0  # its bias stays: added to every score of a row, the softmax cancels it
    check(net, rand(*X), golden={"attn.q.out_features": 9, "attn.k.out_features": 9})


def test_query_that_is_the_same_for_every_token_stays():
    net = model(Attention())
    with torch.no_grad():
        net.attn.q.weight[[0, 5, 10]] = 0
    check(net, rand(*X), golden={"attn.q.out_features": 12, "attn.k.out_features": 12})


def test_mask_keeps_value_constants_but_not_heads():
    """A row that is masked throughout gives 0, so a constant value channel is no constant behind a mask."""
    net = model(Attention())
    kill_value(net.attn, 0, 5, 10)
    kill_head(net.attn, 1)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    squeezed = check(net, (rand(*X), mask), golden={"attn.num_heads": 2, "attn.v.out_features": 8})
    dark = mask.clone()
    dark[2] = False  # one row sees nothing
    x = rand(*X)
    assert torch.allclose(net.eval()(x, dark), squeezed.model.eval()(x, dark), atol=1e-12)


def test_mask_of_floats_with_one_entry_a_head_fixes_the_heads():
    net = model(Attention())
    kill_head(net.attn, 1)
    check(net, (rand(*X), rand(1, 3, 5, 5)), golden={"attn.num_heads": 3})


def test_calls_with_and_without_mask():
    """The constant value channels pass in one call and not in the other: they stay. Heads go in both."""
    net = model(Attention())
    kill_value(net.attn, 0, 5, 10)
    kill_head(net.attn, 1)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    check(net, [(rand(*X),), (rand(*X), mask)], golden={"attn.num_heads": 2, "attn.v.out_features": 8})


@pytest.mark.parametrize("rules, heads, dims", [("A", 3, 12), ("AB", 3, 12), ("paper", 2, 8), ("all", 2, 8)])
def test_rule_sets(rules, heads, dims):
    net = model(Attention())
    kill_head(net.attn, 2)
    check(net, rand(*X), rules=rules, golden={"attn.num_heads": heads, "attn.v.out_features": dims})


def test_scale_of_narrower_heads_where_the_query_is_read_elsewhere():
    """The default scale cannot be folded into q if q is read by someone else."""

    class Shared(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            heads = [self.split(t) for t in (q, self.k(x), self.v(x))]
            return self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)) + q.mean(
                -1, keepdim=True
            )

    net = model(Shared())
    kill_scores(net.attn, 0, 5, 10)
    check(net, rand(*X))


def test_query_and_key_from_one_linear():
    class Tied(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = self.split(self.q(x))
            return self.proj(F.scaled_dot_product_attention(q, q, self.split(self.v(x))).transpose(1, 2).flatten(2))

    net = model(Tied())
    kill_scores(net.attn, 0, 5, 10)
    kill_value(net.attn, 0, 5, 10)
    check(net, rand(*X))


def test_query_that_is_normalised_before_the_scores():
    class Normed(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def split(self, x: Tensor) -> Tensor:
            return self.norm(super().split(x))

    net = model(Normed())
    kill_scores(net.attn, 0, 5, 10)
    kill_head(net.attn, 1)
    check(net, rand(*X))


def test_grouped_queries_are_exact():
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.proj = nn.Linear(12, 16), nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(16, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    net = model(Grouped())
    kill_head(net.attn, 0)
    kill_head(net.attn, 1)
    check(net, rand(*X))


def test_cross_attention_with_two_inputs():
    class Cross(Attention):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            heads = [self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))]
            return self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    net = model(Cross())
    kill_head(net.attn, 1)
    check(net, (rand(*X), rand(2, 7, 12)), golden={"attn.num_heads": 2, "attn.q.out_features": 8})
