"""Whole channels: what goes together in any model, and that squeezing leaves nothing of it behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.prune import ChannelMasks, find_channels, random


def convnext() -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model("convnext_tiny", depths=(1, 1, 2, 1), dims=(16, 24, 32, 48), num_classes=10), images(64)


def vit() -> tuple[nn.Module, Any]:
    import timm

    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 10}
    return timm.create_model("vit_small_patch16_224", **shape), images(32)


def resnet() -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model("resnet10t", num_classes=10), images(64)


def densenet() -> tuple[nn.Module, Any]:
    import timm

    return timm.create_model("densenet121", growth_rate=8, block_config=(2, 2, 2, 2), num_classes=10), images(64)


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config), torch.randint(64, (2, 9))


def encoder() -> tuple[nn.Module, Any]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 5)), torch.randn(2, 6, 8)


def grouped() -> tuple[nn.Module, Any]:
    conv = nn.Conv2d(16, 16, 3, padding=1, groups=4)
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(16, 4, 1)), images(8)


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def sizes(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("make", [convnext, vit, resnet, densenet, llama, encoder, grouped], ids=lambda f: f.__name__)
def test_nothing_of_a_dead_channel_is_left(make: Callable[[], tuple[nn.Module, Any]]) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    masks = ChannelMasks(model, find_channels(model, inputs))
    assert masks.alive == masks.total > 0.9 * sizes(model)
    masks.prune(random(model), keep=0.4)
    assert 0.2 * masks.total < masks.alive <= 0.4 * masks.total
    small, report = sr.squeeze(model.eval(), inputs)
    assert report.max_error is not None and report.max_error < 1e-10
    assert sizes(small) <= masks.alive + sizes(model) - masks.total


def test_a_stream_is_a_row_of_its_writers_and_a_column_of_its_readers() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.up, self.down, self.head = (
                nn.Linear(3, 4),
                nn.Linear(4, 8),
                nn.Linear(8, 4),
                nn.Linear(4, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(x + self.down(self.up(x).relu()))

    found = find_channels(Residual(), torch.randn(1, 3), skip=["up"])
    assert found.count == 3  # up is kept, and with it the stream; of the inputs, any may go
    found = find_channels(Residual(), torch.randn(1, 3))
    assert found.count == 3 + 4 + 8
    stream = found.of["stem.weight"][0]
    for name, dim in (("up.weight", 1), ("down.weight", 0), ("down.bias", 0), ("head.weight", 1)):
        assert torch.equal(found.of[name][dim], stream)
    assert "head.bias" not in found.of and 0 not in found.of["head.weight"]


def test_the_channel_that_matters_least_goes_first_and_stays_dead() -> None:
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    masks = ChannelMasks(net, find_channels(net, torch.randn(1, 2), skip=[]))
    scores = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
    scores["0.weight"][4], scores["2.weight"][:, 4], scores["0.bias"][4] = 0.1, 0.1, 0.1
    masks.prune(scores, keep=0.9)
    assert not net[0].weight[4].any() and not net[2].weight[:, 4].any() and net[0].bias[4] == 0
    assert int(net[0].weight.count_nonzero()) == 10
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.register_step_post_hook(masks.keep)
    net(torch.randn(8, 2)).square().mean().backward()
    optimizer.step()
    assert not net[0].weight[4].any() and net[0].bias[4] == 0
    scores["0.weight"][4], scores["2.weight"][:, 4] = 9.0, 9.0
    masks.prune(scores, keep=0.5)
    assert not net[0].weight[4].any() and masks.alive <= 0.5 * masks.total
    other = ChannelMasks(net, find_channels(net, torch.randn(1, 2)))
    other.load_state(masks.state())
    assert other.alive == masks.alive and all(torch.equal(m, masks.named()[n]) for n, m in other.named().items())


def test_widths_are_multiples_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    model, inputs = convnext()
    masks = ChannelMasks(model, find_channels(model, inputs), multiple=8)
    for keep in (0.7, 0.45):
        before = masks.named()
        masks.prune(random(model), keep)
        assert 0.8 * keep * masks.total < masks.alive <= keep * masks.total
        assert not any(bool((mask & ~before[name]).any()) for name, mask in masks.named().items())  # the dead stay dead
    small, _ = sr.squeeze(model.eval(), inputs)
    widths = [layer.weight.size(0) for layer in small.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert all(width % 8 == 0 for width in widths[:-1]) and widths[-1] == 10 and len(set(widths)) > 3


def test_a_filter_goes_with_the_channel_that_it_reads() -> None:
    stem, depthwise = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, groups=4)
    net = nn.Sequential(stem, nn.ReLU(), depthwise, nn.ReLU(), nn.Conv2d(8, 2, 1))
    found = find_channels(net, images(8), skip=["4"])
    assert found.count == 3 + 4 and bool((found.needs < 0).all())  # the last layer keeps its inputs, the filters
    found = find_channels(net, images(8))
    reads = found.needs[found.of["2.weight"][0]]
    assert torch.equal(reads, found.of["0.weight"][0].repeat_interleave(2))
    masks = ChannelMasks(net, found)
    scores = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
    scores["0.weight"][1] = scores["2.weight"][2:4] = 0.01
    masks.prune(scores, keep=0.77)
    assert not stem.weight[1].any() and not depthwise.weight[2:4].any() and int(depthwise.bias.count_nonzero()) == 6
    empty = ChannelMasks(nn.ReLU(), find_channels(nn.ReLU(), torch.randn(2, 3)), multiple=8)
    empty.prune({}, keep=0.5)
    assert empty.total == empty.alive == 0


def test_no_network_is_cut_in_two() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    masks = ChannelMasks(net, find_channels(net, torch.randn(1, 4)), multiple=4)
    scores = {name: torch.rand_like(parameter) for name, parameter in net.named_parameters()}
    scores["2.weight"] *= 1e-9  # by itself, the first to go
    for keep in (0.5, 0.2, 0.1, 0.0):
        masks.prune(scores, keep)
        assert all(bool(layer.weight.any()) for layer in (net[0], net[2], net[4]))


def test_a_cycle_by_channels_is_as_large_as_its_masks_say(tmp_path: Path) -> None:
    config = replace(tiny.CONFIG, grain="channel", last_ratio=0.5, score="mean", threshold=0.7)
    whole = tiny.run(config, run_dir=tmp_path / "whole")
    assert whole.summary["cycles"] == 3 and whole.summary["deployable_params"] < 250 < whole.summary["unpruned_params"]
    assert whole.summary["max_error"] < 1e-10 and whole.summary["accuracy"] > 0.8


def test_a_network_of_which_no_channel_may_go_is_refused() -> None:
    with pytest.raises(sr.InputError, match="there is no weight to prune"):
        tiny.run(replace(tiny.CONFIG, grain="channel", skip=("0", "3", "5")))
