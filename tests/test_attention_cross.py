"""nn.MultiheadAttention on its other paths: cross-attention, weights that nobody asks for, masks, nn.Transformer."""

from __future__ import annotations

import pytest
import torch
from check import check, noisy
from nets import Net, rand
from torch import Tensor, nn

from squeeze_release.modules import NarrowMultiheadAttention


@torch.no_grad()
def multihead(batch_first: bool = True, weights: bool = True, **options: object) -> nn.Module:
    """Three heads of width 4, the middle one unread."""

    def run(s: nn.Module, x: Tensor, memory: Tensor | None = None, **masks: Tensor) -> Tensor:
        query = s.stem(x)
        key = query if memory is None else memory
        return s.out(s.attn(query, key, key, need_weights=weights, **masks)[0])

    attn = nn.MultiheadAttention(12, 3, batch_first=batch_first, **options)
    net = noisy(Net(run, stem=nn.Linear(12, 12), attn=attn, out=nn.Linear(12, 2)))
    net.attn.out_proj.weight[:, 4:8] = 0
    return net


GOLDEN = {"attn": NarrowMultiheadAttention, "attn.num_heads": 2, "attn.out_proj.in_features": 8}
MASKS = {
    "no mask": {},
    "padding": {"key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5])},
    "bool": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "float": {"attn_mask": torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5)},
}


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_a_head_goes_under_a_mask(mask: str, weights: bool) -> None:
    check(multihead(weights=weights), rand(2, 5, 12), MASKS[mask], golden=GOLDEN)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_a_head_goes_where_the_weights_are_dropped(weights: bool, batch_first: bool) -> None:
    check(multihead(batch_first, weights), rand(2, 5, 12), golden=GOLDEN)


def test_a_mask_for_each_head_fixes_their_number() -> None:
    each = torch.zeros(6, 5, 5, dtype=torch.float64)
    check(multihead(), rand(2, 5, 12), {"attn_mask": each}, golden={"attn": nn.MultiheadAttention})


@pytest.mark.parametrize("weights", [True, False])
def test_cross_attention_cuts_its_packed_weight(weights: bool) -> None:
    golden = {**GOLDEN, "attn.in_proj_weight": (24, 12), "attn.in_proj_bias": (24,)}
    check(multihead(weights=weights), (rand(2, 5, 12), rand(2, 7, 12)), golden=golden)


def test_cross_attention_with_three_weights() -> None:
    net = multihead(kdim=9, vdim=9)
    check(net, (rand(2, 5, 12), rand(2, 7, 9)), golden={**GOLDEN, "attn.k_proj_weight": (8, 9)})


def test_cross_attention_loses_dimensions_of_its_heads() -> None:
    net = multihead(weights=False)
    with torch.no_grad():
        for row in (1, 10):  # keys of both heads that stay
            net.attn.in_proj_weight[12 + row] = 0
        net.attn.out_proj.weight[:, [0, 11]] = 0
    golden = {**GOLDEN, "attn.head_dim": 3, "attn.v_head_dim": 3, "attn.out_proj.in_features": 6}
    check(net, (rand(2, 5, 12), rand(2, 7, 12)), golden=golden)


def test_a_living_dimension_keeps_its_head() -> None:
    net = multihead()
    with torch.no_grad():
        net.attn.out_proj.weight[3, 6] = 0.5
    check(net, (rand(2, 5, 12), rand(2, 7, 12)), golden={"attn": nn.MultiheadAttention, "attn.num_heads": 3})


def test_transformer() -> None:
    net = noisy(nn.Transformer(16, 4, 1, 1, 10, batch_first=True))
    with torch.no_grad():
        net.encoder.layers[0].self_attn.out_proj.weight[:, :4] = 0
        net.decoder.layers[0].self_attn.out_proj.weight[:, 4:8] = 0
        net.decoder.layers[0].multihead_attn.out_proj.weight[:, 8:] = 0
        net.decoder.layers[0].linear1.weight[2] = 0
    check(
        net,
        (rand(2, 5, 16), rand(2, 4, 16)),
        golden={
            "encoder.layers.0.self_attn.num_heads": 3,
            "decoder.layers.0.self_attn.num_heads": 3,
            "decoder.layers.0.multihead_attn.num_heads": 2,
            "decoder.layers.0.linear1.out_features": 9,
        },
    )


def test_a_constant_that_cross_attention_reads_stays() -> None:
    """Its bias is a part of another one: nothing folds there."""
    net = multihead()
    with torch.no_grad():
        net.stem.weight[3] = 0
    check(net, (rand(2, 5, 12), rand(2, 7, 12)), golden={**GOLDEN, "stem.out_features": 12})
