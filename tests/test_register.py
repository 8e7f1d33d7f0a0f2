"""register_attention: users say which attributes hold the heads, where values alone do not tell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, rand
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.follow import register


class Own(nn.Module):
    """Four heads, and numbers that only look like them."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d, self.taps, self.spare = 4, 6, 4, 4
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, self.d)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(out)


class Derived(Own):
    pass


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(register._REGISTERED)
    yield
    register._REGISTERED.clear()
    register._REGISTERED.update(before)


def net(kind: type[Own] = Own) -> nn.Module:
    model = noisy(
        Net(lambda s, x: s.out(x + s.attn(s.stem(x))), stem=nn.Linear(24, 24), attn=kind(), out=nn.Linear(24, 3))
    )
    with torch.no_grad():
        model.attn.proj.weight[:, 6:12] = 0
    return model


def test_without_words_every_number_like_it_follows() -> None:
    small, _ = check(net(), rand(2, 5, 24), golden={"attn.h": 3, "attn.d": 6})
    assert (small.attn.taps, small.attn.spare) == (3, 3), "the search guesses: this is what registering is for"


@pytest.mark.parametrize("kind", [Own, Derived])
def test_named_attributes_follow_and_no_others(kind: type[Own]) -> None:
    sr.register_attention(Own, heads="h", head_dim="d")
    golden = {"attn.h": 3, "attn.d": 6, "attn.taps": 4, "attn.spare": 4, "attn.qkv.out_features": 54}
    check(net(kind), rand(2, 5, 24), golden=golden)


def test_the_width_of_heads_follows_by_name() -> None:
    sr.register_attention(Own, heads="h", head_dim="d")
    model = net()
    with torch.no_grad():
        for part in (0, 24, 48):
            model.attn.qkv.weight[[part + row for row in (0, 12, 18)]] = 0  # one in each head that stays
            model.attn.qkv.bias[[part + row for row in (0, 12, 18)]] = 0
    check(model, rand(2, 5, 24), golden={"attn.h": 3, "attn.d": 5, "attn.taps": 4, "attn.qkv.out_features": 45})


def test_a_wrong_name_keeps_the_heads() -> None:
    sr.register_attention(Own, heads="spare")
    check(net(), rand(2, 5, 24), golden={"attn.h": 4, "attn.spare": 4, "attn.qkv.out_features": 72})


def test_key_heads_have_a_name_of_their_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h, self.kv, self.two = 4, 2, 2
            self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 12), nn.Linear(24, 12)
            self.proj = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            counts = ((self.q, self.h), (self.k, self.kv), (self.v, self.kv))
            q, k, v = (layer(x).unflatten(-1, (count, 6)).transpose(1, 2) for layer, count in counts)
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return self.proj(out.transpose(1, 2).flatten(2))

    sr.register_attention(Shared, heads="h", kv_heads="kv")
    model = net()
    model.attn = noisy(Shared())
    with torch.no_grad():
        model.attn.proj.weight[:, :12] = 0
    check(model, rand(2, 5, 24), golden={"attn.h": 2, "attn.kv": 1, "attn.two": 2, "attn.k.out_features": 6})


@pytest.mark.parametrize("wrong", [lambda: sr.register_attention(Own), lambda: sr.register_attention(int, heads="h")])
def test_nothing_to_register_is_an_error(wrong: object) -> None:
    with pytest.raises(sr.InputError, match=r"needs a subclass of nn\.Module and at least one name"):
        wrong()
