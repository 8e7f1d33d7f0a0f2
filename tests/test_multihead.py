"""The stand-in for nn.MultiheadAttention."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from check import close
from torch import nn

from squeeze_release import modules

F64 = torch.float64


def twins(narrow: bool = False, **how: object) -> tuple[nn.MultiheadAttention, modules.NarrowMultiheadAttention]:
    mha = nn.MultiheadAttention(8, 2, dtype=F64, **how).eval()
    for parameter in mha.parameters():
        nn.init.normal_(parameter)
    cut = copy.deepcopy(mha)
    if narrow:  # head widths 4 -> 3 for q and k, 4 -> 2 for v, where what is cut is zero in the original
        qk, v = torch.tensor([0, 1, 3, 4, 6, 7]), torch.tensor([1, 2, 4, 7])
        rows = torch.cat([qk, 8 + qk, 16 + v])
        dead = torch.ones(24, dtype=torch.bool).index_fill(0, rows, False)
        with torch.no_grad():
            for name in ("in_proj_weight", "in_proj_bias"):
                getattr(mha, name)[dead] = 0
                setattr(cut, name, nn.Parameter(getattr(mha, name)[rows]))
            cut.out_proj.weight = nn.Parameter(cut.out_proj.weight[:, v])
    heads = (3, 2) if narrow else (4, 4)
    return mha, modules.narrow_attention(cut, 2, *heads, 0.5)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_attention_equals_the_original(narrow: bool, batch_first: bool, grad: bool) -> None:
    mha, small = twins(narrow, batch_first=batch_first)
    self_x = torch.randn(3, 3, 8, dtype=F64)
    other = torch.randn(3, 5, 8, dtype=F64) if batch_first else torch.randn(5, 3, 8, dtype=F64)
    for kind, deep, padded, weights, cross, batched in itertools.product([None, "bool", "float"], *[[True, False]] * 5):
        key, source = (other, 5) if cross else (self_x, 3)
        mask = torch.rand(*([6 if batched else 2] if deep else []), 3, source) > 0.6
        padding = torch.rand(*([3] if batched else []), source) > 0.6
        mask[..., 0], padding[..., 0] = False, False  # no row is masked out
        if kind == "float":
            mask, padding = mask * torch.randn(mask.shape, dtype=F64), padding * torch.randn(padding.shape, dtype=F64)
        if not batched:
            key = key[0] if batch_first else key[:, 0]
        query = key if not cross else self_x if batched else self_x[0]
        call = {
            "attn_mask": mask if kind else None,
            "key_padding_mask": padding if padded else None,
            "need_weights": weights,
            "average_attn_weights": deep,
        }
        with torch.set_grad_enabled(grad):
            want, got = mha(query, key, key, **call), small(query, key, key, **call)
        close(got[0], want[0])
        assert (got[1] is None) == (want[1] is None)
        if want[1] is not None:
            close(got[1], want[1])


@pytest.mark.parametrize("how", [{}, {"kdim": 6, "vdim": 5}, {"bias": False}])
@pytest.mark.parametrize("weights", [True, False])
def test_attention_parameters_and_gradients(how: dict[str, object], weights: bool) -> None:
    mha, small = twins(**how)
    query, key = torch.randn(3, 2, 8, dtype=F64), torch.randn(4, 2, int(how.get("kdim", 8)), dtype=F64)
    value = torch.randn(4, 2, int(how.get("vdim", 8)), dtype=F64)
    for module in (mha, small):
        module(query, key, value, need_weights=weights)[0].sin().sum().backward()
    assert list(small.state_dict()) == list(mha.state_dict())
    for (name, got), want in zip(small.named_parameters(), mha.parameters(), strict=True):
        if name != "in_proj_bias":
            close(got.grad, want.grad)
        else:  # the key's bias cancels in the softmax, so its gradient is noise
            close(got.grad[[*range(8), *range(16, 24)]], want.grad[[*range(8), *range(16, 24)]])


@pytest.mark.parametrize("weights", [True, False])
def test_attention_hint_and_dropout(weights: bool) -> None:
    mha, small = twins(batch_first=True, dropout=0.5)
    x, mask = torch.randn(2, 9, 8, dtype=F64), nn.Transformer.generate_square_subsequent_mask(9, dtype=F64)
    call = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
    close(small(x, x, x, **call)[0], mha(x, x, x, **call)[0])
    assert not torch.equal(small.train()(x, x, x, **call)[0], small(x, x, x, **call)[0])
    with pytest.raises(RuntimeError, match="pass the mask too"):
        small(x, x, x, is_causal=True)


def test_attention_takes_over_parameters_hooks_and_flags() -> None:
    mha, calls = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True).eval(), []
    mha.register_forward_hook(lambda *_: calls.append(1))
    small = modules.narrow_attention(mha, 2, 4, 4, 0.5)
    x = torch.randn(2, 3, 8)
    small(x, x, x)
    assert calls == [1] and small.in_proj_weight is mha.in_proj_weight and mha._qkv_same_embed_dim
    assert (small.training, small.batch_first, small.dropout, small.embed_dim) == (False, True, 0.25, 8)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_inside_an_encoder_layer_is_not_bypassed() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=F64).eval()
    mha, small = twins(narrow=True, batch_first=True)
    layer.self_attn = mha
    x = torch.randn(2, 3, 8, dtype=F64)
    want = layer(x)
    layer.self_attn = small
    with torch.no_grad():  # where the layer's fast path would read the parameters itself
        close(layer(x), want.detach())
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    encoder.use_nested_tensor = True  # as it is when the attention was swapped after construction
    with torch.no_grad(), pytest.raises(RuntimeError, match="set use_nested_tensor = False"):
        encoder(x, src_key_padding_mask=torch.tensor([[False] * 3, [False, False, True]]))
