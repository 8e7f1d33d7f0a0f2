"""nn.MultiheadAttention with any width inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .state import state_of


class NarrowMultiheadAttention(nn.Module):
    """nn.MultiheadAttention with any width inside: `head_dim` for q and k, `v_head_dim` for v, and a softmax `scale`.

    Takes over the parameters of `mha`, which are cut already, and its hooks and flags: same names, same call, same
    result. The rows of in_proj_weight are q, k, v in that order. Knows no bias_k, bias_v and add_zero_attn.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    out_proj: nn.Linear
    dropout: float
    batch_first: bool

    def __init__(
        self,
        mha: nn.MultiheadAttention | NarrowMultiheadAttention,
        num_heads: int,
        head_dim: int,
        v_head_dim: int,
        scale: float,
    ) -> None:
        super().__init__()
        vars(self).update(state_of(mha))
        self.num_heads, self.head_dim, self.v_head_dim, self.scale = num_heads, head_dim, v_head_dim, scale
        self._rows = [num_heads * head_dim, num_heads * head_dim, num_heads * v_head_dim]
        # nn.TransformerEncoderLayer's fast path would compute from the parameters at its own widths: this refuses it.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            raise RuntimeError("no nested tensors here: set use_nested_tensor = False on the nn.TransformerEncoder")
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: pass the mask too")
        batched = query.dim() == 3
        q, k, v = (self._heads(x, batched) for x in self._project(query, key, value))
        use_hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if use_hint else self._mask(attn_mask, key_padding_mask, q, k)
        weights: Tensor | None = None
        if need_weights:
            scores = q * self.scale @ k.transpose(-2, -1)
            scores = scores if mask is None else scores + mask
            weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            dropout = self.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, use_hint, scale=self.scale)
        out = out.permute(2, 0, 1, 3) if batched and not self.batch_first else out.transpose(1, 2)
        out = self.out_proj(out.flatten(2))
        return out if batched else out.squeeze(0), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        packed, bias, rows = self.in_proj_weight, self.in_proj_bias, self._rows
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, bias).split_with_sizes(rows, -1)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = apart if packed is None else packed.split_with_sizes(rows)
        biases = (None, None, None) if bias is None else bias.split_with_sizes(rows)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _heads(self, x: Tensor, batched: bool) -> Tensor:
        """To (batch, heads, length, head_dim)."""
        x = x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)
        return x.reshape(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as one, to be added to the scores."""
        total = None
        if attn_mask is not None:
            each = (1, 1) if attn_mask.dim() == 2 else (q.size(0), self.num_heads)
            total = _additive(attn_mask, q.dtype).reshape(*each, *attn_mask.shape[-2:])
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, q.dtype).reshape(q.size(0), 1, 1, k.size(2))
            total = padding if total is None else total + padding
        return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def narrow_attention(
    mha: nn.MultiheadAttention | NarrowMultiheadAttention, num_heads: int, head_dim: int, v_head_dim: int, scale: float
) -> NarrowMultiheadAttention:
    """The stand-in for an `mha` whose parameters are cut already."""
    return NarrowMultiheadAttention(mha, num_heads, head_dim, v_head_dim, scale)
