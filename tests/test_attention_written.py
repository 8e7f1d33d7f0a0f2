"""Attention written out with matmuls, packed projections, and nn.MultiheadAttention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy
from nets import Net, rand, reasons
from test_rules_attention import Attention, Packed, X, kill_head, kill_scores, kill_value, model
from torch import Tensor, nn

from squeeze_release.modules import NarrowMultiheadAttention

# ----------------------------------------------------------------------------------------- written out, packed


def test_packed_dead_head():
    net = model(Packed())
    kill_head(net.attn, 1)
    check(
        net,
        rand(*X),
        golden={"attn.num_heads": 2, "attn.head_dim": 4, "attn.qkv.out_features": 24, "attn.proj.in_features": 8},
    )


def test_packed_narrower_heads_keep_their_scale():
    """One reshape serves q, k and v: as many of qk as of v."""
    net = model(Packed())
    with torch.no_grad():
        for row in (0, 5, 10):
            for part in (0, 12, 24):
                net.attn.qkv.weight[part + row] = 0
                net.attn.qkv.bias[part + row] = 0.0 if part < 24 else 0.4
    check(
        net, rand(*X), golden={"attn.num_heads": 3, "attn.head_dim": 3, "attn.qkv.out_features": 27, "attn.scale": 0.5}
    )


def test_packed_dead_scores_alone_stay():
    net = model(Packed())
    with torch.no_grad():
        for row in (0, 5, 10, 12, 17, 22):
            net.attn.qkv.weight[row] = 0
            net.attn.qkv.bias[row] = 0
    check(net, rand(*X), golden={"attn.head_dim": 4, "attn.qkv.out_features": 36})


def test_attributes_with_the_same_value():
    net = model(Packed(width=16, heads=4), width=16)
    kill_head(net.attn, 1)
    check(net, rand(2, 5, 16), golden={"attn.num_heads": 3, "attn.head_dim": 4, "attn.qkv.out_features": 36})


def test_sequence_as_long_as_the_heads_are_many():
    """Three tokens, three heads: the attribute must follow the heads and not the tokens."""
    net = model(Packed())
    net.attn.tokens = 3
    kill_head(net.attn, 1)
    check(net, rand(2, 3, 12), golden={"attn.num_heads": 2})


class Literal(Packed):
    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 12))


def test_literal_head_count_is_kept_with_a_reason():
    net = model(Literal())
    kill_head(net.attn, 1)
    squeezed = check(net, rand(*X), golden={"attn.qkv.out_features": 36, "attn.proj.in_features": 12})
    assert "attn" in reasons(squeezed.report) and "width" in reasons(squeezed.report)


class Computed(Packed):
    """The scale is computed from the width of q: it must stay what it was with a narrower head."""

    how = staticmethod(lambda q: 1 / math.sqrt(q.size(-1)))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * type(self).how(q)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, -1))


class ByRoot(Computed):
    how = staticmethod(lambda q: torch.rsqrt(torch.tensor(q.size(-1), dtype=q.dtype)))


class ByInt(Computed):
    how = staticmethod(lambda q: 1 / q.size(-1))


class ByPower(Computed):
    how = staticmethod(lambda q: q.shape[-1] ** -0.5)


class ByQuotient(Computed):
    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attn = ((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, -1))


class OfQueries(Computed):
    """torchvision's Swin: it is q that is scaled."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))


class AndUnscaled(OfQueries):
    """The same queries, read without the scale too."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + q @ k.transpose(-2, -1)


class ScoresTwice(OfQueries):
    """The scores are read without their scale too."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        return scores * q.shape[-1] ** -0.5 + scores.tanh()


class Squashed(OfQueries):
    """Between the layer and the scale is more than a shape."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q.tanh(), k)


def kill_one_of_each(net: nn.Module) -> None:
    """Head 1, and a dimension of q, k and v in each of the others."""
    kill_head(net.attn, 1)
    with torch.no_grad():
        for row in (0, 10, 12, 22, 24, 34):
            net.attn.qkv.weight[row] = 0
            net.attn.qkv.bias[row] = 0


@pytest.mark.parametrize("attention", [Computed, ByPower, ByQuotient, OfQueries])
def test_scale_computed_from_a_width_is_made_good_in_the_rows_of_q(attention):
    net = model(attention())
    kill_one_of_each(net)
    squeezed = check(net, rand(*X), golden={"attn.num_heads": 2, "attn.qkv.out_features": 18})
    kept = torch.tensor([1, 2, 3, 8, 9, 11])
    torch.testing.assert_close(squeezed.model.attn.qkv.bias[:6], net.attn.qkv.bias[kept] * (3 / 4) ** 0.5)
    torch.testing.assert_close(squeezed.model.attn.qkv.bias[6:12], net.attn.qkv.bias[12 + kept])


@pytest.mark.parametrize("attention", [ByRoot, ByInt, AndUnscaled, ScoresTwice, Squashed])
def test_scale_computed_from_a_width_keeps_heads_whole(attention):
    net = model(attention())
    kill_one_of_each(net)
    check(net, rand(*X), golden={"attn.num_heads": 2, "attn.qkv.out_features": 24})


def test_scale_of_queries_against_themselves_stays():
    """A factor on their rows would count twice."""

    class AgainstThemselves(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, v = self.split(self.q(x)), self.split(self.v(x))
            attn = (q @ q.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
            return self.proj((attn @ v).transpose(1, 2).flatten(2))

    net = model(AgainstThemselves())
    kill_scores(net.attn, 0, 5, 10)
    check(net, rand(*X), golden={"attn.q.out_features": 12})


def test_scale_computed_from_a_width_in_a_module_that_is_called_twice():
    """The second call reads the same rows: nothing is scaled, for nobody knows what that call does with them."""
    net = model(OfQueries())
    kill_one_of_each(net)
    net.code = lambda s, x: s.out(x + s.attn(s.attn(s.stem(x))))
    check(net, rand(*X), golden={"attn.num_heads": 2, "attn.qkv.out_features": 24})


def test_default_scale_beside_a_number_computed_from_the_width():
    class Both(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
            out = F.scaled_dot_product_attention(q, k, v) / math.sqrt(k.size(-1))
            return self.proj(out.transpose(1, 2).flatten(2))

    net = model(Both())
    kill_scores(net.attn, 0, 5, 10)
    check(net, rand(*X))


@pytest.mark.parametrize(
    "between",
    [
        lambda s: s,
        lambda s: torch.tanh(s / 5) * 5,
        lambda s: s + torch.ones(5, 5, dtype=s.dtype).tril().log(),
        lambda s: s.masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf),
        lambda s: F.dropout(s, 0.1, False),
    ],
)
def test_what_stands_between_scores_and_softmax(between):
    class Written(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
            attn = between(q @ k.transpose(-2, -1) * 0.5).softmax(-1)
            return self.proj((attn @ v).transpose(1, 2).flatten(2))

    net = model(Written())
    kill_head(net.attn, 1)
    kill_scores(net.attn, 0, 10)
    kill_value(net.attn, 0, 10)
    check(net, rand(*X), golden={"attn.num_heads": 2, "attn.q.out_features": 6, "attn.v.out_features": 6})


@pytest.mark.parametrize(
    "weights",
    [
        lambda s: torch.sigmoid(s),
        lambda s: s.softmax(-2),
        lambda s: F.relu(s.softmax(-1) - 0.1),
        lambda s: s.softmax(-1) * 2,
        lambda s: s,
    ],
)
def test_weights_that_do_not_sum_to_one_keep_value_constants(weights):
    class Odd(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
            return self.proj((weights(q @ k.transpose(-2, -1)) @ v).transpose(1, 2).flatten(2))

    net = model(Odd())
    kill_value(net.attn, 0, 5, 10)
    check(net, rand(*X), golden={"attn.v.out_features": 12})
    kill_value(net.attn, 0, 5, 10, bias=0.0)  # but 0 times any weights is 0
    check(net, rand(*X), golden={"attn.v.out_features": 9})


class Cosine(Attention):
    """Swin v2: queries and keys have length 1."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * 3.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.proj((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unclamped(Cosine):
    """A query of length 0 makes 0 / 0: its zeros are no constants."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q / q.norm(dim=-1, keepdim=True)) @ (k / k.norm(dim=-1, keepdim=True)).transpose(-2, -1)


def test_cosine_attention_loses_dimensions_that_are_zero_in_queries_and_keys():
    net = model(Cosine())
    kill_scores(net.attn, 1, 5, 9)
    check(net, rand(*X), golden={"attn.q.out_features": 9, "attn.k.out_features": 9, "attn.v.out_features": 12})


def test_cosine_attention_keeps_what_counts_for_a_length():
    net = model(Cosine())
    kill_scores(net.attn, 1, 5, 9)
    with torch.no_grad():
        net.attn.k.bias[[1, 5, 9]] = 0.5  # no part of any product, but of the length of every key
    check(net, rand(*X), golden={"attn.q.out_features": 12, "attn.k.out_features": 12})
    other = model(Unclamped())
    kill_scores(other.attn, 1, 5, 9)
    check(other, rand(*X), golden={"attn.q.out_features": 12})


def test_attention_over_channels():
    """XCiT: the scores are d x d, so the head's dimensions are rows of the softmax."""

    class Channels(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.split(layer(x)).transpose(-2, -1) for layer in (self.q, self.k, self.v))
            return self.proj(((q @ k.transpose(-2, -1)).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))

    net = model(Channels())
    kill_value(net.attn, 0, 5, 10)
    kill_scores(net.attn, 1, 6, 11)
    kill_head(net.attn, 1)
    check(net, rand(*X))


def test_parameter_used_directly_in_a_matmul():
    net = Net(
        lambda s, x: s.out(torch.tanh(s.lin(x)) @ s.matrix),
        lin=noisy(nn.Linear(4, 6)),
        matrix=nn.Parameter(torch.randn(6, 5)),
        out=nn.Linear(5, 2),
    )
    with torch.no_grad():
        net.matrix[1] = 0  # unread
        net.matrix[:, 3] = 0  # a column of zeros: what `out` reads there is 0
        net.out.weight[:, 4] = 0
    squeezed = check(net, rand(2, 4))
    assert squeezed.model.lin.out_features == 5
    assert squeezed.model.out.in_features <= 4


# --------------------------------------------------------------------------------------------------- MultiheadAttention


@torch.no_grad()
def multihead(batch_first: bool, need_weights: bool, **options: object) -> nn.Module:
    def run(s, x, memory=None):
        h = s.stem(x)
        out, weights = s.attn(
            h, memory if memory is not None else h, memory if memory is not None else h, need_weights=need_weights
        )
        return s.out(out) if weights is None else (s.out(out), weights)

    net = Net(
        run,
        stem=nn.Linear(12, 12),
        attn=nn.MultiheadAttention(12, 3, batch_first=batch_first, **options),
        out=nn.Linear(12, 12),
    )
    noisy(net)
    net.attn.out_proj.weight[:, 4:8] = 0
    return net


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_loses_a_dead_head(batch_first):
    net = multihead(batch_first, need_weights=False)
    check(
        net, rand(*X), golden={"attn": NarrowMultiheadAttention, "attn.num_heads": 2, "attn.in_proj_weight": (24, 12)}
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_that_returns_its_weights(batch_first):
    """The mean over heads reads the scores of every head."""
    check(multihead(batch_first, need_weights=True), rand(*X), golden={"attn.num_heads": 3})


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"kdim": 12, "vdim": 12}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str
)
def test_multihead_attention_with_options_is_exact(options):
    check(multihead(True, need_weights=False, **options), rand(*X))


def test_multihead_attention_between_two_sequences_is_exact():
    check(multihead(True, need_weights=False), (rand(*X), rand(2, 7, 12)))
    check(multihead(True, need_weights=False), [(rand(*X),), (rand(*X), rand(2, 7, 12))])


def test_transformer_encoder_layer():
    net = noisy(
        nn.Sequential(
            nn.Linear(6, 12), nn.TransformerEncoderLayer(12, 3, 10, batch_first=True, norm_first=True), nn.Linear(12, 2)
        )
    )
    with torch.no_grad():
        net[1].self_attn.out_proj.weight[:, 4:8] = 0
        net[1].linear1.weight[2] = 0
    check(net, rand(2, 5, 6), golden={"1.self_attn.num_heads": 2, "1.linear1.out_features": 9})
