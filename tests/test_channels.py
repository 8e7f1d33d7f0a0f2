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


def phi3() -> tuple[nn.Module, Any]:
    """Its code cuts q, k and v out by numbers from its config, and gate and up are chunks of one layer."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Phi3ForCausalLM(config), torch.randint(64, (2, 9))


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


@pytest.mark.parametrize(
    "make", [convnext, vit, resnet, densenet, llama, phi3, encoder, grouped], ids=lambda f: f.__name__
)
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


class Attention(nn.Module):
    """q, k and v in one layer; `literal`: in code that knows how wide a head is."""

    def __init__(self, heads: int, literal: bool = False) -> None:
        super().__init__()
        self.stem, self.qkv, self.proj, self.head = (nn.Linear(a, b) for a, b in ((3, 8), (8, 48), (16, 8), (8, 2)))
        self.heads, self.literal = heads, literal

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        dim = 16 // self.heads if self.literal else self.qkv(x).shape[-1] // 3 // self.heads
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, dim)).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3)
        return self.head(x + self.proj(y.transpose(1, 2).flatten(2)))


def test_a_head_goes_whole_or_one_dimension_of_all_heads() -> None:
    net, x = Attention(4), torch.randn(2, 5, 3)
    found = find_channels(net, x)
    assert int(found.whole.sum()) == 4 and int(found.across.sum()) == 4
    assert found.of["qkv.weight"][0].shape == (2, 48) and found.of["proj.weight"][1].shape == (2, 16)
    masks = ChannelMasks(net, found)
    scores = {name: torch.ones_like(parameter) for name, parameter in net.named_parameters()}
    q_k_v = scores["qkv.weight"].view(3, 4, 4, 8)
    q_k_v[:, 2], q_k_v[..., 1, :] = 0.01, 0.02
    while masks.alive > 450:  # until the second head and the first dimension of all are gone
        masks.prune(scores, keep=masks.alive / masks.total - 1e-3)
    alive = net.qkv.weight.view(3, 4, 4, 8).any(-1)
    assert not alive[:, 2].any() and not alive[..., 1].any() and int(alive.sum()) == 3 * 3 * 3
    small, _ = sr.squeeze(net.eval(), x)
    assert small.qkv.weight.shape[0] == 27 and sizes(small) == masks.alive + sizes(net) - masks.total


def test_of_a_single_head_only_dimensions_go() -> None:
    """Without queries and keys a head still gives the mean of its values: nothing could be removed."""
    found = find_channels(Attention(1), torch.randn(2, 5, 3))
    assert not found.whole.any() and int(found.across.sum()) == 16
    q, k, v = found.of["qkv.weight"][0].view(3, 16)
    assert torch.equal(q, k) and torch.equal(q, v) and torch.equal(q[None], found.of["proj.weight"][1])


def test_what_the_code_does_not_follow_may_not_go() -> None:
    torch.manual_seed(0)
    net, x = Attention(4, literal=True), torch.randn(2, 5, 3)
    found = find_channels(net, x)
    assert not found.across.any()
    masks = ChannelMasks(net, found)
    masks.prune(random(net), keep=0.5)
    small, _ = sr.squeeze(net.eval(), x)
    assert sizes(small) <= masks.alive + sizes(net) - masks.total


def test_the_parts_of_a_chunk_lose_the_same_channels() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 12), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.up(x).chunk(2, -1)
            return self.down(value * gate.sigmoid())

    found = find_channels(Gated(), torch.randn(2, 3))
    assert found.count == 3 + 6
    assert torch.equal(found.of["up.weight"][0].view(2, 6)[0], found.of["down.weight"][1][0])


def test_weights_do_not_matter_and_chance_is_left_alone() -> None:
    net, inputs = grouped()
    before = find_channels(net, inputs)
    nn.init.zeros_(net[2].weight)  # a network may begin with a branch that says nothing
    state = torch.get_rng_state()
    after = find_channels(net, inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert after.count == before.count == 3 + 4 + 4 + 4
    assert not net[2].weight.any() and net[0].weight.any()


def test_heads_are_no_width() -> None:
    """What should be a multiple of 8 are widths: of six heads any may go, and of their dimensions eight at a time."""
    import timm

    torch.manual_seed(0)
    shape = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": 1, "num_heads": 6, "num_classes": 10}
    model = timm.create_model("vit_small_patch16_224", **shape)
    masks = ChannelMasks(model, find_channels(model, images(32)), multiple=8)
    scores = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    scores["blocks.0.attn.qkv.weight"].view(3, 6, 16, 96)[:, 1] = 0.001
    masks.prune(scores, keep=0.96)
    alive = model.blocks[0].attn.qkv.weight.view(3, 6, 16, 96).any(-1)
    assert alive.any(-1).any(0).tolist() == [True, False, True, True, True, True]
    assert int(alive.sum()) == 3 * 5 * 16


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
    assert torch.equal(reads, found.of["0.weight"][0].repeat_interleave(2, dim=1))
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
