"""Residual CNNs, filter masks for them, and their sizes counted from the mask alone. Nothing here knows the package.

A channel of a stream stays if some writer computes it, an inner one if its filter lives. Where dead channels are
constants other than 0, one of them stays in front of zero padding as the carrier of all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def resnet18(constants: str) -> nn.Module:
    """10 classes. Norms are such that a dead filter becomes a positive constant, or 0."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    net: nn.Module = models.resnet18(num_classes=10).eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d) and constants == "positive":
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, 0.1, 0.5)
            nn.init.uniform_(norm.running_mean, -0.5, 0)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return net


def writers(net: nn.Module) -> Iterator[list[nn.Conv2d]]:
    """The convolutions that write to each stream."""
    for i in range(1, 5):
        blocks = getattr(net, f"layer{i}")
        first = net.conv1 if i == 1 else blocks[0].downsample[0]
        yield [first, *(block.conv2 for block in blocks)]


@torch.no_grad()
def plant(net: nn.Module, aligned: bool, dead: float = 0.5) -> dict[nn.Module, Tensor]:
    """Zero that share of the filters of every convolution, at random; returns which live."""
    generator = torch.Generator().manual_seed(0)

    def some(width: int) -> Tensor:
        return torch.randperm(width, generator=generator) >= round(dead * width)

    alive = {conv: some(conv.out_channels) for conv in net.modules() if isinstance(conv, nn.Conv2d)}
    for stream in writers(net):
        shared = some(stream[0].out_channels)
        alive |= dict.fromkeys(stream, shared) if aligned else {}
    for conv, mask in alive.items():
        conv.weight[~mask] = 0
    return alive


def needs_carrier(masks: list[Tensor], stage: int) -> bool:
    """Whether a padded reader of a stream sees no constant but in channels that nobody ever writes.

    Where it sees a constant in a channel that is written later on, that one will do. The last stage is read by no
    padded convolution at its end, the first one by one after its first writer; all are read after the second writer.
    """
    written = [masks[0], masks[0] | masks[1], masks[0] | masks[1] | masks[2]]
    readers = written[0 if stage == 1 else 1 : 2 if stage == 4 else 3]
    return any(not bool((~here & written[2]).any()) for here in readers)


def dense_size(net: nn.Module, alive: dict[nn.Module, Tensor], carrier: int) -> int:
    """Union of the living writers, and living filters inside, plus carriers; biases that folding creates left out."""
    total, read = 0, 3
    for i, stream in enumerate(writers(net), 1):
        masks = [alive[conv] for conv in stream]
        width = int(torch.stack(masks).any(0).sum()) + carrier * needs_carrier(masks, i)
        if i == 1:
            total += read * width * 49 + 2 * width
            read = width
        else:
            total += read * width + 2 * width  # the downsampling shortcut
        for block in getattr(net, f"layer{i}"):
            inner = int(alive[block.conv1].sum()) + carrier
            total += 9 * read * inner + 2 * inner + 9 * inner * width + 2 * width
            read = width
    return total + read * 10 + 10


def created_biases(net: nn.Module) -> int:
    return sum(conv.bias.numel() for conv in net.modules() if isinstance(conv, nn.Conv2d) and conv.bias is not None)


def compact_size(net: nn.Module, alive: dict[nn.Module, Tensor], carrier: int, own: int) -> int:
    """Every convolution computes its living filters and reads what was written so far, plus a carrier.

    A reader may take for its carrier a channel that is written later only: `own` says if the streams need one besides.
    """
    total, here = 3 * 49 * int(alive[net.conv1].sum()), alive[net.conv1]
    for i, stream in enumerate(writers(net), 1):
        width = int(torch.stack([alive[conv] for conv in stream]).any(0).sum()) + own
        total += 2 * width if i == 1 else int(here.sum()) * int(alive[stream[0]].sum()) + 2 * width
        for block in getattr(net, f"layer{i}"):
            inner = int(alive[block.conv1].sum())
            total += 9 * (int(here.sum()) + carrier) * inner + 2 * (inner + carrier)
            total += 9 * (inner + carrier) * int(alive[block.conv2].sum()) + 2 * width
            here = alive[block.conv2] | (alive[stream[0]] if block is getattr(net, f"layer{i}")[0] else here)
    return total + int(here.sum()) * 10 + 10


class Block(nn.Module):
    """Option A: the shortcut takes every second pixel and pads the channels with zeros."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.stride, self.pad = width // before, (width - before) // 2
        self.conv1 = nn.Conv2d(before, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride == 2:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    """He et al., 6n + 2 layers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(before, width), *(Block(width, width) for _ in range(n - 1)))
            for before, width in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


@torch.no_grad()
def zero_weakest_half(net: nn.Module) -> None:
    """The half of every convolution's filters with the lowest L1 norm."""
    for conv in net.modules():
        if isinstance(conv, nn.Conv2d):
            norms = conv.weight.abs().sum((1, 2, 3))
            conv.weight[norms.argsort()[: len(norms) // 2]] = 0


def inner_width(block: Block, carrier: bool) -> int:
    """Living filters between the two convolutions, and a carrier if a dead one leaves more than 0 behind the ReLU."""
    dead = (block.conv1.weight == 0).flatten(1).all(1)
    norm = block.bn1
    constant = norm.bias - norm.weight * norm.running_mean / (norm.running_var + norm.eps).sqrt()
    return int((~dead).sum()) + (carrier and bool((constant[dead] > 0).any()))
