"""Biases that are put together from several parameters, as BEiT's are: each piece takes what its rows fold."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy, seeded
from torch import Tensor, nn

import squeeze_release as sr


class Packed(nn.Module):
    """BEiT's attention: q and v have biases, k has a buffer of zeros that is not saved."""

    def __init__(self, width: int, *, persistent: bool = False, extra_keys: bool = False, **options: bool) -> None:
        super().__init__()
        self.heads, self.options = 2, options
        self.qkv = nn.Linear(width, 3 * 16, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
        self.register_buffer("k_bias", torch.zeros(16), persistent=persistent)
        self.extra = nn.Linear(width, 16) if extra_keys else None
        self.out = nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        y = F.linear(x, self.qkv.weight, bias).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = y.unbind(0)
        if self.options.get("cosine"):  # SwinV2: a key's length counts, and so does its bias
            q, k = 10 * F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        keys, values = k, v
        if self.extra is not None:  # one key more, from another layer: its share of the softmax is its own
            more = self.extra(x.mean(1, keepdim=True)).reshape(x.size(0), 1, self.heads, -1).transpose(1, 2)
            keys, values = torch.cat([k, more], 2), torch.cat([v, more], 2)
        z = F.scaled_dot_product_attention(q, keys, values).transpose(1, 2)
        z = self.out(z.reshape(*x.shape[:2], z.size(2) * z.size(3)))
        return (z, k) if self.options.get("hand_out") else z


class Net(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.embed, self.attn, self.head = nn.Linear(5, 12), Packed(12, **options), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> object:
        y = self.attn(self.embed(x))
        return (self.head(y[0]), y[1]) if isinstance(y, tuple) else self.head(y)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def net(**options: bool) -> Net:
    """Three of the channels that the attention reads are constants, and not 0."""
    seeded()
    model = noisy(Net(**options))
    with torch.no_grad():
        model.embed.weight[[1, 4, 9]] = 0
    return model


def test_constants_fold_into_the_pieces() -> None:
    model = net()
    small = check(model, rand(2, 7, 5), golden={"embed.out_features": 9, "attn.qkv.weight": (48, 9)}).model
    assert not small.attn.k_bias.any()  # it is not saved, so it stays as the model makes it


def test_a_piece_that_is_saved_takes_its_share() -> None:
    small = check(net(persistent=True), rand(2, 7, 5), golden={"embed.out_features": 9}).model
    assert small.attn.k_bias.abs().min() > 0


@pytest.mark.parametrize("options", [{"extra_keys": True}, {"hand_out": True}, {"cosine": True}])
def test_where_a_bias_of_keys_counts_one_that_is_not_saved_takes_nothing(options: dict[str, bool]) -> None:
    """One of three constants stays and carries the others; where no carriers are allowed, all stay."""
    golden = {"embed.out_features": 10, "attn.qkv.weight": (48, 10), "attn.q_bias": (16,)}
    small, report = check(net(**options), rand(2, 7, 5), golden=golden)
    assert report.carriers == 1 and not small.attn.k_bias.any()
    check(net(**options), rand(2, 7, 5), golden={"embed.out_features": 12}, rules="paper")


def test_heads_get_narrower_and_the_pieces_scale() -> None:
    """The same qk and v dimensions of both heads: the softmax scale 1/sqrt(D) is made good in q, its bias included."""
    model = net()
    with torch.no_grad():
        rows = model.attn.qkv.weight.view(3, 2, 8, 12)
        rows[0, :, 3], rows[1, :, 3], rows[2, :, 3] = 0, 0, 0
        model.attn.q_bias.view(2, 8)[:, 3] = 0
    golden = {"attn.qkv.weight": (42, 9), "attn.q_bias": (14,), "attn.k_bias": (14,), "attn.v_bias": (14,)}
    check(model, rand(2, 7, 5), golden=golden)


class Twice(nn.Module):
    """A piece that another layer reads too, or that stands twice in the bias."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Linear(5, 6), nn.Linear(8, 3)
        self.both = nn.Linear(6, 8, bias=False)
        self.one, self.two = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        pieces = (self.one, self.one) if self.kind == "twice" else (self.one, self.two)
        bias = torch.cat(pieces)
        y = F.linear(self.embed(x), self.both.weight, bias)
        if self.kind == "shared":
            y = y * torch.cat([self.one, self.one]).sigmoid()
        if self.kind == "added":
            y = y + bias
        return self.head(y.tanh())


@pytest.mark.parametrize(("kind", "left"), [("alone", 4), ("twice", 5), ("shared", 5)])
def test_pieces_that_are_read_otherwise_stay(kind: str, left: int) -> None:
    """One of the two constants carries the other then."""
    seeded()
    model = noisy(Twice(kind))
    with torch.no_grad():
        model.embed.weight[[0, 3]] = 0
    check(model, rand(2, 5), golden={"embed.out_features": left, "both.weight": (8, left)})


def test_a_bias_that_is_added_elsewhere_too_stays() -> None:
    seeded()
    model = noisy(Twice("added"))
    with torch.no_grad():
        model.embed.weight[[0, 3]] = 0
    check(model, rand(2, 5), golden={"embed.out_features": 5})


class TwoQueries(nn.Module):
    """Queries of two layers side by side under the default scale, which only one of them could make good."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.other, self.k, self.v = (nn.Linear(6, 8) for _ in range(4))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = torch.cat([self.q(x), self.other(x)], 1)
        return self.out(F.scaled_dot_product_attention(q, self.k(x), self.v(x)))


def test_queries_of_two_layers_keep_their_width() -> None:
    seeded()
    model = noisy(TwoQueries())
    with torch.no_grad():
        for layer in (model.q, model.other):
            layer.weight[[1, 2]], layer.bias[[1, 2]] = 0, 0
    check(model, rand(2, 4, 6), golden={"k.out_features": 8})


def test_queries_that_are_handed_out_are_not_scaled() -> None:
    class HandsOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(6, 8) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q = self.q(x)
            return F.scaled_dot_product_attention(q, self.k(x), self.v(x)), q

    seeded()
    model = noisy(HandsOut())
    with torch.no_grad():
        model.k.weight[[1, 2]] = 0
    squeezed = sr.squeeze(model.double(), rand(2, 4, 6))
    assert squeezed.model.q.out_features == 8
