"""What a model notes about its own widths follows them, so that its own methods still work after a squeeze."""

from __future__ import annotations

import copy

import pytest
import torch
from check import check, noisy
from nets import Net, dead, rand, unread
from torch import nn

import squeeze_release as sr

timm = pytest.importorskip("timm")

GONE = [1, 4, 7]


@torch.no_grad()
def silence(*layers: nn.Module) -> None:
    """Writers of a stream that leave these channels 0."""
    for layer in layers:
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter[GONE] = 0


def resnet() -> nn.Module:
    net = noisy(timm.create_model("test_resnet"))
    last = net.layer4[-1]
    silence(getattr(last, "bn3", last.bn2), *[block.downsample[-1] for block in net.layer4 if block.downsample])
    for block in net.layer4[:-1]:
        silence(getattr(block, "bn3", block.bn2))
    return net


def efficientnet() -> nn.Module:
    net = noisy(timm.create_model("test_efficientnet"))
    silence(net.bn2)
    return net


def convnext() -> nn.Module:
    """The last stage; behind it a layer norm whose outputs for these channels nobody reads."""
    net = noisy(timm.create_model("test_convnext"))
    silence(net.stages[-1].downsample[-1], *[block.mlp.fc2 for block in net.stages[-1].blocks])
    for block in net.stages[-1].blocks:
        with torch.no_grad():
            block.conv_dw.weight[GONE], block.conv_dw.bias[GONE] = 0, 0
        unread(block.mlp.fc1, *GONE)
    unread(net.head.fc, *GONE)
    return net


def vit() -> nn.Module:
    net = noisy(timm.create_model("test_vit", img_size=32, patch_size=8))
    with torch.no_grad():
        net.pos_embed[..., GONE] = 0
        net.cls_token[..., GONE] = 0
    silence(net.patch_embed.proj)
    for block in net.blocks:
        silence(block.attn.proj, block.mlp.fc2)
        unread(block.attn.qkv, *GONE)
        unread(block.mlp.fc1, *GONE)
    unread(net.head, *GONE)
    return net


def swin() -> nn.Module:
    net = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4
    )
    noisy(net)
    stage = net.layers[-1]
    with torch.no_grad():
        stage.downsample.reduction.weight[GONE] = 0
    for block in stage.blocks:
        silence(block.attn.proj, block.mlp.fc2)
        unread(block.attn.qkv, *GONE)
        unread(block.mlp.fc1, *GONE)
    unread(net.head.fc, *GONE)
    return net


BUILDERS = [resnet, efficientnet, convnext, vit, swin]
SIZE = {"vit": 32, "swin": 32}


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_timm_resets_its_classifier(build):
    net = build().eval()
    x = rand(2, 3, *[SIZE.get(build.__name__, 64)] * 2)
    width = net.num_features
    small = check(net, x, golden={"num_features": width - 3, "head_hidden_size": width - 3}, again=False).model
    assert small.feature_info[-1]["num_chs"] == (net.feature_info[-1]["num_chs"] - (build is not efficientnet) * 3)
    assert small.get_classifier().in_features == width - 3
    features = small.forward_features(x)
    torch.testing.assert_close(small.forward_head(features), net(x), rtol=1e-9, atol=1e-9)

    small.reset_classifier(5)
    small.double().train()
    loss = small(x).square().sum()
    loss.backward()
    assert small.get_classifier().weight.shape == (5, width - 3)
    assert small.get_classifier().weight.grad.abs().max() > 0


def test_timm_notes_of_a_model_that_lost_inner_channels_only_stay():
    net = noisy(timm.create_model("test_vit", img_size=32, patch_size=8)).eval()
    dead(net.blocks[0].mlp.fc1, 1)
    golden = {"embed_dim": net.embed_dim, "num_features": net.num_features, "blocks.0.mlp.fc1.out_features": 191}
    check(net, rand(2, 3, 32, 32), golden=golden, again=False)


def test_feature_info_of_every_stage():
    net = noisy(timm.create_model("test_resnet")).eval()
    silence(net.bn1, *[block.bn2 for block in net.layer1])  # the stem writes the stream of the first stage
    small = sr.squeeze(net, torch.randn(2, 3, 64, 64)).model
    with torch.no_grad():
        stem = small.act1(small.bn1(small.conv1(torch.randn(2, 3, 64, 64))))
    assert [info["num_chs"] for info in small.feature_info[:2]] == [stem.size(1), 29] == [29, 29]
    assert small.feature_info[-1] == net.feature_info[-1]


# ------------------------------------------------------------------------------------------------------ by hand


class Noted(nn.Module):
    """Notes its widths in many ways; only `reads` is read by the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(4, 8), nn.Linear(8, 12), nn.Linear(12, 2)
        self.embed_dim, self.hidden_dims, self.depth, self.num_heads, self.num_classes = 8, [8, 12], 8, 8, 2
        self.head_dim, self.reads_dim = 8, 8
        noisy(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.stem(x)) * (self.reads_dim / 8)
        return self.head(torch.tanh(self.mid(y)))


def test_names_that_speak_of_widths_follow_and_others_do_not():
    net = Noted()
    dead(net.stem, 1)
    dead(net.mid, 2, 3)
    golden = {"stem.out_features": 7, "mid.out_features": 10, "embed_dim": 7, "hidden_dims": [7, 10]}
    golden |= {"depth": 8, "num_heads": 8, "num_classes": 2, "head_dim": 8, "reads_dim": 8}
    small = check(net, rand(2, 4), golden=golden).model
    assert type(small) is Noted and net.hidden_dims == [8, 12]


def test_a_width_that_became_two_stays():
    """Two layers were 8 wide, and are no longer equally wide: which of them is meant?"""
    net = Net(
        lambda s, x: s.head(torch.tanh(s.b(torch.tanh(s.a(x))))),
        a=nn.Linear(4, 8),
        b=nn.Linear(8, 8),
        head=nn.Linear(8, 2),
    )
    noisy(net)
    net.embed_dim, net.num_features = 8, 8
    dead(net.a, 1)
    dead(net.b, 1, 2)
    check(net, rand(2, 4), golden={"embed_dim": 8, "num_features": 6, "a.out_features": 7, "b.out_features": 6})


def test_own_borders_count_before_those_of_children():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.dim = nn.Linear(8, 8), nn.Linear(8, 8), 8

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(torch.tanh(self.fc1(x)))

    net = Net(lambda s, x: s.head((y := s.stem(x)) + s.mlp(y)), stem=nn.Linear(4, 8), mlp=Mlp(), head=nn.Linear(8, 2))
    noisy(net)
    for layer in (net.stem, net.mlp.fc2):
        dead(layer, 1)
    dead(net.mlp.fc1, 1, 2, 3)
    check(net, rand(2, 4), golden={"mlp.dim": 7, "mlp.fc1.weight": (5, 7)})


def test_the_class_is_what_it_was_and_the_original_is_untouched():
    net = Noted()
    dead(net.stem, 1)
    notes = copy.deepcopy(vars(net)["embed_dim"])
    small = sr.squeeze(net, rand(2, 4).float(), inplace=False).model
    assert type(small) is Noted and "__getattribute__" not in vars(type(small)) and net.embed_dim == notes
