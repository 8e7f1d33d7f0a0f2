"""Zeros become small noise of the right size, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import squeeze_release as sr


def _zeros(net: nn.Module) -> int:
    return sum(int((p == 0).sum()) for name, p in net.named_parameters() if name.endswith("weight") and p.dim() > 1)


def test_every_zero_of_a_squeezed_network_is_released_and_nothing_else_moves() -> None:
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        net[0].weight.mul_(torch.rand(32, 6) < 0.3)
        net[3].weight.mul_(torch.rand(4, 32) < 0.3)
        net[0].weight[:8] = 0
    small, _ = sr.squeeze(net.eval(), torch.randn(2, 6))
    before = {name: p.clone() for name, p in small.named_parameters()}
    zeros = _zeros(small)
    assert sr.release(small) == zeros > 0
    for name, parameter in small.named_parameters():
        kept = before[name] != 0 if parameter.dim() > 1 else torch.ones_like(parameter, dtype=torch.bool)
        assert torch.equal(parameter[kept], before[name][kept])
    weights = [small[0].weight, small[3].weight]
    assert sum(int(w.count_nonzero()) for w in weights) == sum(w.numel() for w in weights)  # mask-alive is deployable


@pytest.mark.parametrize("pool", ["layer", "column"])
def test_noise_has_the_mean_and_deviation_of_the_survivors(pool: str) -> None:
    layer = nn.Linear(2, 4000)
    with torch.no_grad():
        layer.weight[:, 0] = 3 + torch.randn(4000)
        layer.weight[:, 1] = -5 + 2 * torch.randn(4000)
        layer.weight[:2000] = 0
        survivors = layer.weight[2000:].clone()
    sr.release(layer, scale=0.01, pool=pool, generator=torch.Generator().manual_seed(0))
    drawn = layer.weight[:2000].detach() / 0.01
    expected = survivors if pool == "column" else survivors.flatten()[:, None].expand(-1, 2)
    assert torch.allclose(drawn.mean(0), expected.mean(0), atol=0.25)
    assert torch.allclose(drawn.std(0), expected.std(0), rtol=0.06)


def test_scale_zero_leaves_zeros() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight[0] = 0
    assert sr.release(layer, scale=0.0) == 4
    assert _zeros(layer) == 4


def test_the_generator_decides() -> None:
    def released(seed: int) -> torch.Tensor:
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(8) + 1).fill_diagonal_(0)
        sr.release(layer, generator=torch.Generator().manual_seed(seed))
        return layer.weight.detach()

    assert torch.equal(released(1), released(1))
    assert not torch.equal(released(1), released(2))


def test_layers_with_next_to_nothing_left() -> None:
    for left in (0, 1, 2):
        layer = nn.Conv2d(4, 4, 3)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight.view(-1)[:left] = 1.0
        assert sr.release(layer, pool="column") == 144 - left
        assert _zeros(layer) == 0
        assert bool(layer.weight.isfinite().all())


def test_attention_is_released_norms_and_embeddings_are_not() -> None:
    net = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "n": nn.LayerNorm(4), "e": nn.Embedding(3, 4)})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert sr.release(net) == 4 * 12 + 4 * 4
    assert not net["n"].weight.any() and not net["e"].weight.any() and not net["a"].in_proj_bias.any()


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(sr.InputError, match="pool='row'"):
        sr.release(nn.Linear(2, 2), pool="row")
