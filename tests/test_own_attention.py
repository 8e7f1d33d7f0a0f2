"""Attention of the user's own: heads and their widths, in the ways people write it."""

from __future__ import annotations

import pytest
import torch
from check import assert_same, check, noisy, seeded
from counting import Fused, Packed, WrittenOut
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, attention: nn.Module, dim: int = 24) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(7, dim), nn.LayerNorm(dim), nn.Linear(dim, 3)
        self.attention = attention

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        y = self.norm(x)
        return self.head(x + (self.attention(y) if mask is None else self.attention(y, mask)))


def net(kind: type[nn.Module], **options: bool) -> Net:
    seeded()
    return noisy(Net(kind(24, 4, **options))).eval()  # type: ignore[return-value]


def tokens(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randn(batch, length, 7, dtype=torch.float64)


def kill_heads(model: Net) -> None:
    attention = model.attention
    with torch.no_grad():
        if isinstance(attention, Packed):
            attention.qkv.weight[48:54] = 0
        else:
            attention.v.weight[:6] = 0  # head 0: the same value for every token
        attention.out.weight[:, 12:18] = 0  # head 2: unread


@pytest.mark.parametrize("kind", [Fused, WrittenOut, Packed])
def test_dead_heads_go(kind: type[nn.Module]) -> None:
    model = net(kind)
    kill_heads(model)
    small, report = check(model, tokens(), golden={"attention.num_heads": 2, "attention.out.in_features": 12})
    attention = small.attention
    writers = [attention.qkv] if kind is Packed else [attention.q, attention.k, attention.v]
    assert sum(layer.out_features for layer in writers) == 36 and type(attention) is kind, str(report)
    assert_same(model, small, (tokens(3, 9),), {})


@pytest.mark.parametrize("kind", [Fused, WrittenOut, Packed])
def test_a_head_with_one_living_value_stays(kind: type[nn.Module]) -> None:
    model = net(kind)
    kill_heads(model)
    with torch.no_grad():
        (model.attention.qkv.weight[49] if kind is Packed else model.attention.v.weight[1])[3] = 0.5  # head 0 again
        model.attention.out.weight[2, 14] = 0.5  # head 2 again
    small, report = check(model, tokens(), golden={"attention.num_heads": 4})
    if kind is Packed:  # no q and k to give up, so no v either
        assert small.attention.qkv.out_features == 72, str(report)
    else:
        assert small.attention.q.out_features == small.attention.k.out_features == 24, str(report)


@pytest.mark.parametrize("kind", [Fused, WrittenOut])
def test_constant_value_channels_go_where_v_has_its_own_projection(kind: type[nn.Module]) -> None:
    model = net(kind)
    with torch.no_grad():
        model.attention.v.weight.view(4, 6, 24)[[0, 1, 2, 3], [0, 3, 5, 1]] = 0  # one in each head, anywhere
    check(
        model,
        tokens(),
        golden={
            "attention.v.out_features": 20,
            "attention.out.in_features": 20,
            "attention.q.out_features": 24,
            "attention.num_heads": 4,
        },
    )


@pytest.mark.parametrize("kind", [Fused, WrittenOut])
def test_a_constant_value_channel_in_one_head_stays(kind: type[nn.Module]) -> None:
    model = net(kind)
    with torch.no_grad():
        model.attention.v.weight.view(4, 6, 24)[1, 3] = 0
    check(model, tokens(), golden={"attention.v.out_features": 24, "attention.out.in_features": 24})


@pytest.mark.parametrize("kind", [Fused, WrittenOut])
def test_constant_keys_go_and_the_scale_stays(kind: type[nn.Module]) -> None:
    """The softmax cancels a key that is the same for all tokens; what is left is scaled as before."""
    model = net(kind)
    with torch.no_grad():
        model.attention.k.weight.view(4, 6, 24)[[0, 1, 2, 3], [0, 3, 5, 1]] = 0
    check(
        model,
        tokens(),
        golden={"attention.k.out_features": 20, "attention.q.out_features": 20, "attention.v.out_features": 24},
    )


@pytest.mark.parametrize(("kind", "heads"), [(Fused, 3), (WrittenOut, 2)])
def test_under_a_mask_constant_values_stay(kind: type[nn.Module], heads: int) -> None:
    """A row that is masked throughout gives 0 there, not the value, while a softmax written out always sums to 1."""
    model = net(kind)
    kill_heads(model)
    mask = (torch.rand(5, 5) > 0.4) | torch.eye(5, dtype=torch.bool)
    check(model, (tokens(), mask), golden={"attention.num_heads": heads, "attention.v.out_features": 6 * heads})


def test_causal_attention_needs_no_mask() -> None:
    model = net(Fused, causal=True)
    kill_heads(model)
    check(model, tokens(), golden={"attention.num_heads": 2, "attention.v.out_features": 12})


def test_an_unread_channel_in_front_of_the_norm_stays() -> None:
    model = net(Fused)
    with torch.no_grad():
        for layer in (model.attention.q, model.attention.k, model.attention.v, model.head):
            layer.weight[:, 4] = 0
    check(model, tokens(), golden={"norm": nn.LayerNorm, "embed.out_features": 24})


def test_a_constant_channel_in_front_of_the_norm_goes() -> None:
    model = net(Fused)
    with torch.no_grad():
        for layer in (model.attention.q, model.attention.k, model.attention.v, model.head):
            layer.weight[:, 4] = 0
        model.embed.weight[4] = 0
        model.attention.out.weight[4] = 0
    small, _ = check(model, tokens(), golden={"embed.out_features": 23, "head.in_features": 23, "norm.weight": (23,)})
    assert int(small.norm.count) == 1


class CrossCovariance(nn.Module):
    """XCiT: channels attend to channels, and positions are summed over."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 4, 1).unbind(0)
        q, k = nn.functional.normalize(q, dim=-1) * self.temperature, nn.functional.normalize(k, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        return self.out(y.permute(0, 3, 1, 2).flatten(2))


def test_heads_of_channels_that_attend_to_channels_go() -> None:
    model = net(CrossCovariance)
    with torch.no_grad():
        model.attention.out.weight[:, 12:18] = 0  # head 2: unread
        model.attention.qkv.weight[48:54] = 0  # head 0: all its values are 0 everywhere
        model.attention.qkv.bias[48:54] = 0
    golden = {"attention.num_heads": 2, "attention.qkv.out_features": 36, "attention.temperature": (2, 1, 1)}
    small = check(model, tokens(), golden=golden).model
    assert_same(model, small, (tokens(3, 9),), {})


def test_keys_and_values_that_are_0_count_in_a_softmax_over_channels() -> None:
    """They add nothing to the sum, but all others weigh less for them. So do constants that differ."""
    model = net(CrossCovariance)
    with torch.no_grad():
        model.attention.qkv.weight[[25, 49, 50]] = 0
        model.attention.qkv.bias[[25, 49]] = 0
        model.attention.out.weight[:, 4] = 0
    check(model, tokens(), golden={"attention.num_heads": 4, "attention.qkv.out_features": 72})
