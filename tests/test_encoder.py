"""nn.TransformerEncoder: its code reads its layers' attributes, and takes the stream's width for that of all heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from check import check
from nets import dead, rand
from torch import Tensor, nn

import squeeze_release as sr

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested")


def encoder(batch_first: bool = True, norm_first: bool = False) -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first, norm_first=norm_first)
    net = nn.Sequential(nn.Linear(6, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # all layers are copies of one
            parameter.add_(torch.randn_like(parameter) / 8)
    return net


@torch.no_grad()
def kill_attention(net: nn.Sequential, number: int) -> None:
    attention = net[1].layers[number].self_attn
    dead(attention.out_proj, *range(16))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_an_attention_that_does_nothing_goes(number: int, batch_first: bool, norm_first: bool, tmp_path: Path) -> None:
    net = encoder(batch_first, norm_first)
    kill_attention(net, number)
    x = rand(2, 5, 6)
    small, report = check(net, x)
    assert not isinstance(small[1].layers[number].self_attn, nn.MultiheadAttention)
    assert report.params_before - report.params_after >= 4 * 16 * 16 + 3 * 16
    sr.save(small, tmp_path / "small.safetensors")
    again = sr.load(encoder(batch_first, norm_first).double(), tmp_path / "small.safetensors")
    with torch.no_grad():
        assert torch.equal(again.eval()(x), small.eval()(x))


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_that_does_nothing_goes(number: int) -> None:
    net = encoder(norm_first=True)
    kill_attention(net, number)
    dead(net[1].layers[number].linear2, *range(16))
    small, _ = check(net, rand(2, 5, 6))
    left = sum(parameter.numel() for parameter in small[1].layers[number].parameters())
    assert left <= 2 * 16 + 2 * 2 * 16  # biases, norms


@torch.no_grad()
def _without_channels(net: nn.Sequential, *channels: int) -> None:
    """Zero in every layer that writes them."""
    dead(net[0], *channels, bias=0.0)
    for layer in net[1].layers:
        dead(layer.self_attn.out_proj, *channels)
        dead(layer.linear2, *channels)
        for norm in (layer.norm1, layer.norm2):
            norm.weight[list(channels)] = norm.bias[list(channels)] = 0


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_stream_shrinks_while_all_heads_live(norm_first: bool, weights: bool) -> None:
    class Explains(nn.Module):
        """Returns the weights of the first attention too, as those do who look at them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = encoder(norm_first=norm_first)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            y = self.net(x)
            if not weights:
                return y
            seen = self.net[0](x)
            return y, self.net[1].layers[0].self_attn(seen, seen, seen, need_weights=True)[1]

    net = Explains()
    _without_channels(net.net, *range(10, 16))
    small, _ = check(net, rand(2, 5, 6))
    assert small.net[0].out_features == 10
    assert small.net[1].layers[0].self_attn.in_proj_weight.shape == (48, 10)


def test_padding_is_masked_as_before() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder()

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            out: Tensor = self.net[2](self.net[1](self.net[0](x), src_key_padding_mask=padding))
            return out.masked_fill(padding[..., None], 0.0)

    net = Padded()
    _without_channels(net.net, *range(12, 16))
    kill_attention(net.net, 1)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    small, _ = check(net, (rand(2, 5, 6), padding))
    assert small.net[0].out_features == 12
