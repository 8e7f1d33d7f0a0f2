"""The modules that may stand in for the user's own: everything else in a squeezed model keeps its class.

CompensatedLayerNorm          LayerNorm over the kept channels, exact for the full width
IndexedLinear, IndexedConv    gather their inputs first, so that the writer may stay wider than the reader
Shift, Constant, Passthrough  a block that adds a constant, one that is a constant, one that does nothing
NarrowMultiheadAttention      MultiheadAttention whose heads are narrower than embed_dim / num_heads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CompensatedLayerNorm(nn.Module):
    """LayerNorm that remembers the constant channels it lost: same output on the kept channels, at the kept width.

    Of the K removed channels it stores `count` K, `mean` m_R and `m2`, the sum of squared deviations, in float64. With
    m kept channels of mean mu_A and variance var_A, and C = m + K, the full-width statistics are

        mu = (m mu_A + K m_R) / C        var = (m var_A + M2 + (m K / C) (mu_A - m_R)^2) / C

    the paper's equation (1), arranged so that nothing cancels. The three follow the module's device, never its dtype:
    in half precision M2 would overflow. Change them by `merge`, `load_state_dict` or assignment, not in place.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    count: Tensor
    mean: Tensor
    m2: Tensor
    _mean32: Tensor
    _base32: Tensor

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        channel_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if channel_dim not in (-1, 1):
            raise ValueError(f"channel_dim is -1 (last) or 1 (channels first), not {channel_dim}")
        self.eps, self.channel_dim = eps, channel_dim
        self._kept, self._removed = normalized_shape, 0
        one, zero = (fill(normalized_shape, device=device, dtype=dtype) for fill in (torch.ones, torch.zeros))
        self.register_parameter("weight", nn.Parameter(one) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(zero) if elementwise_affine and bias else None)
        for name in ("count", "mean", "m2"):
            self.register_buffer(name, torch.zeros((), device=device, dtype=torch.float64))
        self._derive()

    def merge(self, constants: Tensor) -> None:
        """Remember more removed channels, by their constants: the pairwise update of Chan et al., in float64."""
        new = constants.detach().to(self.mean).flatten()
        if new.numel():
            delta, share = new.mean() - self.mean, new.numel() / (self.count + new.numel())
            self.m2 = self.m2 + (new - new.mean()).square().sum() + delta.square() * self.count * share
            self.mean = self.mean + delta * share
            self.count = self.count + new.numel()

    @property
    def normalized_shape(self) -> tuple[int]:
        """The kept width, that of the weight; settable for a norm without one."""
        return (self._kept,)

    @normalized_shape.setter
    def normalized_shape(self, shape: tuple[int]) -> None:
        self._kept = shape[0]
        self._derive()

    @property
    def removed(self) -> int:
        """How many channels are gone: K."""
        return self._removed

    @property
    def S(self) -> Tensor:
        """The paper's S, the sum of the removed constants."""
        return self.count * self.mean

    @property
    def Q(self) -> Tensor:
        """The paper's Q, the sum of their squares."""
        return self.m2 + self.count * self.mean.square()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.channel_dim == -1 else x.movedim(1, -1)
        if x.dtype in (torch.float16, torch.bfloat16):
            # float32 inside, one rounding at the end, as F.layer_norm does; only the CPU's autocast leaves it alone.
            stays_float32 = x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)
            out = self._normalize(x.float()).to(torch.float32 if stays_float32 else x.dtype)
        else:
            out = self._normalize(x)
        return out if self.channel_dim == -1 else out.movedim(-1, 1)

    def _normalize(self, x: Tensor) -> Tensor:
        weight, bias, kept, gone = self.weight, self.bias, self._kept, self._removed
        width = kept + gone
        if x.shape[-1] != kept:
            raise RuntimeError(f"CompensatedLayerNorm keeps {kept} channels, got an input of shape {tuple(x.shape)}")
        x = x.contiguous()  # as F.layer_norm's output is; and a norm over a strided dimension costs ten copies
        mean, base = self._mean32, self._base32
        if x.dtype == torch.float64:
            mean, base = self.mean, self.m2 / width + self.eps
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            # Written out: inductor makes one kernel of it. In eager var_mean alone is ten times F.layer_norm.
            var, mu = torch.var_mean(x, -1, correction=0, keepdim=True)
            shift = mu - mean
            var = var * (kept / width) + shift.square() * (kept * gone / width**2)
            y = (x - (mean + shift * (kept / width))) * torch.rsqrt(var + base)
        else:
            # In the fewest passes: y is centred on the full mean, and then C var = |y|^2 + M2 + K (mu - m_R)^2.
            shift = torch.sub(x.sum(-1, True), mean, alpha=kept)  # C (mu - m_R)
            y = x - torch.add(mean, shift, alpha=1 / width)
            norm = torch.linalg.vector_norm(y, 2, -1, True)
            var = torch.addcmul(base, shift, shift, value=gone / width**3)
            rstd = torch.addcmul(var, norm, norm, value=1 / width).rsqrt()
            traced = torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            if not (traced or torch.is_grad_enabled()):
                # Only y is large, so nothing else need be allocated: fresh pages cost more than the arithmetic.
                y = y.mul_(rstd) if weight is None else y.mul_(rstd).mul_(weight)
                return y if bias is None else y.add_(bias)
            y = y * rstd
        if weight is None or bias is None:
            return y if weight is None else y * weight
        return torch.addcmul(bias, y, weight)

    def _derive(self) -> None:
        # float32 copies of what forward reads, because mixing float64 scalars in costs a microsecond an op.
        weight = getattr(self, "weight", None)
        self._kept = self._kept if weight is None else weight.numel()
        if not self.count.is_meta:
            self._removed = int(self.count)
        self.register_buffer("_mean32", self.mean.float(), persistent=False)
        self.register_buffer("_base32", (self.m2 / (self.count + self._kept) + self.eps).float(), persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("count", "mean", "m2", "eps", "weight") and "_base32" in self._buffers:
            self._derive()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._derive()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompensatedLayerNorm:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def extra_repr(self) -> str:
        return f"{self._kept}, removed={self.removed}, eps={self.eps}, channel_dim={self.channel_dim}"


class _Indexed(nn.Module):
    """Gathers its input channels by `index`, then is the layer it inherits from."""

    index: Tensor
    _channels_at = -1  # from the end, so that unbatched inputs work

    def __init__(self, *args: Any, index: Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _set_index(self, index)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.index_select(self._channels_at, self.index))  # type: ignore[no-any-return]


class IndexedLinear(_Indexed, nn.Linear):
    """nn.Linear of `x[..., index]`; takes nn.Linear's arguments and `index`, an in_features long int64 tensor."""


class IndexedConv1d(_Indexed, nn.Conv1d):
    """nn.Conv1d of `x[:, index]`; takes nn.Conv1d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -2


class IndexedConv2d(_Indexed, nn.Conv2d):
    """nn.Conv2d of `x[:, index]`; takes nn.Conv2d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -3


class IndexedConv3d(_Indexed, nn.Conv3d):
    """nn.Conv3d of `x[:, index]`; takes nn.Conv3d's arguments and `index`, an in_channels long int64 tensor."""

    _channels_at = -4


INDEXED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: IndexedLinear, nn.Conv1d: IndexedConv1d, nn.Conv2d: IndexedConv2d, nn.Conv3d: IndexedConv3d}


def can_index(module: nn.Module) -> bool:
    """Whether `with_index` takes this module: a Linear or Conv that runs the forward of nn.Linear or nn.Conv."""
    return _indexed_class(module) is not None


def with_index(module: nn.Module, index: Tensor) -> nn.Module:
    """`module` reading `x[index]` along the channels: a new module with the same Parameters, hooks and flags.

    Weight and in_features (in_channels) are already as wide as `index`. A module that is indexed already composes.
    """
    cls = _indexed_class(module)
    if cls is None:
        raise TypeError(f"{type(module).__name__} runs code of its own; only a plain Linear or Conv can gather inputs")
    new = cls.__new__(cls)
    vars(new).update(_state(module))
    old = module.index if isinstance(module, _Indexed) else None
    _set_index(new, index if old is None else old[index.to(old.device)])
    return new


def _indexed_class(module: nn.Module) -> type[nn.Module] | None:
    kind = type(module)
    if kind in INDEXED.values():
        return kind
    # A parametrized module has its weight as a property of its class, and a patched one its forward in its dict.
    if "forward" in vars(module) or "parametrizations" in module._modules:
        return None
    for base, indexed in INDEXED.items():
        theirs, ours = ([getattr(k, name, None) for name in ("forward", "_conv_forward")] for k in (kind, base))
        if isinstance(module, base) and theirs == ours:
            return indexed
    return None


def _set_index(module: nn.Module, index: Tensor) -> None:
    width = module.in_features if isinstance(module, nn.Linear) else module.in_channels
    if index.shape != (width,):
        raise ValueError(f"{type(module).__name__} reads {width} channels, got an index of shape {tuple(index.shape)}")
    weight = next(iter(module.parameters(recurse=False)))
    module.register_buffer("index", index.detach().to(weight.device, torch.int64, copy=True))


def _state(module: nn.Module) -> dict[str, Any]:
    """What a stand-in takes over: Parameters and hooks are shared, so that optimizers and hook handles stay good."""
    own = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    return vars(module) | {name: vars(module)[name].copy() for name in own}


class Passthrough(nn.Module):
    """A block that does nothing: returns the first of its arguments, whatever else it is called with.

    `outputs` is for blocks that return a tuple: n of them, the first one and then None.
    """

    def __init__(self, *, outputs: int = 0) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self._compute(args[0] if args else next(iter(kwargs.values())))
        return (y, *[None] * (self.outputs - 1)) if self.outputs else y

    def _compute(self, x: Tensor) -> Tensor:
        return x


class Shift(Passthrough):
    """A block that comes down to x + bias, one bias a channel."""

    def __init__(self, bias: Tensor, *, channel_dim: int = -1, outputs: int = 0) -> None:
        super().__init__(outputs=outputs)
        self.bias = nn.Parameter(bias)
        self.channel_dim = channel_dim

    def _compute(self, x: Tensor) -> Tensor:
        return x + _per_channel(self.bias, x, self.channel_dim)


class Constant(Passthrough):
    """A block whose output is `value`, one number a channel, at every position of its input."""

    def __init__(self, value: Tensor, *, channel_dim: int = -1, outputs: int = 0) -> None:
        super().__init__(outputs=outputs)
        self.value = nn.Parameter(value)
        self.channel_dim = channel_dim

    def _compute(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.channel_dim] = self.value.numel()
        # A copy: the caller may write to it, as to any layer's output.
        return _per_channel(self.value, x, self.channel_dim).expand(shape).clone(memory_format=torch.contiguous_format)


def _per_channel(values: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    return values if channel_dim == -1 else values.view(-1, *[1] * (x.dim() - 2))


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
        self, mha: nn.MultiheadAttention, num_heads: int, head_dim: int, v_head_dim: int, scale: float
    ) -> None:
        super().__init__()
        vars(self).update(_state(mha))
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
    mha: nn.MultiheadAttention, num_heads: int, head_dim: int, v_head_dim: int, scale: float
) -> NarrowMultiheadAttention:
    """The stand-in for an `mha` whose parameters are cut already."""
    return NarrowMultiheadAttention(mha, num_heads, head_dim, v_head_dim, scale)
