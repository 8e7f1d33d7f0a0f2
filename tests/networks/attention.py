"""Attention in the ways people write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import HandRMSNorm


class Attention(nn.Module):
    """Self-attention with one key head for each query head."""

    def __init__(self, width: int, heads: int, head_dim: int, style: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.inner, self.style = heads, head_dim, heads * head_dim, style
        self.scale = head_dim**-0.5
        if style == "packed":
            self.qkv = nn.Linear(width, 3 * self.inner)
        else:
            self.q, self.k, self.v = (nn.Linear(width, self.inner) for _ in range(3))
        self.proj = nn.Linear(self.inner, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.style == "packed":
            q, k, v = (
                self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            )
        else:
            q, k, v = (
                part(x).view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
                for part in (self.q, self.k, self.v)
            )
        if self.style == "matmul":
            y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        elif self.style == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, -1))


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


class GroupedAttention(nn.Module):
    """Several query heads to a key head, and all that language models do to queries, keys and scores.

    share: "expand" or "repeat" copies of the key heads, or "gqa" which leaves that to the op.
    rotary: "", "halves" or "pairs", with a table computed on the way. norm: "", "head" or "all" channels of q and k.
    scores: "sdpa", "causal", "written", "softcap" or "bias", a parameter for each head and pair of positions.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        shared_by: int,
        head_dim: int,
        share: str = "expand",
        rotary: str = "",
        norm: str = "",
        scores: str = "sdpa",
        bias: bool = True,
        tokens: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.groups, self.head_dim = heads * shared_by, heads, shared_by, head_dim
        self.share, self.rotary, self.scores, self.scaling = share, rotary, scores, head_dim**-0.5
        self.q = nn.Linear(width, self.num_heads * head_dim, bias=bias)
        self.k, self.v = (nn.Linear(width, heads * head_dim, bias=bias) for _ in range(2))
        self.proj = nn.Linear(self.num_heads * head_dim, width, bias=bias)
        self.over, self.in_op = norm, share == "gqa" and scores in ("sdpa", "causal") and shared_by > 1
        if norm:
            self.q_norm = HandRMSNorm(head_dim if norm == "head" else self.num_heads * head_dim, "llama")
            self.k_norm = nn.RMSNorm(head_dim if norm == "head" else heads * head_dim)
        if rotary:
            self.register_buffer("inv_freq", 10.0 ** (-torch.arange(0, head_dim, 2) / head_dim), persistent=False)
        if scores == "bias":
            self.table = nn.Parameter(torch.randn(self.num_heads, tokens, tokens))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.over == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        if self.over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = self.turned(q, tokens), self.turned(k, tokens)
        y = self.attended(q, *self.shared(k, v), mask)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, -1))

    def turned(self, x: Tensor, tokens: int) -> Tensor:
        angles = torch.arange(tokens, device=x.device)[:, None] * self.inv_freq
        if self.rotary == "halves":
            angles = torch.cat([angles, angles], -1)
            return rotate_halves(x, angles.cos(), angles.sin())
        angles = angles.repeat_interleave(2, -1)
        return rotate_pairs(x, angles.cos(), angles.sin())

    def shared(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.groups == 1 or self.in_op:
            return k, v
        if self.share == "repeat":
            return k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        return copies(k, self.groups), copies(v, self.groups)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.scores in ("sdpa", "causal"):
            causal = self.scores == "causal" and mask is None
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=self.scaling, enable_gqa=self.in_op
            )
        scores = q @ k.transpose(-2, -1) * self.scaling
        if self.scores == "softcap":
            scores = 5.0 * torch.tanh(scores / 5.0)
        elif self.scores == "bias":
            scores = scores + self.table
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return scores.softmax(-1) @ v


def copies(x: Tensor, groups: int) -> Tensor:
    """repeat_kv of transformers."""
    batch, heads, tokens, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, tokens, head_dim).reshape(batch, heads * groups, tokens, head_dim)


class Multihead(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Cross(nn.Module):
    """Queries from one stream; keys and values, of another width maybe, from another."""

    def __init__(self, width: int, memory: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, kdim=memory, vdim=memory, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(x, memory, memory, need_weights=False)[0]
