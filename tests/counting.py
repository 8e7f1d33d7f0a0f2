"""How wide a layer may be, counted from zeros alone: what the tests hold a squeeze against.

Nothing here knows the package. FC nets: fold what sees nothing, drop what nobody reads, until nothing changes. A
ConvNeXt block: an inner channel lives if its row and its column do; a channel between DWConv and PWConv1 may go if its
filter and its column are dead. A transformer's MLP is an FC net; a head lives if it has a row of v and a column.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fc_widths(weights: Sequence[Tensor], dead_units: Sequence[Tensor | None] = ()) -> list[int]:
    """Widths of a chain of Linear layers, inputs first, at the fixed point of folding and dropping.

    A unit without a non-zero weight is a constant: it folds, so its column goes. A unit without a reader is dropped, so
    its row goes. `dead_units[i]` marks units of layer i that something else makes constant (a BatchNorm of gamma 0).
    """
    alive = [weight != 0 for weight in weights]
    for mask, dead in zip(alive, dead_units, strict=False):
        if dead is not None:
            mask[dead] = False
    while True:
        before = sum(int(mask.sum()) for mask in alive)
        for mask, reader in itertools.pairwise(alive):
            reader[:, ~mask.any(1)] = False
            mask[~reader.any(0)] = False
        if sum(int(mask.sum()) for mask in alive) == before:
            break
    return [int(alive[0].any(0).sum()), *(int(mask.any(1).sum()) for mask in alive[:-1]), len(weights[-1])]


def fc_params(widths: Sequence[int], norm: bool = True) -> int:
    """Parameters of a chain of Linear layers with biases, hidden ones followed by a norm with weight and bias."""
    linear = sum(i * o + o for i, o in itertools.pairwise(widths))
    return linear + (2 * sum(widths[1:-1]) if norm else 0)


class BlockWidths(NamedTuple):
    between: int  # channels between DWConv and PWConv1, at most
    inner: int  # channels between PWConv1 and PWConv2, exactly


def convnext_block(dw: Tensor, pw1: Tensor, pw2: Tensor) -> BlockWidths:
    """What the weights of one block allow; a column counts only where a living inner channel reads it."""
    inner = (pw1 != 0).any(1) & (pw2 != 0).any(0)
    column = (pw1[inner] != 0).any(0)
    dead = ~(dw != 0).flatten(1).any(1) & ~column
    return BlockWidths(len(dw) - int(dead.sum()), int(inner.sum()))


class AttentionWidths(NamedTuple):
    heads: int
    qk: int  # dimensions of each head of query and key, where they can be cut alone
    v: int  # dimensions of each head of value, likewise


def attention(qkv: Tensor, bias: Tensor, proj: Tensor, heads: int) -> AttentionWidths:
    """What the weights of one attention allow, its rows being q, k and v, head by head.

    A value channel goes if it is the same for all tokens (a zero row) or unread; a head if all of its value channels
    do. A dimension of q and k goes if q is 0 there, or k the same for all tokens. Every head gives up equally many.
    """
    q, k, v = (part.reshape(heads, -1, qkv.size(1)) != 0 for part in qkv.chunk(3))
    zero_q = ~(q.any(2) | (bias.chunk(3)[0] != 0).reshape(heads, -1))
    live_v = v.any(2) & (proj != 0).any(0).reshape(heads, -1)
    live_qk = k.any(2) & ~zero_q
    stays = live_v.any(1)
    if not stays.any():
        return AttentionWidths(0, 0, 0)
    return AttentionWidths(int(stays.sum()), int(live_qk[stays].sum(1).max()), int(live_v[stays].sum(1).max()))


def size(*modules: nn.Module | None) -> int:
    """Parameters of modules, together."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


@torch.no_grad()
def sparsify(share: float, *weights: Tensor, seed: int = 0) -> None:
    """Zero so large a random share of each weight, in place."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        weight.mul_(torch.rand(weight.shape, generator=generator) >= share)


class Masked(nn.Module):
    """A parametrization that multiplies by a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


# ---------------------------------------------------------------- masks for a transformer block, attention classes


class TransformerBlock(NamedTuple):
    """The parts of a block by what they are, whoever wrote it."""

    norm1: nn.Module
    attention: nn.Module
    qkv: Tensor
    qkv_bias: Tensor
    proj: nn.Linear
    norm2: nn.Module
    mlp: nn.Module
    fc1: nn.Linear
    fc2: nn.Linear


def by_head(rows: Tensor, heads: int) -> Tensor:
    """q, k, v rows as (3, heads, head_dim, ...), a view."""
    return rows.view(3, heads, -1, *rows.shape[1:])


def mlp_width(b: TransformerBlock, heads: int) -> None:
    b.fc1.weight[:100] = 0
    b.fc2.weight[:, 50:200] = 0


def dead_heads(b: TransformerBlock, heads: int) -> None:
    by_head(b.qkv, heads)[2, 0] = 0  # a value that is the same for all tokens
    b.proj.weight.view(len(b.proj.weight), heads, -1)[:, 3] = 0  # a head that nobody reads


def same_places(b: TransformerBlock, heads: int) -> None:
    by_head(b.qkv, heads)[1:, :, :8] = 0  # keys and values that are constant, at the same places


def ragged_places(b: TransformerBlock, heads: int) -> None:
    q, k, v = by_head(b.qkv, heads)
    for head in range(heads):
        v[head, head : head + 10] = 0
        k[head, 20 + head : 24 + head] = 0
        q[head, 50 - head : 54 - head] = 0
        by_head(b.qkv_bias, heads)[0, head, 50 - head : 54 - head] = 0


def attention_twins(b: TransformerBlock, heads: int) -> None:
    q, k, v = by_head(b.qkv, heads)
    v[1, :8], k[1, :8] = 0, 0  # in one head only
    v[:, 60], q[:, 61] = 0, 0  # in all, but a constant query other than 0 weighs the keys
    b.proj.weight.view(len(b.proj.weight), heads, -1)[:, 2, :8] = 0  # unread in one head only
    b.fc1.weight[0] = 0
    b.fc1.weight[0, 0], b.fc1.weight[0, 1] = 0.5, -0.5  # sums to 0
    b.fc1.weight[:, 5] = 0  # an unread channel in front of a norm


def proj_dead(b: TransformerBlock, heads: int) -> None:
    b.proj.weight.zero_()


def fc2_dead(b: TransformerBlock, heads: int) -> None:
    b.fc2.weight.zero_()


def block_dead(b: TransformerBlock, heads: int) -> None:
    proj_dead(b, heads)
    fc2_dead(b, heads)


def dead_at_the_start(b: TransformerBlock, heads: int) -> None:
    by_head(b.qkv, heads)[2] = 0
    b.fc1.weight.zero_()


def only_qk(b: TransformerBlock, heads: int) -> None:
    by_head(b.qkv, heads)[1, :, 8:16] = 0


def only_v(b: TransformerBlock, heads: int) -> None:
    b.proj.weight.view(len(b.proj.weight), heads, -1)[:, :, 3:8] = 0


def almost_dead(b: TransformerBlock, heads: int) -> None:
    block_dead(b, heads)
    b.proj.weight[3, 70] = 0.5  # one channel of the second head
    b.fc2.weight[3, 7] = 0.5


TRANSFORMER_MASKS = {
    mask.__name__: mask
    for mask in (
        mlp_width,
        dead_heads,
        same_places,
        ragged_places,
        attention_twins,
        proj_dead,
        fc2_dead,
        block_dead,
        dead_at_the_start,
        only_qk,
        only_v,
        almost_dead,
    )
}


class Fused(nn.Module):
    """With scaled_dot_product_attention, and projections of its own for q, k and v."""

    def __init__(self, dim: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.scale = (dim // num_heads) ** -0.5
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(self.mix(q, k, v, mask).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)


class WrittenOut(Fused):
    """With matmul and softmax, and a scale in an attribute."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-2, -1) * self.scale
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v


class Packed(nn.Module):
    """One projection for all three, and a head width in an attribute."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, self.num_heads * self.head_dim))
